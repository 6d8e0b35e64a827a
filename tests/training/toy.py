"""A tiny problem that trains in seconds; also a program that a test can kill.

python -m tests.training.toy FOLDER ATTENTION (step N | write N | none) [resume]
"""

import os
import signal
import sys
from pathlib import Path

import torch

from gpattention.training import Progress, Recipe, TrainingData, fit, recipe_from_dict


def toy_data(items: int = 48, *, seed: int = 0) -> TrainingData:
    """8 x 8 images of 3 classes: stripes down, stripes across, a checkerboard, in noise."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % 3
    images = 0.3 * torch.randn(items, 1, 8, 8, generator=g)
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    patterns = torch.stack([rows % 2, columns % 2, (rows + columns) % 2]).float()  # [3, 8, 8]
    images[:, 0] += patterns[labels]
    half = 2 * items // 3
    facts = {"classes": 3, "image_size": 8, "channels": 1, "patch": 4}
    return TrainingData(images[:half], labels[:half], images[half:], labels[half:], facts)


def toy_recipe(attention: str = "cgp", **changes: object) -> Recipe:
    """Two phases of two epochs with draws and a regulariser."""
    plain: dict[str, object] = {
        "name": "toy",
        "model": {"attention": attention, "config": {"width": 16, "heads": 2, "depth": 2}},
        "optimizer": {"batch_size": 8, "learning_rate": 5e-3},
        "phases": {"kernel_epochs": 2, "epochs": 2},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            plain[section] = {**plain.get(section, {}), key: value}  # type: ignore[dict-item]
        else:
            plain[path] = value
    return recipe_from_dict(plain)


def main(folder: str, attention: str, when: str, count: str = "0", resume: str = "") -> None:
    """Train, and be killed without notice at that step or during that write."""
    if when == "write":
        replace, calls = os.replace, [0]

        def killing(source: str, target: str) -> None:
            calls[0] += 1
            if calls[0] == int(count):
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)

        os.replace = killing  # type: ignore[assignment]

    def progress(p: Progress) -> None:
        if when == "step" and p.step == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "term" and p.step == int(count):
            os.kill(os.getpid(), signal.SIGTERM)

    torch.set_num_threads(1)
    fit(toy_recipe(attention), toy_data(), Path(folder), resume=bool(resume), progress=progress)


if __name__ == "__main__":
    main(*sys.argv[1:])
