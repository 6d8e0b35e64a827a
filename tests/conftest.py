"""What the tests ask of libraries before these start."""

import os

# Some virtual machines announce AMX and do not execute it: a bf16 product then ends the process with "Illegal
# instruction".  oneDNN reads this when it first multiplies; processes that tests start inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

# without a CUDA device the kernels run under Triton's interpreter, which must be asked for at import
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
