"""Where to compute."""

import torch


def choose_device(name: torch.device | str = "auto") -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU where there is one."""
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"expected device to be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"expected a device of this machine, got {name!r}, and it has no CUDA GPU")
    return device
