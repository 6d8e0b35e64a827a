"""Runs and evaluations on a cluster: what nodes must be; results are those of local processes."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpattention.cli.main import main
from gpattention.evaluation import EvaluationSettings, evaluate_run
from gpattention.runs import read_events
from gpattention.studies import ray_cluster as clusters
from gpattention.studies.evaluating import evaluate_many
from gpattention.studies.ray_cluster import ClusterError, RayEngine, check_probe, gpu_share, probe_node
from gpattention.studies.sweep import run_sweep
from tests.runs.tiny_runs import digits_recipe

ROOT = Path(__file__).parents[2]


# Nodes


def probed(folder: Path, **changes: str) -> tuple[dict[str, str], Path]:
    """What this process answers as a node, changed; and its file."""
    (folder / "ours").write_text("token")
    return probe_node(folder / "ours", folder / "theirs", None) | changes, folder / "theirs"


def test_a_node_like_this_one_is_taken(tmp_path: Path) -> None:
    found, theirs = probed(tmp_path)
    check_probe("10.0.0.2", found, "token", theirs)
    assert theirs.read_text() == "token"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("torch", "2.11.0", "as here"),
        ("gpattention", "0.1.0", "as here"),
        ("python", "3.12.1", "as here"),
        ("reads", "another token", "what was written to"),
        ("reads", "", "what was written to"),
        ("writes", "PermissionError: no", "possible in"),
        ("data", "no such folder", "the folder /data"),
    ],
)
def test_other_nodes_are_refused(field: str, value: str, expected: str, tmp_path: Path) -> None:
    found, theirs = probed(tmp_path, **{field: value})
    with pytest.raises(
        ClusterError, match=rf"node 10\.0\.0\.2: expected {field} to be .*{expected}"
    ) as refused:
        check_probe("10.0.0.2", found, "token", theirs, "/data")
    assert (refused.value.node, refused.value.field) == ("10.0.0.2", field)


def test_folders_that_are_not_shared_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "SEEN", 0.0)
    (tmp_path / "ours").write_text("token")
    assert "FileNotFoundError" in probe_node(tmp_path / "absent", tmp_path / "theirs", None)["reads"]
    assert "Error" in probe_node(tmp_path / "ours", tmp_path / "no" / "folder", None)["writes"]
    assert (
        probe_node(tmp_path / "ours", tmp_path / "theirs", str(tmp_path / "no"))["data"] == "no such folder"
    )
    found, theirs = probed(tmp_path)
    theirs.unlink()  # it was written to the node's own disk
    with pytest.raises(ClusterError, match="writes to be shared in"):
        check_probe("10.0.0.2", found, "token", theirs)


def test_a_task_has_its_share_of_one_gpu() -> None:
    assert [gpu_share(jobs, 8) for jobs in (1, 8, 9, 16, 24)] == [1, 1, 0.5, 0.5, 0.3333]
    assert (RayEngine(4, "auto", 0).device, RayEngine(4, "auto", 0).share) == ("cpu", 0)
    assert (RayEngine(4, "auto", 2).device, RayEngine(4, "auto", 2).share) == ("cuda", 0.5)
    assert RayEngine(4, "cpu", 2).share == 0
    with pytest.raises(ValueError, match="nodes with a GPU"):
        RayEngine(4, "cuda", 0)
    with pytest.raises(ValueError, match="cuda:1"):
        RayEngine(4, "cuda:1", 2)


def test_without_ray_a_message_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe = str(ROOT / "recipes" / "digits-cgp.toml")
    assert main(["sweep", recipe, "--engine", "ray", "--run", str(tmp_path)]) == 2
    assert "pip install 'gpattention[ray]'" in capsys.readouterr().err
    assert main(["sweep", recipe, "--engine", "ray", "--share-gpu"]) == 2
    assert "--engine local" in capsys.readouterr().err


# Two nodes, one of which is lost


def contents(folder: Path, *patterns: str) -> dict[str, bytes]:
    """What must be the same bytes wherever it was made."""
    found = sorted(file for pattern in patterns for file in folder.rglob(pattern))
    assert found
    return {str(file.relative_to(folder)): file.read_bytes() for file in found}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each, as far as tasks are concerned; the second can be lost."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'gpattention[ray]'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT / "src"), str(ROOT))))
    soon = {
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 4,
        "health_check_initial_delay_ms": 0,
    }
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": soon})
    made.other = made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def lose_when_trained(cluster: Any, folder: Path, runs: int) -> threading.Thread:
    """The second node, as soon as so many runs have a checkpoint to go on from."""

    def wait() -> None:
        while len({file.parent for file in folder.glob("*/seed-*/checkpoints/*.safetensors")}) < runs:
            time.sleep(0.1)
        cluster.remove_node(cluster.other, allow_graceful=False)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def figures(run: Path) -> dict[str, Any]:
    """Everything in the results of a run but how long they took."""
    found = {file.stem: json.loads(file.read_text()) for file in (run / "evaluation").glob("*.json")}
    return {name: {key: x for key, x in suite.items() if key != "seconds"} for name, suite in found.items()}


@pytest.mark.slow
def test_runs_on_a_cluster_that_loses_a_node_are_those_of_one_machine(cluster: Any, tmp_path: Path) -> None:
    recipe = digits_recipe(phases={"kernel_epochs": 1, "epochs": 30})
    over = {"model.attention": ["cgp", "scgp"]}
    here = run_sweep(recipe, over, jobs=2, folder=tmp_path / "here")
    with clusters.ray_cluster([tmp_path / "there"], jobs=2) as engine:
        assert engine.device == "cpu"
        losing = lose_when_trained(cluster, tmp_path / "there", runs=2)
        there = run_sweep(recipe, over, jobs=2, folder=tmp_path / "there", engine=engine)
        losing.join(timeout=0)
        assert not losing.is_alive()
        assert not any(row.error for row in (*here.rows, *there.rows))
        patterns = ("sweep.csv", "sweep.md", "chosen.toml", "model.safetensors", "recipe.json")
        assert contents(tmp_path / "there", *patterns) == contents(tmp_path / "here", *patterns)
        # what the node was at went on elsewhere, after its first epochs
        events = [event for row in there.rows for event in read_events(row.folder)]
        assert [event["step"] > 0 for event in events if event["event"] == "resumed"] == [True]
        assert not list(tmp_path.glob("there/.node-check-*"))
        settings = EvaluationSettings(
            ("clean", "corrupted"), samples=2, corruptions=("fog",), severities=(1,)
        )
        evaluate_many([row.folder for row in there.rows], settings, jobs=2, engine=engine)
    for one, other in zip(here.rows, there.rows, strict=True):
        evaluate_run(one.folder, settings)
        assert figures(one.folder) == figures(other.folder)
