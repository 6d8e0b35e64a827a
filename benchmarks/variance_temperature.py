"""Does the variance of a trained model's layers say which clean images deserve less confidence?

For every run, on validation images: AUROC for misclassified images of the entropy and of each layer's
variance; the NLL with one temperature and with one that may depend on the variances, T = exp(w_0 + w . z(log
var)), each fitted on one half of the images and evaluated on the other; and the NLL for fewer draws.

    python benchmarks/variance_temperature.py runs/cifar10-60/cifar10-scgpt-seed0 --data ~/data --items 3000
"""

import argparse

import torch
from torch import Tensor

from gpattention.evaluation import ModelPredictor, predict_items, run_sets
from gpattention.metrics import auroc
from gpattention.runs.folder import open_run

DRAWS = 10


def losses(logits: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    """Negative log-likelihood of each item.  logits [S, B, C], the others [B]"""
    probs = (logits / temperature[None, :, None]).softmax(-1).mean(0)  # [B, C]
    return -probs.gather(1, labels[:, None])[:, 0].clamp_min(1e-12).log()


def fitted(logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
    """w of T = exp(features w), a little shrunk but for the constant.  [features]"""
    w = torch.zeros(features.shape[1], dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = losses(logits, labels, (features @ w).exp()).mean() + 1e-4 * w[1:].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return w.detach()


def cross_fitted_nll(logits: Tensor, labels: Tensor, features: Tensor) -> float:
    """NLL of each half with what the other half fitted."""
    first = torch.arange(len(labels)) % 2 == 0
    total = 0.0
    for half in (first, ~first):
        w = fitted(logits[:, half], labels[half], features[half])
        total += float(losses(logits[:, ~half], labels[~half], (features[~half] @ w).exp()).sum())
    return total / len(labels)


def main() -> None:
    """Print what was found for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("--items", type=int, default=3000)
    arguments = parser.parse_args()
    for folder in arguments.runs:
        run = open_run(folder)
        items = run_sets(run, arguments.data, limit=arguments.items).validation
        predictor = ModelPredictor(run.model.eval(), variances=True)
        raw = predict_items(predictor, items, samples=DRAWS, seed=0, device=torch.device("cpu"))
        assert raw.layer_variance is not None
        assert items.labels is not None
        logits, labels, logs = raw.logits.double(), items.labels, raw.layer_variance.double().log()
        probs = logits.softmax(-1).mean(0)
        entropy = torch.special.entr(probs).sum(-1)
        right = probs.argmax(-1) == labels
        areas = [auroc(score[right], score[~right]) for score in (entropy, *logs.T)]
        one = torch.ones_like(entropy)[:, None]
        by_variance = torch.cat([one, (logs - logs.mean(0)) / logs.std(0)], 1)
        print(run.folder.name, f"accuracy {float(right.double().mean()):.3f}")
        print(f"  AUROC for errors: entropy {areas[0]:.3f}, variances", *(f"{x:.3f}" for x in areas[1:]))
        plain, other = cross_fitted_nll(logits, labels, one), cross_fitted_nll(logits, labels, by_variance)
        print(f"  NLL, one temperature {plain:.4f}, by the variances {other:.4f}")
        some = {
            n: [cross_fitted_nll(logits[i : i + n], labels, one) for i in range(0, DRAWS, n)]
            for n in (1, 2, 5, 10)
        }
        print(
            "  NLL by draws:", ", ".join(f"{n}: {sum(x) / len(x):.4f}" for n, x in some.items()), flush=True
        )


if __name__ == "__main__":
    main()
