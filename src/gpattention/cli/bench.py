"""`gpattention bench`."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

import torch

from gpattention.cli.arguments import add_device, new_command, seed_number
from gpattention.cli.bar import CountBar
from gpattention.cli.table import say, table
from gpattention.gp.fused.switch import Mode
from gpattention.studies.bench import (
    bench_lengths,
    bench_posteriors,
    bench_predictions,
    bench_steps,
    environment,
    step_floors,
    words,
)
from gpattention.studies.bench.floors import PROJECTIONS
from gpattention.studies.bench.length_case import LengthCase, measure_apart
from gpattention.studies.bench.lengths import MODELS, LengthResult, fits_of
from gpattention.studies.bench.machine import in_words
from gpattention.studies.bench.tables import BenchTable, draw_folder, write_folder, write_json
from gpattention.studies.bench.variants import VARIANTS, check_kinds
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention bench step                          training steps of every kind on this machine
  gpattention bench length --device cuda          one module at growing lengths
  gpattention bench predict                       posterior samples of many images
  gpattention bench cpu                           a part of all on the CPU, in two minutes
  gpattention bench floor                         the least that a step can take
  gpattention bench plot results/bench            figures from numbers measured elsewhere

Times are those of one run, beside softmax attention and the paper's way of the same run.
`gpattention bench step --help` has more.
"""
STEP_EXAMPLES = f"""\
examples:
  gpattention bench step
  gpattention bench step --device cuda --out results/bench
  gpattention bench step --kinds softmax,cgp,scgp-16 --batch 50 --repeats 7
  gpattention bench step --device cuda --fused off --json plain.json

A step is forward, loss with draws and regulariser, backward, Adam, as a run makes it: on a GPU captured
as one graph, and profiled kernel by kernel. softmax and paper-kernel are always in the run. paper-* are
straight transcriptions of the paper's algorithm; exit code 1 if one of them does not compute what our
mathematics does.
kinds: {", ".join(VARIANTS)}
"""
LENGTH_EXAMPLES = f"""\
examples:
  gpattention bench length --device cuda --out results/bench
  gpattention bench length --device cpu --kinds scgp,softmax --longest 8192
  gpattention bench length --device cuda --kinds cgp,paper-cgp --repeats 3

One module with its projections, 4 heads of width 32, forward and backward. On a CPU every case has a
process of its own, whose resident memory is measured. A series ends where memory does.
kinds: {", ".join(MODELS)}
"""
PREDICT_EXAMPLES = """\
examples:
  gpattention bench predict --device cuda --out results/bench
  gpattention bench predict --images 500 --samples 20 --kinds softmax,cgp
  gpattention bench predict --device cuda --batch-size 256 --eager

model.predict on images that lie on the device: 10,000 of them on a GPU, 100 on a CPU. A kind that cannot
draw makes one pass.
"""
CPU_EXAMPLES = """\
examples:
  gpattention bench cpu
  gpattention bench cpu --batch 100 --repeats 5 --out results/bench

The posteriors alone at three lengths, training steps, and scgp up to 65,536 tokens with its memory.
"""
FLOOR_EXAMPLES = """\
examples:
  gpattention bench floor
  gpattention bench floor --kinds softmax,cgp --batch 25

Computed from the model's sizes, not measured; docs/benchmarks.md has the formulae.
"""
PLOT_EXAMPLES = """\
examples:
  gpattention bench plot results/bench

Draws what `bench length --out` measured on a machine without matplotlib.
"""

CPU_TOKENS = (1024, 8192, 65_536)  # of `bench cpu`
IMAGES = {"cuda": 10_000, "cpu": 100}  # of `bench predict`


def add_parser(commands: "Commands") -> None:
    """Arguments of benchmarks."""
    bench = new_command(commands, "bench", "time training, prediction and lengths on this machine", EXAMPLES)
    below = bench.add_subparsers(title="what", metavar="WHAT", required=True)
    step = new_command(below, "step", "whole training steps of each kind", STEP_EXAMPLES)
    _add_sizes(step, batch=100, repeats=5)
    length = new_command(below, "length", "one attention module at growing lengths", LENGTH_EXAMPLES)
    length.add_argument("--longest", type=int, metavar="N", help="leave longer sequences out")
    _add_sizes(length, repeats=5)
    predict = new_command(below, "predict", "posterior samples of many images", PREDICT_EXAMPLES)
    predict.add_argument("--images", type=int, metavar="N", help="default: 10,000 on a GPU, 100 on a CPU")
    predict.add_argument("--samples", type=int, default=10, metavar="N", help="default: %(default)s")
    predict.add_argument(
        "--batch-size", type=int, metavar="N", help="rows at once (default: the model's own)"
    )
    predict.add_argument("--eager", action="store_true", help="capture no graph")
    _add_sizes(predict, repeats=3)
    cpu = new_command(below, "cpu", "a part of everything on the CPU, in two minutes", CPU_EXAMPLES)
    _add_sizes(cpu, batch=25, repeats=3, device=False)
    floor = new_command(below, "floor", "the least that a training step can take, computed", FLOOR_EXAMPLES)
    _add_sizes(floor, batch=100, device=False)
    for parser, run in ((step, run_step), (length, run_length), (predict, run_predict), (cpu, run_cpu)):
        parser.set_defaults(run_command=run)
    floor.set_defaults(run_command=run_floor)
    plot = new_command(below, "plot", "draw figures from measured numbers", PLOT_EXAMPLES)
    plot.add_argument("folder", metavar="FOLDER", help="where `--out` wrote")
    plot.set_defaults(run_command=run_plot)


def _add_sizes(
    parser: argparse.ArgumentParser,
    *,
    batch: int | None = None,
    repeats: int | None = None,
    device: bool = True,
) -> None:
    parser.add_argument("--kinds", metavar="LIST", help="comma-separated (default: all that are quick)")
    if batch is not None:
        parser.add_argument("--batch", type=int, default=batch, help="images at once (default: %(default)s)")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help="medians of (default: %(default)s)")
        parser.add_argument("--seed", type=seed_number, default=0, help="of weights, data and draws")
        parser.add_argument(
            "--fused", choices=get_args(Mode), help="fused kernels (default: GPATTENTION_FUSED or auto)"
        )
    parser.add_argument("--json", metavar="FILE", help="write all numbers to this file")
    parser.add_argument("--out", metavar="FOLDER", help="write numbers, tables and figures into this folder")
    if device:
        add_device(parser)


def run_step(given: argparse.Namespace) -> int:
    """Training steps, how far they are from their floor, and where their time goes."""
    kinds, device = _kinds(given), choose_device(given.device)
    facts = _begin(device)
    result = _with_bar(
        "steps",
        lambda bar: bench_steps(
            kinds, batch=given.batch, repeats=given.repeats, seed=given.seed, device=device,
            fused=given.fused, progress=bar,
        ),
    )  # fmt: skip
    tables = {"step": words.step_table(result)}
    if device.type == "cuda":
        ours = [row.name for row in result.rows if not row.name.startswith("paper")]
        tables["step-floor"] = words.floor_table(step_floors(ours, batch=given.batch), result)
        tables["step-profile"] = words.profile_table(result)
    _end(given, "step", facts, {"step": asdict(result)}, tables)
    return 0 if result.baselines_hold else 1


def run_length(given: argparse.Namespace) -> int:
    """Growing lengths."""
    kinds, device = _kinds(given, MODELS), choose_device(given.device)
    facts = _begin(device)
    result = _with_bar(
        "lengths",
        lambda bar: bench_lengths(
            kinds, repeats=given.repeats, seed=given.seed, longest=given.longest, device=device,
            fused=given.fused, progress=bar,
        ),
    )  # fmt: skip
    rows, fits = words.length_tables(result)
    _end(given, "length", facts, {"length": asdict(result)}, {"length": rows, "length-fits": fits})
    return 0 if result.baselines_hold else 1


def run_predict(given: argparse.Namespace) -> int:
    """Posterior samples."""
    kinds, device = _kinds(given), choose_device(given.device)
    facts = _begin(device)
    result = _with_bar(
        "predictions",
        lambda bar: bench_predictions(
            kinds, images=IMAGES.get(device.type, 100) if given.images is None else given.images,
            samples=given.samples, batch_size=given.batch_size, capture=False if given.eager else None,
            repeats=given.repeats, seed=given.seed, device=device, fused=given.fused, progress=bar,
        ),
    )  # fmt: skip
    _end(given, "predict", facts, {"predict": asdict(result)}, {"predict": words.predict_table(result)})
    return 0 if result.baselines_hold else 1


def run_cpu(given: argparse.Namespace) -> int:
    """What two CPU cores can show in two minutes."""
    kinds = _kinds(given)
    facts = _begin(torch.device("cpu"))
    times = _with_bar("posteriors", lambda bar: bench_posteriors(repeats=given.repeats, progress=bar))
    steps = _with_bar(
        "steps",
        lambda bar: bench_steps(
            kinds, batch=given.batch, repeats=given.repeats, seed=given.seed, fused=given.fused, progress=bar
        ),
    )  # fmt: skip
    lengths = _with_bar("lengths", lambda bar: _sparse_lengths(given, bar))
    rows, fits = words.length_tables(lengths)
    tables = {
        "cpu-posteriors": words.posterior_table(times),
        "cpu-step": words.step_table(steps),
        "cpu-length": rows,
        "cpu-length-fits": fits,
    }
    document = {
        "posteriors": [asdict(each) for each in times],
        "step": asdict(steps),
        "length": asdict(lengths),
    }  # fmt: skip
    _end(given, "cpu", facts, document, tables)
    return 0 if steps.baselines_hold else 1


def run_floor(given: argparse.Namespace) -> int:
    """Nothing is measured."""
    known = tuple(name for name, variant in VARIANTS.items() if variant.kind in PROJECTIONS)
    floors = step_floors(_kinds(given, known), batch=given.batch)
    document = {"floor": [asdict(floor) for floor in floors], "batch": given.batch}
    facts = environment(torch.device("cpu"))
    _end(given, "floor", facts, document, {"floor": words.floor_table(floors)})
    return 0


def run_plot(given: argparse.Namespace) -> int:
    """Figures from JSON."""
    for file in draw_folder(given.folder):
        say(f"written: {file}")
    return 0


def shown(one: BenchTable) -> str:
    """A table for the terminal, its title above and its notes below."""
    heads = [column.head for column in one.filled]
    lines = [one.title, "", table(heads, one.cells, right=one.right)]
    return "\n".join([*lines, "", *one.notes]) if one.notes else "\n".join(lines)


def _sparse_lengths(given: argparse.Namespace, bar: CountBar) -> LengthResult:
    """The sparse model at three lengths, each in a process of its own."""
    rows = []
    mode: Mode = given.fused or "auto"
    for done, tokens in enumerate(CPU_TOKENS, 1):
        rows.append(measure_apart(LengthCase("scgp", 1, tokens, given.repeats, given.seed, "cpu", mode)))
        bar(done, len(CPU_TOKENS))
    return LengthResult(tuple(rows), fits_of(rows), {}, given.repeats, given.seed, "cpu", mode, {})


def _kinds(given: argparse.Namespace, known: Sequence[str] = tuple(VARIANTS)) -> tuple[str, ...] | None:
    if given.kinds is None:
        return None
    kinds = tuple(given.kinds.split(","))
    check_kinds(kinds, known)
    return kinds


def _begin(device: torch.device) -> dict[str, str]:
    facts = environment(device)
    print(in_words(facts))
    return facts


def _end(
    given: argparse.Namespace,
    name: str,
    facts: dict[str, str],
    measured: Mapping[str, Any],
    tables: Mapping[str, BenchTable],
) -> None:
    """Print all tables, write what was asked for."""
    for one in tables.values():
        print(f"\n{shown(one)}")
    settings = {key: x for key, x in vars(given).items() if key not in ("run_command", "debug")}
    document = {"environment": facts, "settings": settings, **measured}
    if given.json is not None:
        print()
        say(f"numbers: {write_json(document, given.json)}")
    if given.out is not None:
        files = write_folder(given.out, name, document, tables, _command(name, settings))
        print()
        say(f"written: {', '.join(str(file) for file in files)}")
        if not any(file.suffix == ".svg" for file in files) and name in ("length", "cpu"):
            print(
                f"no figures: without matplotlib they are drawn later by gpattention bench plot {given.out}"
            )


def _command(name: str, settings: Mapping[str, Any]) -> str:
    """The call that gives the same tables."""
    parts = ["gpattention", "bench", name]
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            parts.append(flag)
        elif value is not None and value is not False:
            parts += [flag, str(value)]
    return shlex.join(parts)


def _with_bar(name: str, measure: Callable[[CountBar], Any]) -> Any:
    bar = CountBar(name)
    try:
        return measure(bar)
    finally:
        bar.end()
