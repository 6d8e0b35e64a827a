"""When the fused kernels run, and the reason given when they do not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpattention import gp
from gpattention.ops import switch

X = torch.zeros(2, 3)


def on_gpu(dtype: torch.dtype = torch.float32) -> Any:
    """All that the switch asks of a tensor."""
    return SimpleNamespace(dtype=dtype, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_has_triton", lambda: True)
    monkeypatch.delenv("GPATTENTION_FUSED", raising=False)


def test_auto_takes_measured_sizes_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "SHOWN_TOKENS", 64)
    monkeypatch.setattr(switch, "SHOWN_CHANNELS", 32)
    assert gp.why_not_fused(on_gpu(), tokens=64, channels=32) is None
    assert gp.why_not_fused(X) == "the tensors are on cpu"
    reason = gp.why_not_fused(on_gpu(), tokens=65)
    assert reason == "65 tokens are more than the 64 measured on a GPU ('on' takes up to 128)"
    reason = gp.why_not_fused(on_gpu(), channels=33)
    assert reason == "33 channels are more than the 32 measured on a GPU ('on' takes up to 64)"
    assert gp.why_not_fused(on_gpu(torch.float64)) == "they compute in float32, not float64"


def test_auto_leaves_kernels_that_were_not_measured() -> None:
    cuda = torch.device("cuda")
    reason = switch.why_not_fused_on(cuda, torch.float32, measured=False)
    assert reason == "the kernel was not measured on a GPU ('on' takes it)"
    assert switch.why_not_fused_on(cuda, torch.float32) is None
    with gp.fused_kernels("on"):
        assert switch.why_not_fused_on(cuda, torch.float32, measured=False) is None
    with gp.fused_kernels("off"):
        assert switch.why_not_fused_on(cuda, torch.float32, measured=False) == "switched off"


def test_on_takes_all_that_fits_and_raises_beyond() -> None:
    with gp.fused_kernels("on"):
        assert gp.why_not_fused(on_gpu(), tokens=128, channels=64) is None
        with pytest.raises(RuntimeError, match="cannot run here: 129 tokens are more than the 128 that fit"):
            gp.why_not_fused(on_gpu(), tokens=129)
        with pytest.raises(RuntimeError, match="65 channels are more than the 64 that fit"):
            gp.why_not_fused(on_gpu(), channels=65)


def test_on_runs_on_the_cpu_under_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with gp.fused_kernels("on"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert gp.why_not_fused(X) is None
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(RuntimeError, match="switched on but cannot run here: the tensors are on cpu"):
            gp.why_not_fused(X)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "_has_triton", lambda: False)
    assert gp.why_not_fused(on_gpu()) == "Triton is not installed (pip install 'gpattention[triton]')"


def test_blocks_nest_and_end() -> None:
    with gp.fused_kernels("off"):
        assert gp.why_not_fused(on_gpu()) == "switched off"
        with gp.fused_kernels("auto"):
            assert gp.why_not_fused(on_gpu()) is None
        assert gp.why_not_fused(on_gpu()) == "switched off"
    assert gp.why_not_fused(on_gpu()) is None


def test_the_environment_decides_outside_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPATTENTION_FUSED", "off")
    assert gp.why_not_fused(on_gpu()) == "switched off"
    with gp.fused_kernels("auto"):
        assert gp.why_not_fused(on_gpu()) is None
    monkeypatch.setenv("GPATTENTION_FUSED", "yes")
    with pytest.raises(ValueError, match="expected GPATTENTION_FUSED to be one of auto, on, off, got 'yes'"):
        gp.why_not_fused(on_gpu())


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected mode to be one of auto, on, off, got 'fast'"):
        gp.fused_kernels("fast").__enter__()  # type: ignore[arg-type]


def test_transformed_and_exported_calls_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = []

    def look(x: torch.Tensor) -> torch.Tensor:
        reason.append(gp.why_not_fused(x))
        return x

    with gp.fused_kernels("on"):  # which does not make an error of it
        torch.func.vmap(look)(X)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    look(on_gpu())
    with gp.fused_kernels("on"):
        look(on_gpu())
    expected = "the call is exported (a block of 'on' keeps the kernels)"
    assert reason == ["the call is transformed by torch.func", expected, None]


def test_triton_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    switch._has_triton.cache_clear()
    monkeypatch.setattr(switch, "find_spec", lambda name: None if name == "triton" else X)
    assert [switch._has_triton(), switch._has_triton()] == [False, False]
    assert switch._has_triton.cache_info().misses == 1
    switch._has_triton.cache_clear()
