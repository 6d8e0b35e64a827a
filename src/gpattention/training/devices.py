"""Where to compute."""

import torch

_EXPECTED = "expected device to be auto, cpu, cuda or cuda:N"


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one."""
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{_EXPECTED}, got {name!r}") from error
    if device.type not in (
        "cpu",
        "cuda",
    ):  # others of torch's, such as mps, lack the float64 that is used here
        raise ValueError(f"{_EXPECTED}, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"expected a device of this machine, got {name!r}, and it has no CUDA GPU")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"expected a device of this machine, got {name!r}, and it has {count} CUDA GPUs")
    return device
