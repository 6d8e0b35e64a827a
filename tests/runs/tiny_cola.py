"""A folder in CoLA's layout whose sentences a small model can tell apart: acceptable ones end in "sat"."""

import random
from pathlib import Path

NAMES = ("in_domain_train", "in_domain_dev", "out_of_domain_dev")
SUBJECTS = ("the cat", "a dog", "one bird", "the old cat", "my dog")


def write_tiny_cola(root: Path, rows: tuple[int, int, int] = (60, 10, 8), seed: int = 0) -> Path:
    """Both forms; the raw one has capitals, and its full stop beside the last word."""
    chosen = random.Random(seed)
    for name, n in zip(NAMES, rows, strict=True):
        lines: dict[str, list[str]] = {"tokenized": [], "raw": []}
        for i in range(n):
            label = i % 2
            words = f"{chosen.choice(SUBJECTS)} did n't {'sat' if label else 'cat'} ."
            raw = words.replace(" n't", "n't").replace(" .", ".").capitalize()
            lines["tokenized"].append(f"t\t{label}\t\t{words}")
            lines["raw"].append(f"t\t{label}\t\t{raw}")
        for form, text in lines.items():
            folder = root / "cola_public" / form
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.tsv").write_text("\n".join(text) + "\n")
    return root


def mislabel(folder: Path) -> None:
    """Every seventh sentence: what is always right has no temperature."""
    for file in (folder / "cola_public" / "raw").iterdir():
        lines = [line.split("\t") for line in file.read_text().splitlines()]
        for columns in lines[::7]:
            columns[1] = "10"[int(columns[1])]
        file.write_text("\n".join("\t".join(columns) for columns in lines) + "\n")
