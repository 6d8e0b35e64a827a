"""A tiny problem that trains in seconds; also a program that a test can kill, in one process or several.

python -m tests.training.toy FOLDER [step N | write N | batch N | stop N | resume | keyed]
"""

import atexit
import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from gpattention.runs import Recipe, TrainingData, recipe_from_dict
from gpattention.training import TrainingStep, TrainingStoppedError, engine, fit

ROOT = Path(__file__).parents[2]


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


WORDS = 9  # of the longest text


def toy_texts(items: int = 96, *, seed: int = 0) -> TrainingData:
    """Texts of 1 to 9 words of two kinds, which are the class, padded."""
    g = torch.Generator().manual_seed(seed)
    labels, lengths = torch.arange(items) % 2, torch.randint(1, WORDS + 1, (items,), generator=g)
    tokens = 1 + 8 * labels[:, None] + torch.randint(8, (items, WORDS), generator=g)
    tokens[torch.arange(WORDS) >= lengths[:, None]] = 0
    half = 2 * items // 3
    facts = {"classes": 2, "vocabulary": 17, "contextual_width": 0, "max_length": WORDS}
    train, held = {"tokens": tokens[:half]}, {"tokens": tokens[half:]}
    return TrainingData(train, labels[:half], held, labels[half:], facts, lengths=lengths[:half])


def text_recipe(attention: str = "cgp", **changes: object) -> Recipe:
    """As `toy_recipe`, for `toy_texts`, without dropout."""
    config = {"width": 16, "heads": 2, "depth": 2, "embedding_width": 8, "dropout": 0.0}
    options = changes.pop("model__options", {})
    model = {"type": "text", "attention": attention, "config": config, "options": options}
    return toy_recipe(model=model, **changes)


def flat(model: torch.nn.Module) -> Tensor:
    """All weights in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main(folder: str, when: str = "", count: str = "0") -> None:
    """Train, and be killed without notice at that step, item or write, or be asked to stop at that step."""
    calls, data, several = [0], toy_data(), "WORLD_SIZE" in os.environ

    def counting(kind: str, signal: int = signal.SIGKILL) -> None:
        if when == kind:
            calls[0] += 1
            if calls[0] == int(count):
                os.kill(os.getpid(), signal)

    def prepare(inputs: Tensor, items: Tensor, epoch: int) -> Tensor:
        if os.environ.get("RANK") == "1":
            counting("batch")
        return inputs

    def progress(step: TrainingStep) -> None:
        counting("step")
        counting("stop", signal.SIGTERM)

    engine.AHEAD = 0  # a batch is prepared when its step begins
    # whoever trains in several processes has left them before the interpreter ends, also when it raises
    atexit.register(lambda: os._exit(3) if dist.is_initialized() else None)
    write = os.replace
    os.replace = lambda source, target: (counting("write"), write(source, target))[1]  # type: ignore
    torch.set_num_threads(1)
    recipe = toy_recipe("cgp", optimizer__keyed_dropout=several or when == "keyed")
    data = dataclasses.replace(data, prepare=prepare) if several else data
    try:
        fit(recipe, data, folder, resume=when == "resume", progress=progress)
    except TrainingStoppedError as stopped:
        sys.stdout.write(f"{stopped}\n")


def run(folder: Path, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """This program in processes of their own."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(several if processes > 1 else ()), "-m", "tests.training.toy", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
