"""Tuning on from a fine-tuned host: where it starts, what it leaves alone, what it depends on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpattention
from gpattention.studies.adoption.cola import ColaSettings, Weights, adopt_cola
from gpattention.studies.adoption.encoder import Finetuning, Sentences
from gpattention.studies.adoption.methods import CONTROL, HOST, Further, converted, methods_of
from tests.studies.adoption.conftest import FIT

pytest.importorskip("transformers")
CPU = torch.device("cpu")
FIRST = Finetuning(epochs=2, learning_rate=0.01, batch_size=16)


@pytest.fixture(scope="module")
def weights(parts: dict[str, Sentences], encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"), encoder, parts, FIRST, Further(epochs=1))


@pytest.fixture(scope="module")
def settings(root: Path, encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> ColaSettings:
    return ColaSettings(
        encoder=str(encoder), seeds=(0,), finetuning=FIRST, further=Further(epochs=1, learning_rate=0.005),
        samples=2, root=root, runs=tmp_path_factory.mktemp("runs"), device="cpu", subset=True, fit=FIT,
        methods=("plain", "tuned-on", "converted-direct"),
    )  # fmt: skip


def test_the_control_starts_as_the_host_and_ends_elsewhere(weights: Weights) -> None:
    host, _ = weights.trained(HOST)
    before, after = host.state_dict(), weights.trained(CONTROL)[0].state_dict()
    start = weights.start(CONTROL).state_dict()
    for name, tensor in before.items():
        assert torch.equal(start[name], tensor), name
    assert not torch.equal(after["head.weight"], before["head.weight"])
    again, _ = weights.trained(HOST)  # whose weights nobody has touched
    assert torch.equal(again.state_dict()["head.weight"], before["head.weight"])


@pytest.mark.parametrize("kind", ["direct", "cgp"])
def test_a_converted_model_starts_as_the_host(kind: str, weights: Weights) -> None:
    host, _ = weights.trained(HOST)
    test = weights.parts["test"]
    inputs = test.inputs([0, 5, len(test) - 1], CPU)
    with torch.no_grad():
        expected = host(**inputs)
    start = weights.start(converted(kind)).eval()
    for name, tensor in host.state_dict().items():
        assert torch.equal(start.state_dict()[name], tensor), name
    found = gpattention.predict(start, inputs, samples=0).logits[0]
    assert float((found - expected).norm() / expected.norm()) < 0.012  # docs/convert.md
    fresh = weights.start(converted(kind, "pretrained")).eval()
    elsewhere = gpattention.predict(fresh, inputs, samples=0).logits[0]
    assert float((elsewhere - expected).norm() / expected.norm()) > 0.1


def test_the_prior_scale_is_the_size_of_the_draws(weights: Weights) -> None:
    inputs = weights.parts["test"].inputs(range(8), CPU)
    spreads = []
    for scale in (0.02, 0.2, 1.0):
        made = replace(weights, further=Further(prior_scale=scale))
        start = made.start(converted("direct"))
        spreads.append(float(gpattention.predict(start, inputs, samples=16).logits.std(0).mean()))
    assert 0 < spreads[0] < spreads[1] < spreads[2]
    assert spreads[0] < 0.2 * spreads[1]


def test_later_epochs_have_orders_of_their_own(weights: Weights) -> None:
    train = weights.parts["train"]
    orders = [[y.tolist() for _, y in train.shuffled(16, seed=0, epoch=e, device=CPU)] for e in range(3)]
    assert orders[2] not in orders[:2]
    _, epochs = weights.trained(CONTROL)
    assert [row["epoch"] for row in epochs] == [3]  # after the two of the host


def test_weights_of_another_schedule_are_refused(weights: Weights) -> None:
    weights.trained(CONTROL)
    longer = replace(weights, further=Further(epochs=2))
    with pytest.raises(ValueError, match=r"tuned-on.safetensors was trained with .*'epochs': 1.*not with"):
        longer.trained(CONTROL)
    longer.trained(HOST)  # which does not depend on it
    scaled = replace(weights, further=Further(epochs=1, prior_scale=0.5, regularizer=0.0))
    scaled.trained(CONTROL)  # neither does the control on what converted models are given
    weights.trained(converted("direct"))
    with pytest.raises(ValueError, match=r"converted-direct.safetensors was trained with"):
        scaled.trained(converted("direct"))


def test_cells_of_the_host_outlive_another_further_schedule(settings: ColaSettings) -> None:
    cells = adopt_cola(settings)
    plain, control, moved = cells
    assert [cell.method for cell in cells] == ["plain", "tuned-on", "converted-direct"]
    assert control.values != plain.values
    assert moved.values != control.values
    assert adopt_cola(replace(settings, finished=True)) == cells
    other = replace(settings, further=Further(epochs=2))
    assert adopt_cola(replace(other, methods=("plain",), finished=True)) == [plain]
    with pytest.raises(ValueError, match=r"tuned-on.json was computed with other settings \(further"):
        adopt_cola(replace(other, finished=True))


def test_cells_written_before_there_was_a_control_are_read(settings: ColaSettings) -> None:
    adopt_cola(replace(settings, methods=("plain",)))
    told = (Path(settings.runs) / "seed0" / "plain.json").read_text()
    assert "further" not in told
    assert "further" in (Path(settings.runs) / "seed0" / "tuned-on.json").read_text()


def test_finished_cells_need_no_weights(settings: ColaSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    first = adopt_cola(settings)
    monkeypatch.setattr("gpattention.studies.adoption.cola.finetune", None)  # would fail
    assert adopt_cola(settings) == first
    mean = "converted-direct-mean+temperature"  # asked for later: from the kept weights
    (cell,) = adopt_cola(replace(settings, methods=(mean,)))
    assert cell.method == mean
    assert cell.values["test"]["nll"] != first[2].values["test"]["nll"]


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 0},
        {"epochs": 1.5},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"prior_scale": -0.1},
        {"regularizer": -1.0},
    ],
)
def test_refused_further(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"expected further {next(iter(change))} .*got"):
        Further(**change)  # type: ignore[arg-type]


def test_starts_are_named() -> None:
    assert converted("cgp").name != converted("cgp", "pretrained").name
    assert methods_of(("direct",), "pretrained")[-1] == "pretrained-direct-mean+temperature"
    with pytest.raises(ValueError, match="start to be one of host, pretrained, got 'scratch'"):
        converted("cgp", "scratch")  # type: ignore[arg-type]
