"""What measured times depend on: the machine, the versions, the day, the commit."""

import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import gpattention

SOURCE = Path(__file__).parents[3]


def environment(device: torch.device) -> dict[str, str]:
    """Plain words, ready for JSON; what is not there is left out."""
    found = {
        "gpattention": gpattention.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "memory": _memory(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "threads": str(torch.get_num_threads()),
        "float32": torch.get_float32_matmul_precision(),
    }
    return {name: value for name, value in found.items() if value}


def in_words(facts: dict[str, str]) -> str:
    """One line."""
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "triton", "driver") if name in facts)
    commit = f" ({facts['commit']})" if "commit" in facts else ""
    return (
        f"gpattention {facts['gpattention']}{commit}, {versions}, {facts['device']}, "
        f"{facts['threads']} threads, {facts['date']}"
    )


def _version(package: str) -> str | None:
    if find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory(device: torch.device) -> str | None:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    listed = Path("/proc/meminfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    sizes = [int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    return f"{sizes[0] / 2**20:.0f} GiB" if sizes else None


def _processor() -> str:
    """The CPU's name, where Linux tells it."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _driver() -> str | None:
    told = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return told.splitlines()[0] if told else None


def _commit() -> str | None:
    """Of the source, where it lies in a repository of its own; `+` where files were changed since."""
    if not (SOURCE.parent / ".git").exists() and not (SOURCE / ".git").exists():
        return None
    found = _said(["git", "-C", str(SOURCE), "rev-parse", "--short", "HEAD"])
    changed = _said(["git", "-C", str(SOURCE), "status", "--porcelain", "--untracked-files=no"])
    return f"{found}+" if found and changed else found


def _said(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
