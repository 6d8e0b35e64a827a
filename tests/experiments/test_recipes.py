"""Every recipe of the repository: the paper's settings typed from its text, and one step of each phase."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpattention.experiments.demo import MODELS, demo_recipe
from gpattention.gp import ItemNoise
from gpattention.models import Transformer, warm_start
from gpattention.training import Recipe, build_kernel_model, build_model, load_recipe
from gpattention.training.build import needs_warm_start

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = {path.stem: load_recipe(path) for path in sorted(FOLDER.glob("*.toml"))}

SHARED = ("softmax", "kernel-symmetric", "kernel", "sgpa", "direct", "cgpt", "scgpt")
ROWS = ("cgpt-rows", "scgpt-rows", "direct-rows")
NAMES = {
    *(f"digits-{model}" for model in MODELS),
    *(f"{data}-{model}" for data in ("cifar10", "cifar100") for model in (*SHARED, *ROWS)),
    *(f"cola-{model}" for model in ("softmax", "kernel", "sgpa", "cgpt", "scgpt", "cgpt-rows")),
    *(f"{d}-{m}-paper-literal" for d in ("cifar10", "cifar100", "cola") for m in ("sgpa", "cgpt", "scgpt")),
    "cifar10-cgpt-paper-literal-07",
}


@dataclass(frozen=True)
class Setting:
    """What the paper's section on experiments says of a task."""

    depth: int
    width: int
    heads: int
    batch: int
    first_epochs: int  # of kernel attention, for the models with a Gaussian process
    epochs: int  # in all
    select: str
    every: int  # epochs between validations, where the paper says so
    kernel: str  # of kernel attention and SGPA
    sparse_noise: float  # sigma^2 of SCGPT
    sparse_inducing: int | None  # of SCGPT, where the paper says so
    sgpa_inducing: int | None


IMAGES = Setting(5, 128, 4, 100, 200, 600, "best", 10, "ard_rbf", 0.1**2, 16, 32)
COLA = Setting(2, 256, 4, 32, 0, 50, "last", 0, "exp_dot", 0.5**2, None, None)
PAPER = {"cifar10": IMAGES, "cifar100": IMAGES, "cola": COLA}
ALPHAS = {  # of the paper's own objective: section 5.1, appendix C.1 of tables 4 and 5
    "cifar10-cgpt": (0.5, 1.0),
    "cifar10-cgpt-07": (0.7, 0.7),
    "cifar100-cgpt": (0.7, 0.7),
}
FACTS: dict[str, dict[str, Any]] = {
    "digits": {"classes": 8, "image_size": 8, "channels": 1, "patch": 2},
    "cifar10": {"classes": 10, "image_size": 32, "channels": 3, "patch": 4},
    "cifar100": {"classes": 100, "image_size": 32, "channels": 3, "patch": 4},
    "cola": {"classes": 2, "vocabulary": 50, "contextual_width": 0, "max_length": 12},
}
OF_PAPER = sorted(name for name in RECIPES if not name.startswith("digits"))


def test_every_model_of_the_paper_has_its_recipe() -> None:
    assert set(RECIPES) == NAMES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_comment_says_what_it_is(name: str) -> None:
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("seed = 0")])
    assert all(line.startswith("# ") for line in lines[: lines.index("seed = 0")])
    ours = RECIPES[name].data.name == "digits"
    for part in ("every setting is ours",) if ours else ("The paper says", "The paper is silent on"):
        assert part in comment
    assert ours or "table" in comment or "Not in the paper" in comment


@pytest.mark.parametrize("model", MODELS)
def test_digits_are_the_demo_s(model: str) -> None:
    assert replace(RECIPES[f"digits-{model}"], name=f"demo-{model}") == demo_recipe(model)


@pytest.mark.parametrize("name", OF_PAPER)
def test_settings_are_the_paper_s(name: str) -> None:
    recipe = RECIPES[name]
    paper = PAPER[recipe.data.name]
    config = recipe.model.config
    assert (config["depth"], config["width"], config["heads"]) == (paper.depth, paper.width, paper.heads)
    assert recipe.optimizer.batch_size == paper.batch
    assert (recipe.optimizer.learning_rate, recipe.optimizer.final_learning_rate) == (5e-4, 1e-5)
    assert (recipe.optimizer.accumulate, recipe.optimizer.clip, recipe.optimizer.restart) == (1, None, False)
    assert recipe.epochs == paper.epochs
    assert recipe.checkpoint.select == paper.select
    assert paper.every in (0, recipe.checkpoint.every)
    expected = paper.first_epochs if needs_warm_start(recipe) else 0
    assert recipe.phases.kernel_epochs == expected
    if recipe.data.name == "cola":
        assert (recipe.model.type, config["embedding_width"]) == ("text", 128)


@pytest.mark.parametrize("name", OF_PAPER)
def test_attention_is_the_paper_s(name: str) -> None:
    recipe = RECIPES[name]
    paper, options, rest = PAPER[recipe.data.name], recipe.model.options, name.partition("-")[2]
    if recipe.model.attention in ("kernel", "sgpa"):
        assert options["kernel"] == paper.kernel
        assert options.get("symmetric", False) == (rest == "kernel-symmetric")
    if recipe.model.attention == "sgpa":
        assert paper.sgpa_inducing in (None, options["num_inducing"])
    if recipe.model.attention == "scgp":
        assert paper.sparse_inducing in (None, options["num_inducing"])
    if recipe.model.attention not in ("softmax", "sgpa"):
        assert options["normalize"] == ("rows" if rest.endswith("-rows") else "none")
    if rest.startswith("scgpt") and not rest.endswith("-rows"):
        assert options["noise"] == pytest.approx(paper.sparse_noise)
        assert options["learn_noise"] is False


@pytest.mark.parametrize("name", OF_PAPER)
def test_objectives(name: str) -> None:
    """The published ones in the literal recipes, and ones that do not collapse a model elsewhere."""
    recipe = RECIPES[name]
    alpha = recipe.regularizer
    if "-paper-literal" in name:
        assert (alpha.start, alpha.end) == ALPHAS.get(name.replace("-paper-literal", ""), (0.0, 1.0))
        assert not alpha.normalised
        own = {"sgpa": "kl", "cgp": "jensen", "scgp": "double_jensen"}
        assert recipe.model.options["regularizer"] == own[recipe.model.attention]
        if recipe.model.attention == "cgp":
            assert recipe.model.options["observation_noise"] == 0.0
            assert recipe.model.options["latent_prior"] == "latent"
    elif recipe.model.attention not in ("softmax", "kernel"):
        assert (alpha.start, alpha.end, alpha.normalised) == (0.0, 0.01, True)
        stable = {"sgpa": "kl", "scgp": "dtc"}
        assert recipe.model.options["regularizer"] == stable.get(recipe.model.attention, "marginal")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_both_phases_take_a_step(name: str) -> None:
    recipe = RECIPES[name]
    facts = FACTS[recipe.data.name]
    torch.manual_seed(0)
    inputs = _inputs(recipe)
    kernel = build_kernel_model(recipe, facts)
    model = build_model(recipe, facts)
    if needs_warm_start(recipe) and recipe.phases.kernel_epochs:
        _step(kernel, inputs, recipe, drawing=False)
        warm_start(model, kernel)
    before = [p.detach().clone() for p in model.parameters()]
    regularizer = _step(model, inputs, recipe, drawing=model.draws)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert (regularizer is not None) == model.draws


def _inputs(recipe: Recipe) -> Any:
    facts = FACTS[recipe.data.name]
    if recipe.model.type == "vision":
        return torch.randn(2, facts["channels"], facts["image_size"], facts["image_size"])
    tokens = torch.randint(1, facts["vocabulary"], (2, facts["max_length"]))
    tokens[1, 5:] = 0  # the second sentence is shorter
    return {"tokens": tokens, "padding_mask": tokens == 0}


def _step(model: Transformer, inputs: Any, recipe: Recipe, *, drawing: bool) -> Tensor | None:
    items = torch.arange(2)
    out = model(
        inputs,
        draw=recipe.phases.draw if drawing else "none",
        generator=ItemNoise(0, items, torch.zeros_like(items)) if drawing else None,
        need=("logits", "regularizer") if drawing else ("logits",),
    )
    loss = cross_entropy(out.logits, items)
    if out.regularizer is not None:
        loss = loss + recipe.regularizer.end * out.regularizer
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.optimizer.learning_rate)
    loss.backward()
    optimizer.step()
    return out.regularizer
