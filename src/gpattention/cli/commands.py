"""What each command does."""

import argparse
import sys
from pathlib import Path

from gpattention.attention import attention_class, list_attention
from gpattention.cli.bar import Bar
from gpattention.cli.demo_page import demo_table, write_page
from gpattention.experiments import run_demo, train_images
from gpattention.experiments.demo import MODELS
from gpattention.training import load_recipe


def demo(given: argparse.Namespace) -> None:
    """Six kinds of attention on digits, a table and a page."""
    models = tuple(MODELS) if given.models is None else tuple(given.models.split(","))
    print(f"training {', '.join(models)} on handwritten digits, {given.jobs} at a time")
    result = run_demo(
        given.run,
        models=models,
        kernel_epochs=given.kernel_epochs,
        epochs=given.epochs,
        seed=given.seed,
        workers=given.jobs,
        on_done=lambda row: print(
            f"  {row.model:<8} {row.seconds:4.0f} s  accuracy {row.accuracy:.3f}", flush=True
        ),
    )
    print("\n" + demo_table(result, bold=sys.stdout.isatty()))
    page = write_page(result)
    print(f"\nreport: {page}")


def train(given: argparse.Namespace) -> None:
    """A recipe into a run folder."""
    recipe = load_recipe(given.recipe, given.changes)
    folder = Path(given.run) if given.run else Path("runs") / recipe.name
    result = train_images(
        recipe,
        folder,
        root=given.data,
        resume=given.resume,
        device=given.device,
        progress=Bar(recipe.name),
    )
    last = result.rows[-1]
    print(f"validation accuracy {last['validation_accuracy']:.4f}, NLL {last['validation_nll']:.4f}")
    print(f"run: {result.folder}")


def models(given: argparse.Namespace) -> None:
    """Kinds of attention and what they can do."""
    print(f"{'kind':<12}{'draws':<7}{'cross':<7}{'causal':<8}{'rows':<6}regularisers")
    for kind in list_attention():
        cls = attention_class(kind)
        flags = (cls.draws, cls.crosses, cls.causal_form, cls.normalizes)
        cells = [("yes" if flag else "no") for flag in flags]
        print(f"{kind:<12}{cells[0]:<7}{cells[1]:<7}{cells[2]:<8}{cells[3]:<6}{', '.join(cls.regularizers)}")
