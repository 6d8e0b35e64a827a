"""Runs that were never trained, with everything that an evaluation writes; numbers by a seeded generator."""

from typing import Any

import numpy as np

from gpattention.runs import RunData
from gpattention.runs.records import suite_from_dict

KINDS = ("softmax", "kernel", "sgpa", "direct", "cgp", "scgp")
TYPES = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    "weather": ("snow", "frost", "fog", "brightness", "spatter"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
}
SCORES = (
    "kl_matching", "kl_matching_predicted", "max_softmax", "entropy", "energy",
    "mutual_information", "gp_variance",
)  # fmt: skip
GALLERY = ("most_certain", "least_certain", "most_wrong")
SUITES = ("clean", "corrupted", "ood", "selective", "oversmoothing", "efficiency")


def synthetic_run(
    kind: str = "cgp",
    seed: int = 0,
    *,
    suites: tuple[str, ...] = SUITES,
    predictors: tuple[str, ...] = ("model", "model+temperature", "mean", "mean+temperature"),
    scores: tuple[str, ...] = SCORES,
    name: str | None = None,
    data: str = "digits",
    texts: bool = False,
) -> RunData:
    """A run of a kind of attention, plausible enough to be looked at."""
    rng = np.random.default_rng([seed, *kind.encode()])
    name = name or (kind if seed == 0 else f"{kind}-seed{seed}")
    makers: dict[str, Any] = {
        "clean": lambda: _clean(rng, predictors, texts, kind),
        "corrupted": lambda: (_corrupted(rng, predictors), {"gallery": _corrupted_gallery(rng)}),
        "ood": lambda: _ood(rng, scores),
        "selective": lambda: _selective(rng, predictors),
        "oversmoothing": lambda: _oversmoothing(rng),
        "efficiency": lambda: (_efficiency(rng, kind), {}),
    }
    found = {}
    for suite in suites:
        records, curves = makers[suite]()
        found[suite] = suite_from_dict({
            "format": "gpattention-evaluation-1", "suite": suite, "run": name, "data": data, "seed": seed,
            "attention": kind, "samples": 10, "records": records, "curves": curves,
            "notes": [f"{suite}: a synthetic note"] if suite == "ood" else [],
            "environment": {"torch": "2.13.0", "device": "cpu", "settings": '{"samples": 10}'},
            "seconds": 1.5,
        })  # fmt: skip
    return RunData(
        name, synthetic_recipe(kind, seed, name, data, texts), _rows(rng), _events(), found, f"runs/{name}"
    )


def synthetic_recipe(kind: str, seed: int, name: str, data: str, texts: bool) -> dict[str, Any]:
    options = {"num_inducing": 16} if kind in ("sgpa", "scgp") else {}
    return {
        "name": name, "seed": seed, "data": {"name": data, "options": {}},
        "model": {"type": "text" if texts else "vision", "attention": kind, "options": options,
                  "config": {"width": 64, "heads": 4, "depth": 3}},
        "optimizer": {"learning_rate": 2e-3, "batch_size": 50}, "phases": {"kernel_epochs": 10, "epochs": 20},
    }  # fmt: skip


def record(part: str, predictor: str, metric: str, value: float, **detail: Any) -> dict[str, Any]:
    return {"set": part, "predictor": predictor, "metric": metric, "value": float(value), "detail": detail}


def reliability(rng: np.random.Generator, items: int = 400) -> dict[str, list[float | None]]:
    edges = np.linspace(0, 1, 16)
    confidence = rng.beta(5, 1, items)
    right = rng.random(items) < confidence**1.4
    where = np.minimum((confidence * 15).astype(int), 14)
    count = np.bincount(where, minlength=15)
    means = [
        [float(x[where == k].mean()) if count[k] else None for k in range(15)] for x in (confidence, right)
    ]
    return {"edges": edges.tolist(), "confidence": means[0], "accuracy": means[1], "count": count.tolist()}


def _clean(
    rng: np.random.Generator, predictors: tuple[str, ...], texts: bool, kind: str
) -> tuple[list[Any], Any]:
    records = []
    for part in ("validation", "test"):
        for predictor in predictors:
            values = {
                "accuracy": rng.uniform(0.9, 0.98), "nll": rng.uniform(0.08, 0.3),
                "brier": rng.uniform(0.02, 0.1),
                "ece": rng.uniform(0.01, 0.06), "mce": rng.uniform(0.1, 0.3),
                "aurc": rng.uniform(0.002, 0.02),
            }  # fmt: skip
            if texts:
                values["mcc"] = rng.uniform(0.1, 0.3)
            detail = {"temperature": 1.3} if "+" in predictor else {}
            records += [
                record(part, predictor, metric, value, **detail, interval=[0.9 * value, 1.1 * value])
                for metric, value in values.items()
            ]
    curves: dict[str, Any] = {
        "reliability": {predictor: reliability(rng) for predictor in predictors},
        "gallery": _gallery(rng, "test", texts),
        "health": [_layer(rng, kind) for _ in range(3)],
    }  # fmt: skip
    return records, curves


def _gallery(rng: np.random.Generator, part: str, texts: bool = False) -> dict[str, Any]:
    """Sure mistakes are the first items, so that their answers are among those that are kept."""
    found: dict[str, Any] = {key: [_item(rng, key, texts, part) for _ in range(8)] for key in GALLERY}
    found["sure_and_wrong"] = [
        {**_item(rng, "most_wrong", texts, part), "index": i, "confidence": 0.99 - i / 100} for i in range(4)
    ]
    foreign = part.startswith("ood")
    found["answers"] = {
        "items": part, "set": part, "predicted": [5, 5, 5, 5, 3, 3],
        "labels": None if foreign else [3] * 6, "confidence": [float(x) for x in rng.uniform(0.3, 1, 6)],
    }  # fmt: skip
    if foreign:
        del found["most_wrong"]
    return found


def _corrupted_gallery(rng: np.random.Generator) -> dict[str, Any]:
    kinds = ("gaussian_noise", "snow")
    return {
        "sets": {f"corrupted/{kind}/5": _gallery(rng, f"corrupted/{kind}/5") for kind in kinds},
        "ladders": {
            kind: {str(s): [_item(_same(), "most_certain", False, kind) for _ in range(2)] for s in (0, 2, 5)}
            for kind in kinds
        },
    }


def _same() -> np.random.Generator:
    """Items under every severity are the same for all models."""
    return np.random.default_rng(7)


def _item(rng: np.random.Generator, key: str, texts: bool, part: str = "test") -> dict[str, Any]:
    label, predicted = "3", "3" if key == "most_certain" else "5"
    item: dict[str, Any] = {
        "index": int(rng.integers(400)), "label": None if part.startswith("ood") else label,
        "predicted": predicted, "set": part,
        "confidence": float(rng.uniform(0.3, 1)), "uncertainty": float(rng.uniform(0, 2)),
        "image": None, "words": None, "grid": None,
    }  # fmt: skip
    if texts:
        item["words"] = ["The", "mechanical", "doll", "wriggled", "itself", "loose", "."]
        item["token_variance"] = rng.uniform(0.1, 0.6, 7).tolist()
        item["token_attention"] = rng.dirichlet(np.ones(7)).tolist()
    else:
        blob = np.exp(-((np.indices((8, 8)) - 3.5 - rng.normal(0, 1.2, (2, 1, 1))) ** 2).sum(0) / 5)
        item["image"] = (
            np.clip(255 * blob[..., None] + rng.integers(0, 40, (8, 8, 1)), 0, 255).astype(int).tolist()
        )
        item["token_variance"] = rng.uniform(0.1, 0.6, 16).tolist()
        item["token_attention"] = rng.dirichlet(np.ones(16)).tolist()
        item["grid"] = [4, 4]
    return item


def _layer(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    draws = kind not in ("softmax", "kernel")
    return {
        "kind": kind, "kappa_qk": float(rng.uniform(0.1, 0.6)), "kappa_qq": float(rng.uniform(0.2, 0.8)),
        "mean_ratio": float(rng.uniform(0.5, 1.5)), "amplitude": None, "noise": 0.01 if draws else None,
        "prior_stddev": 1.0 if draws else None,
        "posterior_stddev": float(rng.uniform(0.2, 0.9)) if draws else None,
        "stddev_ratio": float(rng.uniform(0.3, 0.99)) if draws else None,
        "floor_share": float(rng.uniform(0, 0.5)) if draws else None,
    }  # fmt: skip


def _corrupted(rng: np.random.Generator, predictors: tuple[str, ...]) -> list[Any]:
    records = []
    for predictor in predictors:
        every: dict[str, list[float]] = {}
        for category, types in TYPES.items():
            of_category: dict[str, list[float]] = {}
            for kind in types:
                hard = rng.uniform(0.3, 1)
                for severity in range(1, 6):
                    harm = hard * severity / 5
                    values = {
                        "accuracy": 0.95 - 0.5 * harm, "nll": 0.2 + 1.5 * harm, "ece": 0.03 + 0.2 * harm**2,
                    }  # fmt: skip
                    for metric, value in values.items():
                        value += rng.normal(0, 0.01)
                        records.append(record(f"corrupted/{kind}/{severity}", predictor, metric, value))
                        of_category.setdefault(metric, []).append(value)
                        every.setdefault(metric, []).append(value)
            records += [
                record(f"corrupted/{category}", predictor, m, np.mean(v)) for m, v in of_category.items()
            ]
        records += [record("corrupted/mean", predictor, m, np.mean(v)) for m, v in every.items()]
    return records


def _ood(rng: np.random.Generator, names: tuple[str, ...]) -> tuple[list[Any], Any]:
    records, scores, roc = [], {}, {}
    for part in ("ood/near", "ood/noise", "ood/patterns"):
        scores[part], roc[part] = {}, {}
        for score in names:
            known, unknown = rng.gamma(1.5, 0.25, 400), rng.gamma(4, 0.3, 300)
            edges = np.linspace(0, max(known.max(), unknown.max()), 31)
            grid = np.linspace(0, 1, 100)
            cut = np.quantile(known, 1 - grid)
            tpr = np.maximum.accumulate([float((unknown >= c).mean()) for c in cut])
            scores[part][score] = {
                "edges": edges.tolist(), "in": np.histogram(known, edges)[0].tolist(),
                "out": np.histogram(unknown, edges)[0].tolist(),
            }  # fmt: skip
            roc[part][score] = {"fpr": grid.tolist(), "tpr": tpr.tolist()}
            auroc = float((known[:, None] < unknown[None]).mean())
            for metric, value in (
                ("auroc", auroc),
                ("aupr_in", auroc),
                ("aupr_out", auroc),
                ("fpr95", 1 - auroc),
            ):
                records.append(record(part, "model", metric, value, score=score))
    others = {"test": 1.0, **dict.fromkeys(scores, 0.3)}  # below 1 small p-values are frequent
    p_values = {part: ecdf(np.ceil(100 * rng.beta(a, 1, 200)) / 100) for part, a in others.items()}
    sets = {part: _gallery(rng, part) for part in scores}
    return records, {"scores": scores, "roc": roc, "p_values": p_values, "gallery": {"sets": sets}}


def ecdf(p: Any) -> dict[str, list[float]]:
    """The distribution of p-values, as the suite writes it."""
    return {"p": np.sort(p).tolist(), "share": (np.arange(1, len(p) + 1) / len(p)).tolist()}


def _selective(rng: np.random.Generator, predictors: tuple[str, ...]) -> tuple[list[Any], Any]:
    coverage = np.linspace(0.005, 1, 200)
    records, curves = [], {}
    for predictor in predictors:
        risk = rng.uniform(0.03, 0.1) * coverage ** rng.uniform(1, 4)
        curves[predictor] = {"coverage": coverage.tolist(), "risk": risk.tolist()}
        records += [
            record("test", predictor, "coverage_at_risk_05", rng.uniform(0.9, 1)),
            record("test", predictor, "conformal_coverage", rng.uniform(0.88, 0.93), alpha=0.1),
            record("test", predictor, "conformal_size", rng.uniform(1, 1.3), alpha=0.1),
        ]
    return records, {"risk_coverage": curves}


def _oversmoothing(rng: np.random.Generator) -> tuple[list[Any], Any]:
    similarity = {after: np.sort(rng.uniform(0.2, 0.9, 3)).tolist() for after in ("attention", "block")}
    records = [
        record("test", "mean", "token_similarity", value, layer=i, after=after)
        for after, values in similarity.items()
        for i, value in enumerate(values)
    ]
    return records, {"similarity": similarity}


def _efficiency(rng: np.random.Generator, kind: str) -> list[Any]:
    records = []
    sizes = (16, 8, 32) if kind in ("sgpa", "scgp") else (None,)
    for inducing in sizes:
        for tokens in (16, 32, 64) if inducing in (None, 16) else (16,):
            base = (inducing or 12) * tokens / 200
            for metric, scale in (
                ("train_epoch_seconds", 1),
                ("predict_seconds", 0.2),
                ("train_peak_mib", 80),
                ("predict_peak_mib", 30),
            ):
                value = scale * base * rng.uniform(0.9, 1.1)
                records.append(record("test", "model", metric, value, inducing=inducing, tokens=tokens))
    return records  # fmt: skip


def _rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(2, 31, 2):
        gp = epoch > 10
        rows.append(
            {
                "epoch": epoch, "step": epoch * 16, "phase": "gp" if gp else "kernel",
                "learning_rate": 2e-3 * (1 - epoch / 31),
                "alpha": 0.01 * (epoch - 10) / 20 if gp else 0.0,
                "train_loss": 2 * np.exp(-epoch / 8) + 0.1 + rng.uniform(0, 0.05),
                "train_regularizer": 40.0 / epoch * rng.uniform(0.8, 1.2) if gp else 0.0,
                "validation_accuracy": 0.97 - 0.5 * np.exp(-epoch / 5) + rng.uniform(0, 0.02),
                "validation_nll": 1.2 * np.exp(-epoch / 6) + 0.12 + rng.uniform(0, 0.05),
                "floor_share": 0.01 * epoch * rng.uniform(0.8, 1.2) if gp else None,
            }
        )  # fmt: skip
    return rows


def _events() -> list[dict[str, Any]]:
    return [
        {"time": 1.0, "event": "warm start", "copied": 3},
        {"time": 2.0, "event": "finished", "step": 480},
    ]
