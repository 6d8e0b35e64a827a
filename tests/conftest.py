"""What the tests ask of libraries before these start."""

import os

# Some virtual machines announce AMX and do not execute it: a bf16 product then ends the process with "Illegal
# instruction".  oneDNN reads this when it first multiplies; processes that tests start inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

# Nothing is random without a seed, and no machine is too slow for a property.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")

# without a CUDA device the kernels run under Triton's interpreter, which must be asked for at import
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Compilers and the interpreter take twice as long while coverage is traced, and what these tests run of the
# library others run as well.
UNTRACED = (
    "gp/test_runtime.py",
    "attention/test_runtime.py",
    "ops/test_operators.py",
    "models/test_predicting_models.py::TestRuntime",
    "models/fused/test_training.py",
    "hosts/test_families.py::test_fused",
    "hosts/test_variance.py::test_fused",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No coverage where it costs much and tells nothing."""
    for item in items:
        if any(name in item.nodeid for name in UNTRACED):
            item.add_marker("no_cover")
