"""Evaluations in shards: the results of one process, and what each shard does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpattention.evaluation import EvaluationSettings, evaluate_runs
from gpattention.studies.evaluating import ShardError, evaluate_many
from gpattention.studies.scheduler import Died
from gpattention.training import train_recipe
from tests.evaluation.evaluating import counted
from tests.runs.tiny_runs import digits_recipe
from tests.studies.test_scheduler import Backend

SETTINGS = EvaluationSettings(
    ("clean", "corrupted", "ood"), samples=2, limit=30, corruptions=("fog", "contrast"), severities=(1, 5),
    shift_temperature=True,
)  # fmt: skip


def plain(folder: Path) -> Any:
    """All results of a run but how long they took."""
    found = {
        file.name: json.loads(file.read_text()) for file in sorted((folder / "evaluation").glob("*.json"))
    }
    return {name: {key: x for key, x in suite.items() if key != "seconds"} for name, suite in found.items()}


def test_shards_have_the_results_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("a", "b")
    for seed, name in enumerate(names):
        train_recipe(digits_recipe(seed=seed, name="tiny"), tmp_path / "one" / name)
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    seen = counted(monkeypatch)
    evaluate_runs([tmp_path / "one" / name for name in names], SETTINGS)  # with the ensemble of both
    once, seen[:] = sorted(seen), []
    engine, steps = Backend({}), list[tuple[str, int, int]]()
    folders = [tmp_path / "many" / name for name in names]
    found = evaluate_many(folders, SETTINGS, jobs=3, engine=engine, progress=lambda *each: steps.append(each))
    assert list(found) == folders
    assert [plain(tmp_path / "many" / name) for name in names] == [
        plain(tmp_path / "one" / name) for name in names
    ]
    shards = [str(task) for task, _ in engine.started]
    assert shards[:3] == ["suites clean ood of a", "corruption fog of a", "corruption contrast of a"]
    assert shards[-3:] == ["all of a", "all of b", "all of a b"]
    assert steps[-1] == ("shards", len(shards), len(shards)) == ("shards", 9, 9)
    assert sorted(seen) == once  # nothing was predicted twice
    seen.clear()
    assert evaluate_many(folders, SETTINGS, jobs=3, engine=Backend({})) == found
    assert not seen


def test_a_shard_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_recipe(digits_recipe(), tmp_path / "run")
    with pytest.raises(ValueError, match="fresh evaluations in one process"):
        evaluate_many([tmp_path / "run"], EvaluationSettings(fresh=True), jobs=2)
    with pytest.raises(FileNotFoundError):
        evaluate_many([tmp_path / "none"], SETTINGS, jobs=2)
    monkeypatch.setattr("gpattention.studies.evaluating.evaluate_run", lambda *_: [][1])
    with pytest.raises(ShardError, match="suites clean ood of run: IndexError: list index out of range"):
        evaluate_many([tmp_path / "run"], SETTINGS, jobs=2, engine=Backend({}))
    assert isinstance(ShardError("x"), OSError)  # a command says it in a line
    monkeypatch.setattr(Backend, "answers", lambda self, workers, _: [(workers[0], True, Died(-9))])
    with pytest.raises(ShardError, match="its process was killed by SIGKILL"):
        evaluate_many([tmp_path / "run"], SETTINGS, jobs=2, engine=Backend({}))
