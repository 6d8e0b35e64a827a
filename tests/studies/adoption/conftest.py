"""A tiny CoLA and a tiny BERT that can learn most of it."""

from pathlib import Path

import pytest

from gpattention.data.cola import load_cola
from gpattention.studies.adoption.encoder import Sentences, encode_data, load_tokenizer
from tests.experiments.tiny_cola import mislabel, write_tiny_cola
from tests.experiments.tiny_encoder import write_tiny_encoder

FIT = {"steps": 1, "samples": 2, "levels": ("global",)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_cola(tmp_path_factory.mktemp("data"), (160, 40, 30))
    mislabel(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def parts(root: Path, encoder: Path) -> dict[str, Sentences]:
    return encode_data(load_cola(root, 0, form="raw", subset=True), load_tokenizer(encoder))
