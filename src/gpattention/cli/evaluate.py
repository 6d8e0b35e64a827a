"""`gpattention evaluate`."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpattention.cli.arguments import GOES_ON, add_data, add_device, new_command, numbers, seed_number
from gpattention.cli.bar import Bars, CountBar
from gpattention.cli.evaluation_table import evaluation_table, seeds_table
from gpattention.cli.table import say
from gpattention.evaluation.named_predictors import DEFAULT_PREDICTORS, PREDICTOR_NAMES
from gpattention.evaluation.records import SuiteResult
from gpattention.evaluation.suites import SUITES
from gpattention.experiments.judging.evaluating import evaluate_runs
from gpattention.experiments.judging.session import STEP
from gpattention.experiments.reporting import read_results
from gpattention.experiments.run_names import distinct_names
from gpattention.experiments.runs import find_runs

if TYPE_CHECKING:
    from gpattention.cli.arguments import Commands

EXAMPLES = """\
examples:
  gpattention evaluate runs/digits-cgp
  gpattention evaluate runs/digits-cgp --suite clean,ood --samples 20
  gpattention evaluate runs/cgp-seed0 runs/cgp-seed1     each, their ensemble, mean and standard error
  gpattention evaluate runs --suite corrupted --limit 1000 --data ~/data
  gpattention evaluate runs --suite clean,corrupted --shift-temperature

A stopped evaluation goes on where it stopped: what is finished with the same settings is kept. Results are in
RUN/evaluation.
"""


def add_parser(commands: "Commands") -> None:
    """Arguments of evaluation."""
    evaluate = new_command(commands, "evaluate", "judge finished runs", EXAMPLES)
    evaluate.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    evaluate.add_argument(
        "--suite", default="all", help=f"comma-separated: {', '.join(SUITES)}, or all (default: %(default)s)"
    )
    evaluate.add_argument(
        "--samples", type=int, default=10, help="draws of a prediction (default: %(default)s)"
    )
    evaluate.add_argument("--seed", type=seed_number, default=0, help="of the draws (default: %(default)s)")
    evaluate.add_argument(
        "--predictors", default=",".join(DEFAULT_PREDICTORS),
        help=f"comma-separated: {', '.join(PREDICTOR_NAMES)}; each also with temperature "
        "(default: %(default)s)",
    )  # fmt: skip
    evaluate.add_argument(
        "--batch-size", type=int, help="items times draws that run at once (default: 256, on a GPU 2000)"
    )
    evaluate.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="at most N items of each set; of sets of other kinds, spread evenly",
    )
    evaluate.add_argument("--corruptions", metavar="TYPES", help="comma-separated (default: all 19)")
    evaluate.add_argument("--severities", metavar="N,N", help="of the corruptions, 1 to 5 (default: all)")
    evaluate.add_argument(
        "--shift-temperature", action="store_true",
        help="each also with a temperature fitted on validation images turned, recoloured, covered, ...",
    )  # fmt: skip
    evaluate.add_argument("--fresh", action="store_true", help="compute everything anew, finished or damaged")
    evaluate.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    add_device(evaluate)
    add_data(evaluate)
    evaluate.set_defaults(run_command=run, when_stopped=f"{GOES_ON} (without --fresh)")


def run(given: argparse.Namespace) -> None:
    """All runs, then one table."""
    folders = _folders(given.runs)
    bars = Bars(_bar)
    try:
        found = evaluate_runs(
            folders,
            tuple(given.suite.split(",")),
            root=given.data,
            device=given.device,
            samples=given.samples,
            seed=given.seed,
            predictors=tuple(given.predictors.split(",")),
            batch_size=given.batch_size,
            limit=given.limit,
            types=None if given.corruptions is None else given.corruptions.split(","),
            severities=None if given.severities is None else numbers(given.severities, "--severities"),
            shift_temperature=given.shift_temperature,
            fresh=given.fresh,
            progress=bars,
        )
    finally:
        bars.end()
    if given.json:
        print(json.dumps(_document(found), indent=1))
        return
    bold = sys.stdout.isatty()
    names = distinct_names([folder.resolve() for folder in found])
    print(evaluation_table(dict(zip(names, found.values(), strict=True)), bold=bold))
    done = list(next(iter(found.values())))
    if several := seeds_table(read_results(folders), done, bold=bold):
        print(f"\n{several}")
    _tell_notes(found)
    for folder in found:
        say(f"results: {folder / 'evaluation'}")


def _folders(given: list[str]) -> list[Path]:
    """Every run that is meant, once."""
    found: dict[Path, Path] = {}
    for name in given:
        folder = Path(name)
        below = [folder] if (folder / "recipe.json").is_file() else find_runs(folder)
        if not below:
            raise FileNotFoundError(f"expected a run in {folder} or below, got none with a model")
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _bar(what: str) -> CountBar:
    if what.endswith("regenerating"):
        return CountBar(what, "images")
    if what.endswith("efficiency"):
        return CountBar(what, "sizes")
    return CountBar(what, "predictions", scale=STEP)


def _tell_notes(found: dict[Path, dict[str, SuiteResult]]) -> None:
    """What is missing, reduced, regenerated or a stand-in: once, however many runs say it."""
    told: dict[str, list[str]] = {}
    for suites in found.values():
        for name, result in suites.items():
            for note in result.notes:
                of = told.setdefault(note, [])
                of += [] if name in of else [name]
    if told:
        print("\nnotes:")
    for note, suites_of in told.items():
        say(f"  {', '.join(suites_of)}: {note}")
    if told:
        print()


def _document(found: dict[Path, dict[str, SuiteResult]]) -> dict[str, Any]:
    """Numbers and notes; the curves are in the files."""
    return {
        str(folder): {name: _without_curves(result) for name, result in suites.items()}
        for folder, suites in found.items()
    }


def _without_curves(result: SuiteResult) -> dict[str, Any]:
    return {key: value for key, value in result.to_dict().items() if key != "curves"}
