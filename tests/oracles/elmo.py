"""ELMo in NumPy at float64: one sentence, one word, one step at a time, from the arrays of a weight file."""

from __future__ import annotations

from typing import Any

import numpy as np

from .kernels import Array


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def spelling(word: str | None, most: int, mark: int = 0) -> list[int]:
    """Rows of char_embed; `mark` is the one character of a boundary of the sentence."""
    ids = [258] + ([mark] if word is None else list(word.encode("utf-8"))[: most - 2]) + [259]
    while len(ids) < most:
        ids.append(260)
    return ids


def word_vector(ids: list[int], w: dict[str, Array], options: dict[str, Any]) -> Array:
    """Filters over the letters, the strongest answer of each, highways, projection.  [P]"""
    cnn = options["char_cnn"]
    answers = []
    for i, (width, count) in enumerate(cnn["filters"]):
        for j in range(count):
            best = -np.inf
            for start in range(len(ids) - width + 1):
                total = float(w[f"CNN/b_cnn_{i}"][j])
                for t in range(width):
                    total += float(w["char_embed"][ids[start + t]] @ w[f"CNN/W_cnn_{i}"][0, t, :, j])
                best = max(best, total)
            answers.append(np.tanh(best) if cnn["activation"] == "tanh" else max(best, 0.0))
    x = np.array(answers)  # [F]
    for i in range(cnn["n_highway"]):
        carry = sigmoid(w[f"CNN_high_{i}/W_carry"].T @ x + w[f"CNN_high_{i}/b_carry"])
        new = np.maximum(w[f"CNN_high_{i}/W_transform"].T @ x + w[f"CNN_high_{i}/b_transform"], 0.0)
        x = carry * new + (1.0 - carry) * x
    if "CNN_proj/W_proj" in w:
        x = w["CNN_proj/W_proj"].T @ x + w["CNN_proj/b_proj"]
    return x


def direction(xs: list[Array], d: int, w: dict[str, Array], options: dict[str, Any]) -> list[list[Array]]:
    """States of every layer of one direction, in the order of `xs`."""
    lstm = options["lstm"]
    c, p = lstm["dim"], lstm["projection_dim"]
    found = []
    for layer in range(lstm["n_layers"]):
        place = f"RNN_{d}/RNN/MultiRNNCell/Cell{layer}/LSTMCell/"
        h, m, out = np.zeros(p), np.zeros(c), []
        for x in xs:
            z = np.concatenate([x, h]) @ w[place + "W_0"] + w[place + "B"]  # [4 C]
            i, g, f, o = z[:c], z[c : 2 * c], z[2 * c : 3 * c], z[3 * c :]
            m = sigmoid(f + 1.0) * m + sigmoid(i) * np.tanh(g)
            m = np.clip(m, -lstm["cell_clip"], lstm["cell_clip"])
            h = (sigmoid(o) * np.tanh(m)) @ w[place + "W_P_0"]
            h = np.clip(h, -lstm["proj_clip"], lstm["proj_clip"])
            out.append(h + x if layer > 0 and lstm["use_skip_connections"] else h)
        found.append(out)
        xs = out
    return found


def elmo(
    sentence: list[str],
    weights: dict[str, Array],
    options: dict[str, Any],
    scalars: list[float],
    gamma: float = 1.0,
) -> Array:
    """Mixed vectors of one sentence.  [N, 2 P]"""
    w = {name: np.asarray(x, dtype=np.float64) for name, x in weights.items()}
    most = options["char_cnn"]["max_characters_per_token"]
    ids = [spelling(None, most, 256), *(spelling(word, most) for word in sentence), spelling(None, most, 257)]
    xs = [word_vector(row, w, options) for row in ids]
    ahead = direction(xs, 0, w, options)
    behind = [layer[::-1] for layer in direction(xs[::-1], 1, w, options)]
    shares = np.exp(scalars) / np.exp(scalars).sum()
    mixed = []
    for t in range(1, len(xs) - 1):
        total = shares[0] * np.concatenate([xs[t], xs[t]])
        for layer in range(len(ahead)):
            total = total + shares[1 + layer] * np.concatenate([ahead[layer][t], behind[layer][t]])
        mixed.append(gamma * total)
    return np.array(mixed)
