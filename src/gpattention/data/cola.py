"""CoLA, the corpus of linguistic acceptability (public version 1.1), split as in the paper."""

from pathlib import Path
from typing import Literal

import torch

from gpattention.checks import check_choice
from gpattention.data.catalogue import GIGABYTE, SUBSET, Archive, Layout, data_root, register
from gpattention.data.datasets import TextData, Texts, split
from gpattention.files import StrPath, existing_file, read_text

FOLDERS = ("cola_public", "cola/cola_public", "CoLA/cola_public")
FORMS = ("tokenized", "raw")
FILES = ("in_domain_train.tsv", "in_domain_dev.tsv", "out_of_domain_dev.tsv")
ROWS = (8551, 527, 516)  # as published
TRAIN = 7262  # of the 8,551 + 527 in-domain sentences, validation included; 1,816 are for testing


def load_cola(
    root: StrPath | None = None,
    seed: int = 0,
    *,
    form: Literal["tokenized", "raw"] = "tokenized",
    subset: bool = False,
) -> TextData:
    """In-domain sentences pooled and split by the seed, 7,262 to train and 1,816 to test; 516 out of domain.

    A tenth of the 7,262, 726 sentences, is the validation part, which leaves 6,536.

    Args:
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        seed: of the split.
        form: "tokenized" has spaces between words (`Texts.words`), "raw" is the original text.
        subset: whether to accept other numbers of sentences than published; four fifths are for training.

    Returns:
        The dataset.

    Raises:
        ValueError: the form is unknown, a file is damaged, or the number of sentences is not as published.
        FileNotFoundError: the files are missing.
    """
    check_choice("form", form, FORMS)
    place = data_root(root)
    found = [place / name for name in FOLDERS if (place / name).is_dir()]
    if not found:
        wanted = " or ".join(FOLDERS)
        raise FileNotFoundError(f"expected {wanted} in {place}, got none of them: see get('cola', root)")
    folder = found[0] / form
    parts = [read_cola(folder / name) for name in FILES]
    rows = tuple(len(part) for part in parts)
    whole = rows == ROWS
    if not whole and not subset:
        raise ValueError(f"{folder}: expected {ROWS} sentences, got {rows}: {SUBSET}")
    first, second, outside = parts
    pooled = Texts(first.sentences + second.sentences, torch.cat([first.labels, second.labels]))
    chosen = TRAIN if whole else len(pooled) * 4 // 5
    kept, tested = split(len(pooled), (chosen, len(pooled) - chosen), seed)
    fitted, validated = split(chosen, (chosen - chosen // 10, chosen // 10), seed, stage=1)
    return TextData(
        name="cola" if whole else "cola-subset",
        train=pooled.select(kept[fitted]),
        validation=pooled.select(kept[validated]),
        test=pooled.select(tested),
        classes=("unacceptable", "acceptable"),
        seed=seed,
        ood={"out-of-domain": outside},
        tokenized=form == "tokenized",
    )


def read_cola(file: Path) -> Texts:
    """One file: four columns with tabs between them (source, label, the author's mark, sentence).

    Quotation marks have no special meaning and belong to their sentence.
    """
    sentences, labels = [], []
    lines = read_text(existing_file("a part of CoLA", file)).split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
        columns = line.rstrip("\r").split("\t")
        if len(columns) != 4 or columns[1] not in ("0", "1"):
            wanted = "source, label 0 or 1, mark and sentence with tabs between them"
            raise ValueError(f"{file}, line {number}: expected {wanted}, got {line[:80]!r}")
        sentences.append(columns[3])
        labels.append(int(columns[1]))
    return Texts(tuple(sentences), torch.tensor(labels, dtype=torch.int64))


_FILE, _PAGE = "cola_public_1.1.zip", "https://nyu-mll.github.io/CoLA/"
register(
    name="cola",
    kind="text",
    about="9,594 English sentences, acceptable or not; 516 of them out of domain",
    licence="sentences of published works, for research; "
    "cite A. Warstadt, A. Singh and S. R. Bowman, TACL 2019",
    page=_PAGE,
    load=load_cola,
    layouts=tuple(Layout(f, tuple(f"{form}/{file}" for form in FORMS for file in FILES)) for f in FOLDERS),
    archive=Archive(_FILE, "9f6d88c3558ec424cd9d66ea03589aba", f"{_PAGE}{_FILE}", GIGABYTE // 16),
)
