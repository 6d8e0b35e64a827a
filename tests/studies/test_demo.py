"""The demo's processes: a signal ends them, one that dies is an error."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpattention.runs import Results
from gpattention.studies import scheduler
from gpattention.studies.demo import DemoResult, run_demo
from gpattention.studies.scheduler import Work, _Worker
from gpattention.training import TrainingFailedError, TrainingStoppedError
from tests.studies.test_scheduler import Started


def test_a_signal_ends_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started()

    def start(work: Work, slot: int, task: object, fresh: bool) -> _Worker:
        if slot == 1:
            signal.raise_signal(signal.SIGTERM)
        return started(work, slot, task, fresh)

    monkeypatch.setattr(scheduler, "_start", start)
    with pytest.raises(TrainingStoppedError, match="stopped by SIGTERM; what is trained so far is kept"):
        run_demo(tmp_path, models=("softmax", "cgp"), workers=2)
    assert [process.calls[0] for process in started.processes] == ["terminate"] * 2


def test_one_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_start", Started(exitcode=1))
    with pytest.raises(TrainingFailedError, match="demo-cgp: its process ended with exit code 1"):
        run_demo(tmp_path, models=("softmax", "cgp"), workers=2)


def test_alone_it_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise TrainingStoppedError("stopped by SIGINT at step 3; resume to go on")

    monkeypatch.setattr("gpattention.studies.demo.train_recipe", stop)
    with pytest.raises(TrainingStoppedError, match=r"^stopped by SIGINT at step 3; what is trained"):
        run_demo(tmp_path, models=("softmax",), workers=1)
    with pytest.raises(ValueError, match=r"workers .* got 0"):
        run_demo(tmp_path, workers=0)


def figures(**of: Sequence[tuple[float, float]]) -> DemoResult:
    """A demo whose models have these NLLs of corrupted digits and AUROCs of unseen ones, seed by seed."""
    rows = []
    for model, seeds in of.items():
        for seed, (nll, auroc) in enumerate(seeds):
            run = {
                "run": f"{model}{seed}",
                "recipe": model,
                "seed": seed,
                "data": "digits",
                "attention": model,
            }
            run |= {"severity": None, "predictor": "model", "detail": "{}", "score": None, "items": 400}
            for suite, place, metric, value in (
                ("clean", "test", "accuracy", 0.9), ("corrupted", "corrupted/mean", "nll", nll),
                ("ood", "ood/near", "auroc", auroc),
            ):  # fmt: skip
                score = "entropy" if suite == "ood" else None
                rows.append(
                    run | {"suite": suite, "set": place, "metric": metric, "value": value, "score": score}
                )
    return DemoResult(Results.from_rows(rows), Path(), Path())


def test_a_verdict_is_two_sentences_made_of_the_figures() -> None:
    one = figures(softmax=[(1.3, 0.80)], cgp=[(1.1, 0.79)]).verdict
    assert one.startswith(
        "On corrupted digits cgp has the lowest NLL (1.100, softmax 1.300); digits never seen "
    )
    assert "by the entropy of softmax (AUROC 0.800, cgp 0.790). One seed cannot say" in one
    assert "only 400 test images, accuracies that differ by up to 0.042 may" in one
    # 1.96 sqrt(2 x .9 x .1 / 400)
    alone = figures(cgp=[(1.1, 0.79)]).verdict
    assert "cgp has the lowest NLL (1.100); digits" in alone
    seeds = figures(
        softmax=[(1.30, 0.80), (1.31, 0.82), (1.29, 0.78)], cgp=[(1.1, 0.81), (1.09, 0.79), (1.11, 0.83)]
    ).verdict
    assert "(1.100 ± 0.006, softmax 1.300 ± 0.006)" in seeds
    assert seeds.endswith(
        "Over 3 seeds (± is the standard error), the first difference is clear and the second is not clear "
        "(Student's t at 95 %)."
    )
