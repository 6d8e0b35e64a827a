"""What `metrics.csv` holds, as TensorBoard curves."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Board:
    """Writes to `RUN/tensorboard` where that is wanted, and does nothing otherwise."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self._class = _writer_class() if wanted else None

    def row(self, row: Mapping[str, Any]) -> None:
        """One validation: every number of it at its step; later points of an earlier try are dropped."""
        if self._class is None:
            return
        if self._writer is None:
            self._writer = self._class(str(self._folder), purge_step=row["step"])
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard logs need: pip install 'gpattention[train]'") from error
    return SummaryWriter
