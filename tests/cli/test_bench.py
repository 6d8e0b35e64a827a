"""`gpattention bench`: ratios of one run, against softmax and the paper's kernel attention."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpattention.attention import list_attention
from gpattention.cli import main
from gpattention.experiments.bench_posteriors import NAMES, bench_posteriors
from gpattention.experiments.benching import (
    ALLOWED_GAP,
    PAPER,
    SOFTMAX,
    VARIANTS,
    bench_predictions,
    bench_steps,
    environment,
    time_in_turns,
)
from gpattention.experiments.paper_kernel import PaperKernelAttention, gap_to_ours, paper_model
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

Output = pytest.CaptureFixture[str]
SMALL = VisionConfig(width=16, heads=2, depth=1, image_size=8, patch=4)


def test_the_baseline_is_our_kernel_attention() -> None:
    assert gap_to_ours(VisionConfig()) < ALLOWED_GAP
    theirs = paper_model(SMALL)
    assert all(isinstance(block.attention, PaperKernelAttention) for block in theirs.blocks)  # type: ignore[union-attr]
    ours = VisionTransformer(replace(SMALL, attention=AttentionConfig("kernel", {"normalize": "none"})))
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs.eval()(images).logits, ours.eval()(images).logits)
    assert "paper" not in " ".join(list_attention())  # it is no kind that a recipe could name


@pytest.mark.parametrize("measure", [bench_steps, bench_predictions])
def test_ratios_are_those_of_the_times(measure: object) -> None:
    told: list[tuple[int, int]] = []
    result = measure(  # type: ignore[operator]
        ["cgp", "kernel"], batch=2, repeats=2, config=SMALL, progress=lambda *x: told.append(x)
    )
    assert [row.name for row in result.rows] == [PAPER, SOFTMAX, "cgp", "kernel"]
    seconds = {row.name: row.seconds for row in result.rows}
    for row in result.rows:
        assert row.seconds > 0
        assert row.to_softmax == pytest.approx(row.seconds / seconds[SOFTMAX])
        assert row.to_paper == pytest.approx(seconds[PAPER] / row.seconds)
    assert told == [(i, 12) for i in range(1, 13)]  # four models, one turn to warm up and two to measure
    assert (result.batch, result.repeats) == (2, 2)


def test_every_variant_can_be_timed() -> None:
    result = bench_steps(batch=2, repeats=1, config=SMALL)
    assert {row.name for row in result.rows} == {PAPER, *VARIANTS}


def test_times_are_medians_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr("gpattention.experiments.benching.time.perf_counter", lambda: clock[0])
    lasting = {"a": iter([90.0, 1.0, 2.0, 30.0]), "b": iter([90.0, 5.0, 5.0, 4.0])}

    def call(name: str) -> None:
        order.append(name)
        clock[0] += next(lasting[name])

    calls = {name: lambda name=name: call(name) for name in lasting}
    assert time_in_turns(calls, 3, torch.device("cpu")) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 4


def test_posteriors_at_some_lengths() -> None:
    told: list[tuple[int, int]] = []
    times = bench_posteriors([3, 4], repeats=1, progress=lambda *x: told.append(x))
    assert [each.tokens for each in times] == [3, 4]
    assert all(tuple(each.seconds) == NAMES and min(each.seconds.values()) > 0 for each in times)
    assert told == [(i, 20) for i in range(1, 21)]
    with pytest.raises(ValueError, match="expected lengths and repeats >= 1"):
        bench_posteriors([0])


@pytest.mark.parametrize("what", ["step", "predict"])
def test_the_command_prints_a_table_and_writes_numbers(what: str, tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "new" / "bench.json"
    options = ["--kinds", "kernel", "--batch", "1", "--repeats", "1", "--device", "cpu", "--samples", "2"]
    assert main(["bench", what, *options, "--json", str(file)]) == 0
    told = capsys.readouterr().out
    assert "faster than the paper's kernel" in told
    document = json.loads(file.read_text())
    names = [row["name"] for row in document[what]["rows"]]
    assert names == [PAPER, SOFTMAX, "kernel"]
    assert all(f"\n{name} " in told for name in names)
    assert document["environment"] == environment(torch.device("cpu"))
    assert document["environment"]["torch"] == torch.__version__


def test_the_cpu_part_has_both_tables(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpattention.cli.bench.bench_posteriors", lambda **_: bench_posteriors([4], repeats=1)
    )
    assert main(["bench", "cpu", "--kinds", "softmax", "--batch", "1", "--repeats", "1"]) == 0
    told = capsys.readouterr().out
    assert "cgp by inverses" in told
    assert "ms/step" in told


def test_a_baseline_that_is_not_the_same_attention_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setattr("gpattention.experiments.benching.gap_to_ours", lambda _: 1e-3)
    assert main(["bench", "--kinds", "softmax", "--batch", "1", "--repeats", "1", "--device", "cpu"]) == 1
    assert "differ by 1.0e-03" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "nothing"], "expected kinds among softmax, kernel"),
        (["--batch", "0"], "expected batch >= 1, got 0"),
        (["--repeats", "0"], "expected repeats >= 1, got 0"),
        (["predict", "--samples", "-1"], "expected samples >= 0, got -1"),
        (["--device", "abacus"], "expected device to be"),
    ],
)
def test_mistakes_take_one_line(arguments: list[str], message: str, capsys: Output) -> None:
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["posteriors", "training_step"])
def test_the_scripts_run(name: str) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout
