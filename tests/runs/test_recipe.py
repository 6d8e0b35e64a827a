"""Recipes: read, changed, refused, written; and every recipe that the repository holds."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpattention.gp import ItemNoise
from gpattention.models import Transformer, VisionConfig, VisionTransformer, warm_start
from gpattention.runs import (
    CheckpointRecipe,
    DataRecipe,
    ModelRecipe,
    OptimizerRecipe,
    PhaseRecipe,
    Recipe,
    RegularizerRecipe,
    change_recipe,
    load_recipe,
    recipe_from_dict,
    with_seed,
    write_recipe,
)
from gpattention.runs.recipe import recipe_toml, toml_value
from gpattention.studies.demo import MODELS, demo_recipe
from gpattention.training import build_kernel_model, build_model, needs_warm_start

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"
RECIPES = {path.stem: load_recipe(path) for path in sorted(FOLDER.glob("*.toml"))}
SOME = min(FOLDER.glob("*.toml"))


def test_round_trip() -> None:
    recipe = recipe_from_dict({"name": "x", "model": {"attention": "scgp", "options": {"num_inducing": 16}}})
    assert recipe_from_dict(recipe.to_dict()) == recipe
    assert with_seed(recipe, 3).seed == 3
    assert Recipe() == recipe_from_dict({})


def test_toml_and_changes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('seed = 2\n[optimizer]\nbatch_size = 32\n[model]\nattention = "sgpa"\n')
    changes = ["optimizer.batch_size=64", "model.attention=cgp", "phases.epochs = 3"]
    recipe = load_recipe(path, [*changes, "model.options.noise=0.1", "model.config={width=16}"])
    assert (recipe.name, recipe.seed, recipe.optimizer.batch_size) == ("mine", 2, 64)
    assert (recipe.model.attention, recipe.phases.epochs) == ("cgp", 3)
    assert (recipe.model.options, recipe.model.config) == ({"noise": 0.1}, {"width": 16})
    assert change_recipe(load_recipe(SOME), changes) == load_recipe(SOME, changes)
    assert recipe.replace({"phases.epochs": 7, "model.options.noise": 0.2}).phases.epochs == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"optimiser": {}}, "'optimiser'; did you mean 'optimizer'"),
        ({"optimizer": {"batchsize": 3}}, "'optimizer.batchsize'; did you mean 'batch_size'"),
        ({"optimizer": {"batch_size": 2.5}}, "optimizer.batch_size .* got 2.5"),
        ({"optimizer": {"batch_size": 0}}, "optimizer.batch_size >= 1, got 0"),
        ({"optimizer": {"restart": 1}}, "optimizer.restart to be true or false, got 1"),
        ({"optimizer": {"clip": "big"}}, "optimizer.clip .* got 'big'"),
        ({"optimizer": {"clip": -1}}, "optimizer.clip > 0, got -1"),
        ({"optimizer": {"final_learning_rate": 1}}, "optimizer.final_learning_rate .* got 1"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name .* adam, adamw, sgd, got 'lion'"),
        ({"optimizer": {"options": {"momentum": 0.9}}}, "option of optimizer adam .* got 'momentum'"),
        ({"optimizer": {"name": "sgd", "options": {"momentum": -1}}}, "got {'momentum': -1}"),
        ({"optimizer": {"options": {"betas": [0.9]}}}, r"got {'betas': \[0.9\]}"),
        ({"phases": {"draw": "some"}}, "phases.draw .* none, independent, joint, got 'some'"),
        ({"phases": {"epochs": 0}}, "at least one epoch in the two phases"),
        ({"phases": {"epochs": -1}}, "phases.epochs >= 0, got -1"),
        ({"regularizer": {"end": -1}}, "regularizer.end >= 0, got -1"),
        ({"model": {"attention": 3}}, "model.attention .* got 3"),
        ({"model": {"options": 3}}, "model.options .* got 3"),
        ({"model": {"type": "visoin"}}, "model.type .* vision, text, got 'visoin'"),
        ({"data": 3}, r"\[data\] .* got 3"),
        ({"data": {"workers": -1}}, "data.workers >= 0, got -1"),
        ({"seed": "1"}, "seed .* got '1'"),
        ([], r"a recipe .* got \[\]"),
        (lambda: ModelRecipe(type="visoin"), "model.type .* got 'visoin'"),
        (lambda: ModelRecipe(options=[1]), r"model.options .* got \[1\]"),
        (lambda: CheckpointRecipe(select="worst"), "checkpoint.select .* best, best-nll, last"),
        (lambda: CheckpointRecipe(keep=0), "checkpoint.keep >= 1, got 0"),
        (lambda: DataRecipe(name=3), "data.name .* got 3"),
        (lambda: DataRecipe(stream="yes"), "data.stream .* got 'yes'"),
        (lambda: OptimizerRecipe(batch_size=True), "optimizer.batch_size .* got True"),
        (lambda: OptimizerRecipe(learning_rate=None), "optimizer.learning_rate .* got None"),
        (lambda: PhaseRecipe(epochs=0), "at least one epoch in the two phases"),
        (lambda: RegularizerRecipe(end=float("nan")), "regularizer.end >= 0, got nan"),
        (lambda: Recipe(model="cgp"), "model to be a ModelRecipe, got 'cgp'"),
        (lambda: load_recipe(SOME, ["seed"]), r"section\.key=value, got 'seed'"),
        (lambda: load_recipe(SOME, ["seed.x=1"]), "'seed' in 'seed.x' is not a table"),
        (lambda: toml_value({1}), r"got \{1\}"),
    ],
)  # fmt: skip
def test_refusals(make: Callable[[], Any] | Any, message: str) -> None:
    """Recipes made in Python are held to what those of files are."""
    with pytest.raises(ValueError, match=message):
        make() if callable(make) else recipe_from_dict(make)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"= 3", "is not TOML"), (b"\xff\xfe", "line 1: expected text in UTF-8"),
        (b"[optimizer]\nbatchsize = 3\n", "unknown key 'optimizer.batchsize'"),
    ],
)  # fmt: skip
def test_a_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(FileNotFoundError, match=f"no recipe {file}"):
        load_recipe(file)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{file}.*{message}"):
        load_recipe(file)


def test_values_are_kept_as_their_fields_say() -> None:
    options = {"noise": 0.1}
    model, optimizer = ModelRecipe(options=options), OptimizerRecipe(learning_rate=1, clip=2)
    options["noise"] = 3.0
    assert model.options == {"noise": 0.1}
    assert (type(optimizer.learning_rate), type(optimizer.clip)) == (float, float)
    assert OptimizerRecipe(clip=None).clip is None


@pytest.mark.parametrize("attention", ["softmax", "softmax-gp", "kernel"])
def test_a_kind_without_a_warm_start_takes_no_options_of_a_first_phase(attention: str) -> None:
    options = {"kernel_epochs": 1, "kernel_options": {"kernel": "ard_rbf"}}
    recipe = recipe_from_dict({"model": {"attention": attention}, "phases": options})
    with pytest.raises(
        ValueError, match=f"phases.kernel_options .*'{attention}'.* got {{'kernel': 'ard_rbf'"
    ):
        build_kernel_model(recipe, FACTS["digits"])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | texts
values = st.recursive(
    leaves,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(texts, below, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[A-Za-z0-9 \"'#=\[\]{}.,$%&+-]{1,20}", fullmatch=True).filter(
    lambda name: name == name.strip(" .")
)


@given(st.dictionaries(texts, values, max_size=3), st.floats(1e-6, 1), names)
def test_any_recipe_reads_back(options: dict[str, object], rate: float, name: str) -> None:
    optimizer = {"learning_rate": rate, "final_learning_rate": rate / 3, "clip": rate}
    recipe = recipe_from_dict({"name": name, "data": {"options": options}, "optimizer": optimizer})
    assert recipe_from_dict(tomllib.loads(recipe_toml(recipe, "first\nsecond"))) == recipe


# Those of the repository: the paper's settings typed from its text, and one step of each phase

SHARED = ("softmax", "kernel-symmetric", "kernel", "sgpa", "direct", "cgpt", "scgpt")
NAMES = {
    *(f"digits-{model}" for model in MODELS),
    *(f"{data}-{model}" for data in ("cifar10", "cifar100") for model in SHARED),
    *(f"{d}-{m}-rows" for d in ("cifar10", "cifar100") for m in ("cgpt", "scgpt", "direct")),
    *(f"cola-{model}" for model in ("softmax", "kernel", "sgpa", "cgpt", "scgpt", "cgpt-rows")),
    *(f"imdb-{model}" for model in ("softmax", "kernel", "sgpa", "direct", "cgpt", "scgpt")),
    *(f"{data}-kep-svgp" for data in ("digits", "cifar10", "cola", "imdb")),
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
    inducing: dict[str, int]  # by kind, where the paper says so


IMAGES = Setting(5, 128, 4, 100, 200, 600, "best", 10, "ard_rbf", 0.1**2, {"scgp": 16, "sgpa": 32})
COLA = Setting(2, 256, 4, 32, 0, 50, "last", 0, "exp_dot", 0.5**2, {})
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
    "imdb": {"classes": 2, "vocabulary": 50, "contextual_width": 0, "max_length": 12},
}
OF_PAPER = sorted(name for name in RECIPES if not name.startswith(("digits", "imdb")))


def test_every_model_of_the_paper_has_its_recipe() -> None:
    assert set(RECIPES) == NAMES


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_comment_says_what_it_is_and_it_reads_back(name: str, tmp_path: Path) -> None:
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("seed = 0")])
    assert all(line.startswith("# ") for line in lines[: lines.index("seed = 0")])
    ours = RECIPES[name].data.name in ("digits", "imdb")
    for part in ("every setting is ours",) if ours else ("The paper says", "The paper is silent on"):
        assert part in comment
    assert ours or "table" in comment or "Not in the paper" in comment
    copy = tmp_path / "under-another-name.toml"
    write_recipe(copy, RECIPES[name], "a copy")
    assert load_recipe(copy) == RECIPES[name]
    assert copy.read_text().startswith("# a copy\n")


@pytest.mark.parametrize("model", MODELS)
def test_digits_are_the_demo_s(model: str) -> None:
    assert replace(RECIPES[f"digits-{model}"], name=f"demo-{model}") == demo_recipe(model)


@pytest.mark.parametrize("name", OF_PAPER)
def test_settings_are_the_paper_s(name: str) -> None:
    recipe = RECIPES[name]
    paper, config, optimizer = PAPER[recipe.data.name], recipe.model.config, recipe.optimizer
    assert (config["depth"], config["width"], config["heads"]) == (paper.depth, paper.width, paper.heads)
    assert (optimizer.batch_size, optimizer.accumulate) == (paper.batch, 1)
    assert (optimizer.learning_rate, optimizer.final_learning_rate) == (5e-4, 1e-5)
    assert (optimizer.clip, optimizer.restart) == (None, False)
    assert (recipe.epochs, recipe.checkpoint.select) == (paper.epochs, paper.select)
    assert paper.every in (0, recipe.checkpoint.every)
    assert recipe.phases.kernel_epochs == (paper.first_epochs if needs_warm_start(recipe) else 0)
    if recipe.data.name == "cola":
        assert (recipe.model.type, config["embedding_width"]) == ("text", 128)
    kind, options, rest = recipe.model.attention, recipe.model.options, name.partition("-")[2]
    if kind in ("kernel", "sgpa"):
        assert options["kernel"] == paper.kernel
        assert options.get("symmetric", False) == (rest == "kernel-symmetric")
    if kind in paper.inducing:
        assert options["num_inducing"] == paper.inducing[kind]
    if kind not in ("softmax", "sgpa", "kep-svgp"):
        assert options["normalize"] == ("rows" if rest.endswith("-rows") else "none")
    if rest.startswith("scgpt") and not rest.endswith("-rows"):
        assert options["noise"] == pytest.approx(paper.sparse_noise)
        assert options["learn_noise"] is False


@pytest.mark.parametrize("name", OF_PAPER)
def test_objectives(name: str) -> None:
    """The published ones in the literal recipes, and ones that do not collapse a model elsewhere."""
    recipe = RECIPES[name]
    alpha, kind, options = recipe.regularizer, recipe.model.attention, recipe.model.options
    if "-paper-literal" in name:
        assert (alpha.start, alpha.end) == ALPHAS.get(name.replace("-paper-literal", ""), (0.0, 1.0))
        assert not alpha.normalised
        assert options["regularizer"] == {"sgpa": "kl", "cgp": "jensen", "scgp": "double_jensen"}[kind]
        if kind == "cgp":
            assert (options["observation_noise"], options["latent_prior"]) == (0.0, "latent")
    elif kind == "kep-svgp":  # its authors'
        assert (alpha.start, alpha.end, alpha.normalised) == (1.0, 1.0, False)
    elif kind not in ("softmax", "kernel"):
        assert (alpha.start, alpha.end, alpha.normalised) == (0.0, 0.01, True)
        assert options["regularizer"] == {"sgpa": "kl", "scgp": "dtc"}.get(kind, "marginal")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_both_phases_take_a_step(name: str) -> None:
    recipe = RECIPES[name]
    facts = FACTS[recipe.data.name]
    torch.manual_seed(0)
    if recipe.model.type == "vision":
        inputs: Any = torch.randn(2, facts["channels"], facts["image_size"], facts["image_size"])
    else:
        tokens = torch.randint(1, facts["vocabulary"], (2, facts["max_length"]))
        tokens[1, 5:] = 0  # the second sentence is shorter
        inputs = {"tokens": tokens, "padding_mask": tokens == 0}
    kernel, model = build_kernel_model(recipe, facts), build_model(recipe, facts)
    if needs_warm_start(recipe) and recipe.phases.kernel_epochs:
        _step(kernel, inputs, recipe, drawing=False)
        warm_start(model, kernel)
    before = [p.detach().clone() for p in model.parameters()]
    regularizer = _step(model, inputs, recipe, drawing=model.draws)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert (regularizer is not None) == model.draws


@pytest.mark.parametrize(
    ("model", "kinds", "first"),
    [
        ({"attention": "kep-svgp"}, "softmax softmax kep-svgp", "softmax softmax kep-svgp"),
        ({"attention": "kep-svgp", "below": "kep-svgp"}, "kep-svgp " * 3, "kep-svgp " * 3),
        ({"attention": "cgp", "below": "softmax"}, "softmax softmax cgp", "softmax softmax kernel"),
        ({"attention": "cgp"}, "cgp " * 3, "kernel " * 3),
    ],
)
def test_layers_below_the_last(model: dict[str, Any], kinds: str, first: str) -> None:
    recipe = recipe_from_dict({"model": {**model, "config": {"depth": 3, "width": 8, "heads": 2}}})
    for build, expected in ((build_model, kinds), (build_kernel_model, first)):
        layers = build(recipe, FACTS["digits"]).config.layers
        assert [layer.kind for layer in layers] == expected.split()
    warm_start(build_model(recipe, FACTS["digits"]), build_kernel_model(recipe, FACTS["digits"]))
    with pytest.raises(ValueError, match="got 'sofmax'"):
        build_model(recipe.replace({"model.below": "sofmax"}), FACTS["digits"])


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


# What the repository holds of earlier runs can still be built


def recorded() -> Iterator[tuple[str, Recipe]]:
    for path in sorted(ROOT.glob("results/*/configs.json")):
        for name, config in json.loads(path.read_text()).items():
            yield f"{path.parent.name} {name}", recipe_from_dict(config["recipe"])
    for path in sorted(ROOT.glob("recipes/plans/*.toml")):
        plan = tomllib.loads(path.read_text())
        for run in plan["runs"]:
            if "shared" in run:
                yield f"{path.stem} {run['shared']}", load_recipe(path.parent / run["shared"] / "recipe.toml")
                continue
            changes = [*plan.get("changes", ()), *run.get("changes", ())]
            recipe = load_recipe(FOLDER / f"{run['recipe']}.toml", changes)
            yield f"{path.stem} {run.get('name', run['recipe'])}", recipe


RECORDED = dict(recorded())
SAVED = sorted(path.parent for path in ROOT.glob("results/models/*/config.json"))


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_both_phases_are_built(name: str) -> None:
    recipe = RECORDED[name]
    for build in (build_kernel_model, build_model):
        build(recipe, FACTS[recipe.data.name])


@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_a_saved_model_is_built_or_loaded(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["config"]
    assert VisionTransformer(VisionConfig.from_dict(config)).draws == (folder.name != "cifar10-kernel")
    if (folder / "model.safetensors").is_file():  # the weights of the others are not kept here
        VisionTransformer.from_pretrained(folder)
    assert (len(RECORDED) > 50, len(SAVED)) == (True, 6)


# What recipes gave stands in their comments, and is what results/ says


def test_every_recipe_is_up_to_date() -> None:
    script = ROOT / "scripts" / "recipe_numbers.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
