"""A small random ELMo in the layout of the published files."""

import copy
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Weights = dict[str, np.ndarray]

OPTIONS: dict[str, Any] = {
    "char_cnn": {
        "activation": "relu", "embedding": {"dim": 3}, "filters": [[1, 2], [2, 3], [4, 4]],
        "max_characters_per_token": 50, "n_characters": 262, "n_highway": 2,
    },
    "lstm": {
        "cell_clip": 0.8, "dim": 6, "n_layers": 2, "proj_clip": 0.5, "projection_dim": 4,
        "use_skip_connections": True,
    },
}  # fmt: skip


def options(**changes: Any) -> dict[str, Any]:
    """OPTIONS with fields replaced: options(lstm__dim=7)."""
    changed = copy.deepcopy(OPTIONS)
    for path, value in changes.items():
        section, field = path.split("__")
        changed[section][field] = value
    return changed


def shapes(chosen: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    cnn, lstm = chosen["char_cnn"], chosen["lstm"]
    total, p, c = sum(n for _, n in cnn["filters"]), lstm["projection_dim"], lstm["dim"]
    found: dict[str, tuple[int, ...]] = {"char_embed": (261, cnn["embedding"]["dim"])}
    for i, (width, count) in enumerate(cnn["filters"]):
        found[f"CNN/W_cnn_{i}"] = (1, width, cnn["embedding"]["dim"], count)
        found[f"CNN/b_cnn_{i}"] = (count,)
    for i in range(cnn.get("n_highway") or 0):
        for gate in ("carry", "transform"):
            found[f"CNN_high_{i}/W_{gate}"] = (total, total)
            found[f"CNN_high_{i}/b_{gate}"] = (total,)
    if total != p:
        found |= {"CNN_proj/W_proj": (total, p), "CNN_proj/b_proj": (p,)}
    for d in (0, 1):
        for layer in range(lstm["n_layers"]):
            place = f"RNN_{d}/RNN/MultiRNNCell/Cell{layer}/LSTMCell/"
            found |= {place + "W_0": (2 * p, 4 * c), place + "B": (4 * c,), place + "W_P_0": (c, p)}
    return found


def random_weights(chosen: dict[str, Any], seed: int = 0) -> Weights:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, 0.8, shape).astype("float32") for name, shape in shapes(chosen).items()}


def write(folder: Path, chosen: Any, weights: Weights) -> tuple[Path, Path]:
    """Paths of options.json and weights.hdf5."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "options.json", folder / "weights.hdf5"
    files[0].write_text(json.dumps(chosen))
    with h5py.File(files[1], "w") as archive:
        for name, values in weights.items():
            archive.create_dataset(name, data=values)
    return files
