"""The picture of the README: what a model knows of usual and strange images, and its calibration under shift.

    python scripts/readme_picture.py --data ~/data -o docs/images/readme.png

The shared CIFAR-10 model in results/models.  Strangeness and temperature are fitted to validation images and
their synthetic shifts; the images shown are the first of their sets, chosen by nobody.  Colours of the maps
say how far (in standard deviations, mean over heads) a patch's log variance is from that of usual images.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from gpattention.data import data_root, load, load_ood
from gpattention.data.shifts import SEVERITIES, shift, shifts_of
from gpattention.evaluation import AdaptiveTemperature, Strangeness, fit_temperature
from gpattention.evaluation.corrupted import frost_pictures, made_as_needed
from gpattention.models import Signals, VisionTransformer

MODEL = Path(__file__).parent.parent / "results" / "models" / "cifar10-direct-rows"
HELD_OUT, SHIFTED, JUDGED = 2000, 60, 400
CORRUPTIONS = ("gaussian_noise", "motion_blur", "fog", "contrast", "jpeg_compression")
BINS = 10


def reliability(probs: Tensor, labels: Tensor) -> tuple[list[tuple[float, float]], float]:
    """Mean confidence and accuracy of bins of confidence, and the pooled ECE."""
    confidence, label = probs.max(-1)
    right, places = (label == labels).double(), (confidence * BINS).long().clamp_max(BINS - 1)
    points, error = [], 0.0
    for place in range(BINS):
        inside = places == place
        if int(inside.sum()) >= 20:
            points.append((float(confidence[inside].mean()), float(right[inside].mean())))
        if inside.any():
            error += float((confidence[inside].mean() - right[inside].mean()).abs() * inside.double().mean())
    return points, error


def main() -> None:
    """Fit, look and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder of the data sets (default: GPATTENTION_DATA)")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/images/readme.png"))
    given = parser.parse_args()
    model = VisionTransformer.from_pretrained(MODEL).eval()
    data = load("cifar10", given.data)

    def seen(images: Tensor, per_token: bool = False) -> Signals:
        return model.signals(data.inputs(images), per_token=per_token)

    held = data.validation.images[:HELD_OUT]
    labels = data.validation.labels[:HELD_OUT]
    usual = seen(held, per_token=True)
    some = torch.arange(SHIFTED)
    shifted = {
        name: torch.cat([shift(held[some], name, severity) for severity in SEVERITIES])
        for name in shifts_of(held.shape[1])
    }
    under = {name: seen(images) for name, images in shifted.items()}
    repeated = labels[some].repeat(len(SEVERITIES))
    strangeness = Strangeness.fit(usual, labels, ("entropy", "mahalanobis", "variance_density"))
    constant = fit_temperature(usual.logits[None], labels)
    groups = {name: (signals.logits, signals, repeated) for name, signals in under.items()}
    adaptive = AdaptiveTemperature.fit(usual.logits, usual, labels, shifted=groups)

    tests, answers = data.test.images[:JUDGED], data.test.labels[:JUDGED]
    source = made_as_needed(tests, frost=frost_pictures(data_root(given.data)))
    corrupted = torch.cat([source.images(name, 4) for name in CORRUPTIONS])
    found, truth = seen(corrupted), answers.repeat(len(CORRUPTIONS))
    heat = adaptive.temperature(found.logits, found)
    before = reliability((found.logits / constant).softmax(-1), truth)
    after = reliability((found.logits / heat[:, None]).softmax(-1), truth)

    texture = load_ood("textures", given.data, subset=True).images
    shown = {
        "a test image": tests[:1], "the same in fog": source.images("fog", 5)[:1], "a texture": texture[:1],
    }  # fmt: skip
    assert usual.token_variance is not None
    centre = usual.token_variance.mean((0, 1))  # [P]
    spread = usual.token_variance.std((0, 1))  # [P]

    matplotlib.rcParams.update({"font.size": 9})
    figure = Figure(figsize=(9.2, 3.0), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.1, 1))
    axes = left.subplots(2, 3)
    record = {}
    for column, (name, image) in enumerate(shown.items()):
        signals = seen(image, per_token=True)
        assert signals.token_variance is not None
        p, probs = float(strangeness.p_value(signals)), (signals.logits[0] / constant).softmax(-1)
        flag = "flagged" if bool(strangeness.flag(signals, 0.05)) else "not flagged"
        label = data.classes[int(probs.argmax())]
        record[name] = {"label": label, "confidence": float(probs.max()), "p_value": p, "flag": flag}
        side = round(signals.token_variance.shape[1] ** 0.5)
        patches = ((signals.token_variance[0] - centre) / spread).abs().mean(-1).view(side, side)
        axes[0, column].imshow(image[0].permute(1, 2, 0))
        axes[0, column].set_title(f"{name}\n{label}, {probs.max():.0%} sure", fontsize=9)
        coloured = axes[1, column].imshow(patches, cmap="magma", vmin=0.5, vmax=1.75)
        axes[1, column].set_title(f"p = {p:.3f}, {flag}", fontsize=9)
        for row in (0, 1):
            axes[row, column].set_axis_off()
    bar = left.colorbar(coloured, ax=axes, location="right", shrink=0.45, anchor=(0, 0.03), aspect=12)
    bar.set_ticks([0.5, 1, 1.5])
    bar.set_label("deviations\nfrom usual", fontsize=8, color="#57606a")
    for row, word in enumerate(("the input", "how unusual\neach patch is")):
        place = {"rotation": 90, "ha": "center", "va": "center", "transform": axes[row, 0].transAxes}
        axes[row, 0].text(-0.22, 0.5, word, fontsize=9, color="#57606a", **place)
    chart = right.subplots()
    chart.plot([0.1, 1], [0.1, 1], color="#8b949e", linewidth=1)
    for (points, error), title, colour in (
        (before, "before", "#9c3409"), (after, "after", "#1257c4"),
    ):  # fmt: skip
        chart.plot(
            *zip(*points, strict=True), "o-", color=colour, label=f"{title}, ECE {error:.3f}", markersize=4
        )
    chart.set(xlabel="confidence", ylabel="accuracy", xlim=(0.1, 1), ylim=(0.1, 1))
    chart.set_title("2,000 corrupted images", fontsize=9)
    chart.text(0.42, 0.15, "calibrated: on the line", color="#57606a", fontsize=8)
    chart.legend(frameon=False, fontsize=8)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, dpi=170, facecolor="white", metadata={"Software": None})
    record["ECE"] = {"one temperature": before[1], "adaptive": after[1]}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
