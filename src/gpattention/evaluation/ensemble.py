"""Deep ensembles (Lakshminarayanan et al. 2017): the members' predictions are the samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpattention.checks import check_whole
from gpattention.evaluation.checks import check_predictor
from gpattention.evaluation.predictor import Predictor
from gpattention.models.prediction import Prediction
from gpattention.models.rows import Inputs, Progress


class DeepEnsemble:
    """Predictors trained alike from different seeds, mixed with equal weights.

    The members' logits are stacked on the sample axis.  M members that do not draw, or `samples=0`, give
    S = M; M members that draw `samples` each give S = M * `samples`, the first member's first.  Members
    draw with different noise.  Layer variances are averaged if every member tells them.
    """

    def __init__(self, members: Sequence[Predictor]) -> None:
        if not members:
            raise ValueError("expected at least one member, got none")
        for member in members:
            check_predictor(member)
        self._members = tuple(members)

    def __len__(self) -> int:
        return len(self._members)

    def predict(
        self,
        inputs: Inputs,
        *,
        samples: int = 10,
        seed: int = 0,
        batch_size: int | None = None,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction:
        """The mixture of all members; `samples` is for each member."""
        seed = check_whole("seed", seed)
        parts = [
            member.predict(
                inputs,
                samples=samples,
                seed=seed * len(self) + number,  # no two (seed, member) share one
                batch_size=batch_size,
                first_item=first_item,
                progress=self._part(progress, number),
            )
            for number, member in enumerate(self._members)
        ]
        sizes = [(part.samples, part.classes) for part in parts]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"expected members of one (samples, classes), so that all weigh the same, got {sizes}: "
                "with samples=0 no member draws"
            )
        logits = torch.cat([part.logits for part in parts])  # [M S, B, C]
        return Prediction.from_logits(logits, _mean_variances(parts))

    def _part(self, progress: Progress | None, number: int) -> Progress | None:
        """One member's progress as the ensemble's."""
        if progress is None:
            return None
        return lambda done, total: progress(number * total + done, len(self) * total)


def _mean_variances(parts: Sequence[Prediction]) -> tuple[Tensor | None, ...] | None:
    """Layer by layer, where all members tell one of the same shape."""
    told = [part.variances for part in parts if part.variances is not None]
    if len(told) < len(parts) or len({len(variances) for variances in told}) > 1:
        return None
    means: list[Tensor | None] = []
    for layer in zip(*told, strict=True):
        present = [variance for variance in layer if variance is not None]
        alike = len(present) == len(parts) and len({variance.shape for variance in present}) == 1
        means.append(torch.stack(present).mean(0) if alike else None)
    return tuple(means)
