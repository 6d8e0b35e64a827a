"""Several processes train what one trains; one that dies ends the run and leaves a checkpoint."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from gpattention.attention import attention_class, list_attention
from gpattention.gp import ItemNoise
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.training import TrainingFailedError, launch
from gpattention.training.folder import list_checkpoints, read_checkpoint
from tests.processes import in_processes
from tests.training.toy import ROOT, run

pytest.importorskip("lightning_fabric")


def trained_by(processes: int, folder: Path, *arguments: str) -> str:
    done = run(folder, *arguments, processes=processes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in two processes, with draws, dropout and a regulariser."""
    folder = tmp_path_factory.mktemp("pair") / "run"
    trained_by(2, folder)
    return folder


def test_two_processes_equal_one_to_rounding(pair: Path, tmp_path: Path) -> None:
    trained_by(1, tmp_path / "one", "keyed")
    for name, x in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(pair)[name], x, rtol=1e-4, atol=1e-5, msg=name)
    for mine, other in zip(rows(tmp_path / "one"), rows(pair), strict=True):
        for column in ("train_loss", "train_regularizer", "validation_accuracy", "validation_nll"):
            assert float(mine[column]) == pytest.approx(float(other[column]), rel=1e-4), column


def test_a_process_that_dies_ends_the_run_and_resuming_gives_the_same_bits(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    with pytest.raises(TrainingFailedError, match=r"killed by SIGKILL.*step-00000008"):
        launch(["-m", "tests.training.toy", str(folder), "batch", "10"], 2, folder)
    trained_by(2, folder, "resume")
    for name, x in weights(pair).items():
        assert torch.equal(weights(folder)[name], x), name
    assert rows(folder) == rows(pair)
    with pytest.raises(ValueError, match="at least 2 processes to launch, got 1"):
        launch(["-c", "pass"], 1, tmp_path)


def test_all_processes_stop_when_one_is_asked_to(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert trained_by(2, folder, "stop", "6").count("at step 6") == 2
    last = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1])
    assert last.state["step"] == 6
    assert {name for name in last.tensors if name.startswith("random.")} >= {"random.0.cpu", "random.1.cpu"}
    trained_by(2, folder, "resume")
    for mine, other in zip(rows(folder), rows(pair), strict=True):
        assert mine["validation_nll"] == other["validation_nll"]
        # of the steps of both processes, also of those before the stop
        assert float(mine["train_loss"]) == pytest.approx(float(other["train_loss"]), rel=1e-12)


# `fully_shard` in a loop of one's own: two processes take the step of one

ITEMS = 4
KINDS = [kind for kind in list_attention() if attention_class(kind).__module__.startswith("gpattention.")]
SMALL: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 4}, "sgpa": {"num_inducing": 4}}


def sharded(rank: int, kind: str, processes: int) -> dict[str, Tensor]:
    """The parameters after one step of Adam on the share of a process, its draws keyed to items."""
    torch.manual_seed(0)
    config = VisionConfig(
        classes=3, depth=2, width=16, heads=2, image_size=8, channels=1, patch=4, dropout=0.0,
        attention=AttentionConfig(kind, SMALL.get(kind, {})),
    )  # fmt: skip
    model = VisionTransformer(config).train()
    if processes > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (processes,))
        for block in model.blocks:
            # SGPA's inducing inputs pass through the layer below, whose weights have to be there still
            fully_shard(block, mesh=mesh, reshard_after_forward=kind != "sgpa")
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    g = torch.Generator().manual_seed(1)
    images, labels = torch.randn(ITEMS, 1, 8, 8, generator=g), torch.arange(ITEMS) % 3
    share = torch.arange(rank * ITEMS // processes, (rank + 1) * ITEMS // processes)
    noise = ItemNoise(5, share, torch.zeros_like(share))
    draw = "independent" if model.draws else "none"
    out = model(images[share], draw=draw, generator=noise, need=("logits", "regularizer"))
    loss = cross_entropy(out.logits, labels[share])
    (loss if out.regularizer is None else loss + 0.1 * out.regularizer).backward()
    optimizer.step()
    whole = {name: x.full_tensor() if processes > 1 else x for name, x in model.named_parameters()}
    return {name: x.detach().clone() for name, x in whole.items()}


def all_sharded(rank: int) -> dict[str, dict[str, Tensor]]:
    return {kind: sharded(rank, kind, 2) for kind in KINDS}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    return in_processes(all_sharded, 2, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("kind", KINDS)
def test_two_shards_take_the_step_of_one(kind: str, shards: list[dict[str, dict[str, Tensor]]]) -> None:
    expected = sharded(0, kind, 1)
    for found in shards:
        assert found[kind].keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(found[kind][name], x, rtol=0, atol=1e-5)
