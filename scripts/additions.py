# ruff: noqa: E501 - changes are lines of code in strings
"""How many files an addition touches: rows of CONTRIBUTING's table, made in a copy, tried and counted.

    python scripts/additions.py            all of them
    python scripts/additions.py metric     one

A change is text put behind an anchor of a file, or a new file.  The copy must then do what a user would ask of
the addition; exit code 1 if one does not, or touches more files than CONTRIBUTING promises.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = "--set phases.kernel_epochs=1 --set phases.epochs=1 --set model.config.width=16 --device cpu"
MADE = f"gpattention train recipes/digits-cgp.toml --run made/run {TINY} && "
RECORDS = "made/run/evaluation"


@dataclass(frozen=True)
class Addition:
    """What is written where, how it is tried, and the number of files that it may take.

    Attributes:
        edits: (file below src/gpattention, anchor, text): behind the anchor, or a new file where it is empty.
        check: shell commands that fail if the addition does not work.
        files: promised.
    """

    edits: tuple[tuple[str, str, str], ...]
    check: str
    files: int = 1


def python(code: str) -> str:
    """A check in Python."""
    return f'python -c "{code}"'


ADDITIONS = {
    "kind of attention": Addition(
        (("attention/cosine.py", "", '''"""Kernel attention of unit queries and keys."""

from torch import Tensor
from torch.nn.functional import normalize

from gpattention.attention.base import Heads
from gpattention.attention.kernel import KernelAttention
from gpattention.attention.base import register_attention


@register_attention("cosine")
class CosineAttention(KernelAttention):
    """The same kernel on the sphere."""

    def _scaled(self, heads: Heads) -> tuple[Tensor, Tensor]:
        q, k = super()._scaled(heads)
        return normalize(q, dim=-1), normalize(k, dim=-1)
'''),),
        f"gpattention models | grep cosine && {MADE.replace('digits-cgp', 'digits-kernel')} true"
        " && gpattention train recipes/digits-kernel.toml --set model.attention=cosine --set phases.epochs=1"
        " --run made/cosine --device cpu && "
        + python("import torch, gpattention.attention as a; a.build_attention('cosine', embed_dim=16, num_heads=2)(torch.randn(2, 5, 16))"),
    ),
    "metric": Addition(
        (("metrics/registry.py", '    Metric("accuracy", "accuracy", True, "labels", of.accuracy, **_PER_CENT),\n',
          '    Metric("error", "error rate", False, "labels", lambda p, y: 1 - of.accuracy(p, y), **_PER_CENT),\n'),),
        f"{MADE} gpattention evaluate made/run --suite clean --limit 40 && grep -q '\"error\"' {RECORDS}/clean.json"
        " && gpattention report made --output made/report.html && grep -qi 'error rate' made/report.html",
    ),
    "score of predictions for out-of-distribution detection": Addition(
        (("evaluation/ood_scores.py", "SCORES = {  # in the order of tables\n",
          '    "margin": OodScore("margin", lambda p, _: -p.prediction.probs.topk(2, -1).values.diff(dim=-1)[:, 0].abs()),\n'),),
        f"{MADE} gpattention evaluate made/run --suite ood --limit 40 && grep -q '\"margin\"' {RECORDS}/ood.json",
    ),
    "data set": Addition(
        (("data/odd_digits.py", "", '''"""The bundled digits, split in another way."""

from gpattention.data.catalogue import register
from gpattention.data.datasets import ImageData
from gpattention.data.digits import load_digits


def load_odd_digits(seed: int = 0, *, augment: bool = False) -> ImageData:
    """Digits of the next seed."""
    return load_digits(seed + 1, augment=augment)


register("odd-digits", "images", "digits of another split", "CC BY 4.0", "", load_odd_digits)
'''),),
        "gpattention data list | grep odd-digits && gpattention train recipes/digits-cgp.toml --set data.name=odd-digits"
        f" --run made/odd {TINY}",
    ),
    "host family": Addition(
        (("hosts/families/shouting.py", "", '''"""timm's attention under another name."""

from torch import nn

from gpattention.hosts.families.timm import TimmFamily


class ShoutingFamily(TimmFamily):
    """Modules that say so."""

    name = "shouting"

    def matches(self, module: nn.Module) -> bool:
        """By an attribute of theirs."""
        return hasattr(module, "shouts") and super().matches(module)
'''),
         ("hosts/families/__init__.py", "import huggingface, own, ", "shouting, "),
         ("hosts/families/__init__.py", "_CLASSES = (", "shouting.ShoutingFamily, ")),
        python("from gpattention.hosts.families import FAMILIES; assert 'shouting' in FAMILIES"),
        files=2,
    ),
    "option of evaluate": Addition(
        (("evaluation/run.py", "    adaptive_temperature: bool = False\n", "    quiet_failures: bool = False\n"),
         ("evaluation/run.py", "            under the same shifts (`AdaptiveTemperature`).\n",
          "        quiet_failures: say nothing of suites that fail.\n")),
        "COLUMNS=200 gpattention evaluate --help | grep -e --quiet-failures",
    ),
    "corruption": Addition(
        (("data/corruptions/noise.py", "corruption, nearest_levels\n", '''

@corruption("noise", (0.1,), (0.2,), (0.3,), (0.4,), (0.5,))
def grey_noise(images: Tensor, scene: Scene, scale: float) -> Tensor:
    """Images on their way to grey."""
    return images + scale * (0.5 - images)
'''),),
        f"{MADE} gpattention evaluate made/run --suite corrupted --corruptions grey_noise --severities 3 --limit 40"
        f" && grep -q grey_noise {RECORDS}/corrupted.json",
    ),
    "section of the report": Addition(
        (("reports/sections/colophon.py", "", '''"""Where all this ran."""

from gpattention.reports import html
from gpattention.reports.comparison import Comparison
from gpattention.reports.sections.registry import section


@section("colophon", "Colophon", "Where all this ran.", place=120)
def content(comparison: Comparison, name: str) -> "html.Markup":
    """How many runs there were."""
    return html.render("advice", f"{len(comparison.runs)} runs")
'''),),
        f"{MADE} gpattention report made --output made/report.html && grep -q Colophon made/report.html",
    ),
    "predictor": Addition(
        (("evaluation/predictors.py", "PREDICTORS = {  # in the order of tables\n",
          '    "sure": PredictorKind("the model, not drawn", _mean),\n'),),
        f"{MADE} gpattention evaluate made/run --suite clean --limit 40 --predictors sure && grep -q '\"sure\"' {RECORDS}/clean.json",
    ),
    "suite": Addition(
        (("evaluation/suites/counting.py", "", '''"""Suite `counting`: how many test items there are."""

from gpattention.evaluation.suites.findings import Findings, Subject
from gpattention.runs import Record


def evaluate_counting(subject: Subject) -> Findings:
    """Of the run's test set."""
    items = subject.sets.test
    return Findings((Record(items.name, "model", "items", float(len(items))),))
'''),
         ("evaluation/suites/__init__.py", "from gpattention.evaluation.suites.corrupted import",
          " corruption_means, evaluate_corrupted\nfrom gpattention.evaluation.suites.counting import evaluate_counting  # "),
         ("evaluation/suites/__init__.py", "SUITES = {\n",
          '    "counting": Suite("count of items", evaluate_counting, predictions=False),\n')),
        f"{MADE} gpattention evaluate made/run --suite counting && grep -q items {RECORDS}/counting.json",
        files=2,
    ),
    "optimiser": Addition(
        (("runs/recipe.py", '    "adam": (torch.optim.Adam, ("betas", "eps", "weight_decay", "amsgrad")),\n',
          '    "nadam": (torch.optim.NAdam, ("betas", "eps", "weight_decay")),\n'),),
        f"gpattention train recipes/digits-cgp.toml --set optimizer.name=nadam --run made/nadam {TINY}",
    ),
}  # fmt: skip


def tried(name: str, addition: Addition) -> bool:
    """Make, try and count one addition."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src")
        shutil.copytree(ROOT / "recipes", copy / "recipes")
        touched = set()
        for file, anchor, text in addition.edits:
            if not text:
                continue
            path = copy / "src" / "gpattention" / file
            before = path.read_text() if path.is_file() else ""
            if before.count(anchor) < 1 or (not anchor and before):
                raise SystemExit(f"{name}: expected {anchor!r} in {file}")
            path.write_text(before.replace(anchor, anchor + text, 1) if anchor else text)
            touched.add(file)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        environment = {"PATH": path, "PYTHONPATH": str(copy / "src"), "HOME": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            addition.check, cwd=copy, shell=True, env=environment, capture_output=True, text=True
        )
    works = done.returncode == 0 and len(touched) <= addition.files
    print(f"{name:<56}{len(touched)} files{'' if works else '   FAILED'}", flush=True)
    if done.returncode:
        print(done.stdout[-500:], done.stderr[-1500:])
    return works


def main() -> int:
    """Try what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="default: all")
    names = parser.parse_args().names or list(ADDITIONS)
    return int(not all([tried(name, ADDITIONS[name]) for name in names]))  # noqa: C419 all of them


if __name__ == "__main__":
    sys.exit(main())
