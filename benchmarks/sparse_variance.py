"""What the variances of a trained model's layers say of corrupted validation images, with both conditionals.

For every run and, of the sparse model, every conditional: the mean variance of each layer on clean images,
and how well the mean over layers tells corrupted images from clean ones (AUROC; 0.5 is chance).  Validation
images only, at severity 5; the passes do not draw.

    python benchmarks/sparse_variance.py runs/cifar10-60/cifar10-scgpt-seed0 --data ~/data --items 500
"""

import argparse

import torch
from torch import Tensor

from gpattention.attention.scgp import SCGPAttention
from gpattention.data.corruptions import corrupt
from gpattention.evaluation import ItemSet, ModelPredictor, predict_items, run_sets
from gpattention.gp.sparse import CONDITIONALS
from gpattention.metrics import auroc
from gpattention.runs.folder import open_run

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "contrast", "pixelate")


def variances(model: torch.nn.Module, items: ItemSet) -> Tensor:
    """Mean over heads and tokens.  [items, layers]"""
    predictor = ModelPredictor(model, draw="none", variances=True)
    found = predict_items(predictor, items, samples=0, seed=0, device=torch.device("cpu")).layer_variance
    assert found is not None
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--items", type=int, default=500)
    arguments = parser.parse_args()
    print(f"{'run':32} {'conditional':14} {'variance of each layer':36}", *CORRUPTIONS, sep="  ")
    for folder in arguments.runs:
        run = open_run(folder)
        model = run.model.eval()
        clean = run_sets(run, arguments.data, limit=arguments.items).validation
        assert isinstance(clean.stored, Tensor)
        sets = [ItemSet(c, corrupt(clean.stored, c, 5), clean.labels, clean.prepare) for c in CORRUPTIONS]
        sparse = [module for module in model.modules() if isinstance(module, SCGPAttention)]
        for conditional in CONDITIONALS if sparse else ("-",):
            for module in sparse:
                module.conditional = conditional  # type: ignore[assignment]
            inside = variances(model, clean)
            layers = " ".join(f"{float(v):.3f}" for v in inside.mean(0))
            found = [auroc(inside.mean(1), variances(model, s).mean(1)) for s in sets]
            cells = (f"{value:{len(c)}.2f}" for value, c in zip(found, CORRUPTIONS, strict=True))
            print(f"{run.folder.name:32} {conditional:14} {layers:36}", *cells, sep="  ", flush=True)


if __name__ == "__main__":
    main()
