"""Time training, prediction and lengths on this machine.

Examples:
  gpattention bench step                          training steps of every kind on this machine
  gpattention bench length --device cuda          one module at growing lengths
  gpattention bench predict                       posterior samples of many images
  gpattention bench cpu                           a part of all on the CPU, in two minutes
  gpattention bench floor                         the least that a step can take
  gpattention bench plot results/bench            figures from numbers measured elsewhere

Times are those of one run, beside softmax attention and the paper's way of the same run.
`gpattention bench step --help` has more.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import typer

from gpattention.cli.console import Bar, say, table
from gpattention.cli.main import App
from gpattention.cli.options import Device, takes
from gpattention.numerics import choose_device
from gpattention.ops import Mode
from gpattention.studies import bench_tables
from gpattention.studies.bench import (
    VARIANTS,
    bench_predictions,
    bench_steps,
    check_kinds,
    step_floors,
)
from gpattention.studies.bench_lengths import MODELS, bench_lengths
from gpattention.studies.bench_tables import BenchTable, environment, in_words

CPU_TOKENS = (1024, 8192, 65_536)  # of `bench cpu`
IMAGES = {"cuda": 10_000, "cpu": 100}  # of `bench predict`


@dataclass(frozen=True)
class Options:
    """Options that the commands share; each has those that mean something to it.

    Args:
        kinds (LIST): comma-separated (default: all that are quick).
        batch: images at once.
        repeats: medians of.
        seed: seed of weights, data and draws.
        fused: fused kernels (default: GPATTENTION_FUSED or auto).
        json (FILE): write all numbers to this file.
        out (FOLDER): write numbers, tables and figures into this folder.
    """

    kinds: tuple[str, ...] | None = None
    batch: int = 100
    repeats: int = 5
    seed: int = 0
    fused: Mode | None = None
    json: str | None = None
    out: str | None = None
    device: Device = "auto"

    def shared(self, known: Sequence[str] = tuple(VARIANTS)) -> dict[str, Any]:
        """Arguments of all functions that measure; prints the machine first."""
        check_kinds(self.kinds or (), known)
        device = choose_device(self.device)
        print(in_words(environment(device)))
        return {"repeats": self.repeats, "seed": self.seed, "device": device, "fused": self.fused}


app = App()
bench = App(help=__doc__)
app.add_typer(bench, name="bench")


@bench.command("step", epilog=f"kinds: {', '.join(VARIANTS)}")
@takes(Options, "options")
def step(ctx: typer.Context, options: Options, tokens: int | None = None) -> int:
    """Whole training steps of each kind.

    Options:
        tokens (N): length of a sequence (default: the paper's 64; else paper-kernel is left out).

    Examples:
      gpattention bench step
      gpattention bench step --device cpu --tokens 17 --kinds direct,cgp,scgp-16
      gpattention bench step --device cuda --out results/bench
      gpattention bench step --kinds softmax,cgp,scgp-16 --batch 50 --repeats 7
      gpattention bench step --device cuda --fused off --json plain.json

    A step is forward, loss with draws and regulariser, backward, Adam, as a run makes it: on a GPU captured
    as one graph, and profiled kernel by kernel. softmax and paper-kernel are always in the run. paper-* are
    straight transcriptions of the paper's algorithm; exit code 1 if one of them does not compute what our
    mathematics does.
    """
    shared = options.shared()
    with closing(Bar("steps")) as bar:
        result = bench_steps(options.kinds, batch=options.batch, tokens=tokens, progress=bar, **shared)
    tables = {"step": bench_tables.step_table(result)}
    if shared["device"].type == "cuda":
        ours = [row["name"] for row in result.rows if not row["name"].startswith("paper")]
        tables["step-floor"] = bench_tables.floor_table(step_floors(ours, batch=options.batch), result)
        tables["step-profile"] = bench_tables.profile_table(result)
    _end(ctx, options, {"step": result.to_dict()}, tables)
    return 0 if result.baselines_hold else 1


@bench.command("length", epilog=f"kinds: {', '.join(MODELS)}")
@takes(Options, "options", skip=("batch",))
def length(ctx: typer.Context, options: Options, longest: int | None = None) -> int:
    """One attention module at growing lengths.

    Options:
        longest (N): leave longer sequences out.

    Examples:
      gpattention bench length --device cuda --out results/bench
      gpattention bench length --device cpu --kinds scgp,softmax --longest 8192
      gpattention bench length --device cuda --kinds cgp,paper-cgp --repeats 3

    One module with its projections, 4 heads of width 32, forward and backward. On a CPU every case has a
    process of its own, whose resident memory is measured. A series ends where memory does.
    """
    shared = options.shared(MODELS)
    with closing(Bar("lengths")) as bar:
        result = bench_lengths(options.kinds, longest=longest, progress=bar, **shared)
    rows, fits = bench_tables.length_tables(result)
    _end(ctx, options, {"length": result.to_dict()}, {"length": rows, "length-fits": fits})
    return 0 if result.baselines_hold else 1


@bench.command("predict")
@takes(Options, "options", skip=("batch",), usual=Options(repeats=3))
def predict(
    ctx: typer.Context,
    options: Options,
    images: int | None = None,
    samples: int = 10,
    batch_size: int | None = None,
    eager: bool = False,
) -> int:
    """Posterior samples of many images.

    Options:
        images (N): default: 10,000 on a GPU, 100 on a CPU.
        samples (N): draws.
        batch_size (N): rows at once (default: the model's own).
        eager: capture no graph.

    Examples:
      gpattention bench predict --device cuda --out results/bench
      gpattention bench predict --images 500 --samples 20 --kinds softmax,cgp
      gpattention bench predict --device cuda --batch-size 256 --eager

    model.predict on images that lie on the device: 10,000 of them on a GPU, 100 on a CPU. A kind that cannot
    draw makes one pass.
    """
    shared = options.shared()
    images = IMAGES.get(shared["device"].type, 100) if images is None else images
    shared |= {"images": images, "samples": samples, "batch_size": batch_size}
    with closing(Bar("predictions")) as bar:
        result = bench_predictions(options.kinds, capture=False if eager else None, progress=bar, **shared)
    _end(ctx, options, {"predict": result.to_dict()}, {"predict": bench_tables.predict_table(result)})
    return 0 if result.baselines_hold else 1


@bench.command("cpu")
@takes(Options, "options", skip=("device",), usual=Options(batch=25, repeats=3, device="cpu"))
def cpu(ctx: typer.Context, options: Options) -> int:
    """A part of everything on the CPU, in two minutes.

    Examples:
      gpattention bench cpu
      gpattention bench cpu --batch 100 --repeats 5 --out results/bench

    Training steps, and scgp up to 65,536 tokens with its memory.
    """
    shared = options.shared()
    with closing(Bar("steps")) as bar:
        steps = bench_steps(options.kinds, batch=options.batch, progress=bar, **shared)
    # the sparse model alone, at three lengths
    with closing(Bar("lengths")) as bar:
        lengths = bench_lengths(["scgp"], series={("scgp", 1): CPU_TOKENS}, progress=bar, **shared)
    rows, fits = bench_tables.length_tables(lengths)
    tables = {
        "cpu-step": bench_tables.step_table(steps),
        "cpu-length": rows,
        "cpu-length-fits": fits,
    }
    document = {"step": steps.to_dict(), "length": lengths.to_dict()}
    _end(ctx, options, document, tables)
    return 0 if steps.baselines_hold else 1


@bench.command("floor")
@takes(Options, "options", only=("kinds", "batch", "json", "out"), usual=Options(device="cpu"))
def floor(ctx: typer.Context, options: Options) -> None:
    """The least that a training step can take, computed.

    Examples:
      gpattention bench floor
      gpattention bench floor --kinds softmax,cgp --batch 25

    Computed from the model's sizes, not measured; docs/benchmarks.md has the formulae.
    """
    check_kinds(options.kinds or ())
    floors = step_floors(options.kinds, batch=options.batch)
    document = {"floor": floors, "batch": options.batch}
    _end(ctx, options, document, {"floor": bench_tables.floor_table(floors)})


@bench.command("plot")
def plot(folder: str) -> None:
    """Draw figures from measured numbers.

    Options:
        folder (FOLDER): where `--out` wrote.

    Examples:
      gpattention bench plot results/bench

    Draws what `bench length --out` measured on a machine without matplotlib.
    """
    for file in bench_tables.draw_folder(folder):
        say(f"written: {file}")


def _end(
    ctx: typer.Context, options: Options, measured: Mapping[str, Any], tables: Mapping[str, BenchTable]
) -> None:
    """Print all tables, write what was asked for."""
    for one in tables.values():
        heads, cells, numbers = one.text
        lines = [one.title, "", table(heads, cells, right=numbers), "", *one.notes]
        print("", *lines, sep="\n")
    name = str(ctx.command.name)
    names = [str(each.name) for each in ctx.command.params if each.name in ctx.params]
    settings = {each: ctx.params[each] for each in names}
    document = {"environment": environment(choose_device(options.device)), "settings": settings, **measured}
    if options.json is not None:
        say(f"\nnumbers: {bench_tables.write_json(document, options.json)}".lstrip())
    if options.out is not None:
        files = bench_tables.write_folder(options.out, name, document, tables, _command(name, settings))
        say(f"written: {', '.join(map(str, files))}")
        if not any(file.suffix == ".svg" for file in files) and name in ("length", "cpu"):
            say(f"no figures without matplotlib: gpattention bench plot {options.out} draws them later")


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
