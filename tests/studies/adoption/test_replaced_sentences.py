"""Finished results of sentences are of the encoder and the sentences that are there."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpattention.studies.adoption import cola
from gpattention.studies.adoption.cells import Cell
from gpattention.studies.adoption.cola import ColaSettings, adopt_cola
from gpattention.studies.adoption.encoder import Finetuning
from gpattention.studies.adoption.methods import Further
from tests.experiments.tiny_cola import mislabel
from tests.studies.adoption.conftest import FIT

pytest.importorskip("transformers")


@pytest.fixture
def settings(root: Path, encoder: Path, tmp_path: Path) -> ColaSettings:
    """With copies of data and encoder that a test may spoil."""
    return ColaSettings(
        encoder=str(shutil.copytree(encoder, tmp_path / "encoder")), seeds=(0,),
        finetuning=Finetuning(epochs=1, learning_rate=0.01, batch_size=32), further=Further(epochs=1),
        samples=2, root=shutil.copytree(root, tmp_path / "data"), runs=tmp_path / "runs", device="cpu",
        subset=True, fit=FIT, methods=("plain", "tuned-on"),
    )  # fmt: skip


def figures(cells: list[Cell]) -> list[object]:
    return [cell.values for cell in cells]


def test_other_sentences(settings: ColaSettings, tmp_path: Path) -> None:
    before = adopt_cola(settings)
    mislabel(tmp_path / "data")  # those that were wrong are right again
    after = adopt_cola(settings)
    assert figures(after) != figures(before)
    assert figures(after) == figures(adopt_cola(replace(settings, runs=tmp_path / "anew")))


def test_another_encoder(settings: ColaSettings, tmp_path: Path) -> None:
    from transformers import BertModel

    before = adopt_cola(settings)
    other = BertModel.from_pretrained(settings.encoder)
    other.embeddings.word_embeddings.weight.data *= 2
    other.save_pretrained(settings.encoder)
    after = adopt_cola(settings)
    assert figures(after) != figures(before)
    assert figures(after) == figures(adopt_cola(replace(settings, runs=tmp_path / "anew")))


def test_weights_alone_do_not_answer_for_another_encoder(settings: ColaSettings, tmp_path: Path) -> None:
    from transformers import BertModel

    adopt_cola(settings)
    for file in (Path(settings.runs) / "seed0").glob("*.json"):
        if not file.name.endswith("-training.json"):
            file.unlink()
    other = BertModel.from_pretrained(settings.encoder)
    other.embeddings.word_embeddings.weight.data *= 2
    other.save_pretrained(settings.encoder)
    expected = adopt_cola(replace(settings, runs=tmp_path / "anew"))
    assert figures(adopt_cola(settings)) == figures(expected)


def test_fresh_trains_everything_once(settings: ColaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    first, counted, real = adopt_cola(settings), [], cola.finetune
    monkeypatch.setattr(cola, "finetune", lambda *a, **k: (counted.append(k["seed"]), real(*a, **k))[1])
    assert figures(adopt_cola(settings)) == figures(first)
    assert counted == []
    assert figures(adopt_cola(replace(settings, fresh=True))) == figures(first)
    assert counted == [0, 0]  # the host, which the control goes on from, and the control
    with pytest.raises(ValueError, match=r"finished .* or fresh"):
        replace(settings, fresh=True, finished=True)


def test_what_is_finished_of_other_sentences(settings: ColaSettings, tmp_path: Path) -> None:
    adopt_cola(settings)
    mislabel(tmp_path / "data")
    with (
        pytest.warns(RuntimeWarning, match="seed 0: of other weights or data, so left out: (plain|tuned-on)"),
        pytest.raises(ValueError, match="expected finished cells"),
    ):
        adopt_cola(replace(settings, finished=True))
