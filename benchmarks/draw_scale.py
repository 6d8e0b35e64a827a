"""Are the draws of a trained model too small?  What larger ones do beside a temperature.

Every layer's noise is multiplied by a scale (0 is the mean prediction, 1 the model as it is).  On clean
validation images, and on others of them under shifts that are no corruptions: accuracy, NLL and ECE as
predicted and with a temperature fitted to the clean ones.  No test image is looked at.

    python benchmarks/draw_scale.py runs/cifar10-full/cifar10-cgpt-seed0 --data ~/data
"""

import argparse

import torch
from torch import Tensor

from gpattention.evaluation import ItemSet, fit_temperature, run_sets, shifted_items
from gpattention.gp import ItemNoise
from gpattention.metrics import accuracy, ece, nll
from gpattention.runs.folder import open_run

CPU = torch.device("cpu")
ROWS = 250  # items that run at once
SCALES = (0.0, 1.0, 2.0, 4.0, 8.0)


class ScaledNoise(ItemNoise):
    """Normal numbers of another standard deviation."""

    scale = 1.0

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """That of an item, multiplied."""
        return self.scale * super().normal(shape, dtype, device)


@torch.no_grad()
def predicted(model: torch.nn.Module, items: ItemSet, scale: float, samples: int) -> Tensor:
    """Logits of every draw.  [S, B, C]"""
    parts = []
    for start, inputs in items.chunks(ROWS, CPU):
        assert isinstance(inputs, Tensor)
        numbers = start + torch.arange(len(inputs))
        draws = []
        for sample in range(samples if scale else 1):
            noise = ScaledNoise(0, numbers, torch.full_like(numbers, sample))
            noise.scale = scale
            draws.append(model(inputs, draw="independent" if scale else "none", generator=noise).logits)
        parts.append(torch.stack(draws))
    return torch.cat(parts, 1).double()


def figures(logits: Tensor, labels: Tensor, temperature: float) -> str:
    """Accuracy, NLL and ECE of the mean over draws."""
    probs = (logits / temperature).softmax(-1).mean(0)
    return f"{accuracy(probs, labels):.3f} {nll(probs, labels):.3f} {ece(probs, labels):.3f}"


def main() -> None:
    """Print one line for each scale of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--items", type=int, default=500, help="clean images")
    parser.add_argument("--shifted", type=int, default=40, help="images, each under 36 shifts")
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    for folder in given.runs:
        run = open_run(folder)
        whole = run_sets(run, given.data).validation
        clean = whole.first(given.items)
        others = torch.arange(given.items, given.items + given.shifted)  # none that fitted the temperature
        shifted = shifted_items(whole.select(others))
        assert clean.labels is not None
        assert shifted.labels is not None
        print(f"{run.folder.name}: {len(clean)} clean images, {len(shifted)} shifted; accuracy NLL ECE")
        print("scale  clean              shifted            T     clean, T           shifted, T")
        for scale in SCALES:
            a, b = (predicted(run.model, items, scale, given.samples) for items in (clean, shifted))
            T = fit_temperature(a, clean.labels)
            cells = (figures(a, clean.labels, 1), figures(b, shifted.labels, 1), f"{T:.2f}")
            tempered = (figures(a, clean.labels, T), figures(b, shifted.labels, T))
            print(f"{scale:<6g} {'  '.join((*cells, *tempered))}", flush=True)


if __name__ == "__main__":
    main()
