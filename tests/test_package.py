"""The package as a whole: public names, who may import whom, import cost, and the wheel."""

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gpattention
from gpattention import gp

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((SOURCE / "gpattention").rglob("*.py"))

PUBLIC = [
    "ArdRbf", "CGPPosterior", "CausalCGPState", "CausalRow", "CausalVariance", "CausalVarianceState",
    "DirectPosterior", "ExactPosterior", "ItemNoise", "KEPPosterior", "LogDensity", "NoiseSource",
    "NonFiniteError", "NotPositiveDefiniteError", "NumericalError", "Posterior", "SCGPPosterior",
    "SGPAPosterior", "ShardNoise", "Sight", "TooFarApartError", "UndefinedCovarianceError", "UnitProcess",
    "ard_rbf", "attention_entropy", "causal_cgp_posterior", "causal_unit_variance", "cgp_posterior",
    "check_health", "deferred_checks", "direct_posterior", "distance_log_amplitude", "exp_dot",
    "fill_rows", "fused_kernels", "health", "keep_rows", "kep_svgp_posterior", "kernel_attention",
    "kernel_weights", "key_log_amplitude", "noise_floor", "query_exponent", "query_log_amplitude", "rbf",
    "real_mean", "row_log_amplitude", "scgp_posterior", "sgpa_posterior", "softmax_attention",
    "softmax_posterior", "sparse_row_log_amplitude", "unit_variance", "why_not_fused", "without_padding",
]  # fmt: skip
WITHOUT_EQUATION = {"check_health", "deferred_checks", "fused_kernels", "health", "why_not_fused"}
# Bottom up: a part imports parts of lower lines only; parts of one line do not import each other.
ORDER = (
    ("checks",), ("files",), ("concurrency",), ("numerics",), ("graphs",), ("ops",), ("gp",), ("attention",),
    ("models",), ("strangeness",), ("hosts",), ("runs",), ("training", "evaluation"), ("reports",),
    ("studies",), ("cli",),
)  # fmt: skip
RANKS = {name: rank for rank, names in enumerate(ORDER) for name in names}
INDEPENDENT = {"data": {"checks", "files"}, "metrics": {"checks", "files"}}  # and what they may import
# distributions whose modules are not called as they are
MODULES = {
    "lightning-fabric": {"lightning_fabric", "lightning"}, "pillow": {"PIL"}, "mkdocs-material": {"material"},
    "pytest-xdist": {"xdist"}, "scikit-learn": {"sklearn"},
}  # fmt: skip


def test_public_names() -> None:
    assert sorted(gp.__all__) == PUBLIC
    assert {n for n, x in vars(gp).items() if n[0] != "_" and not inspect.ismodule(x)} == set(PUBLIC)


def test_public_names_are_documented() -> None:
    for name in PUBLIC:
        told = inspect.getdoc(getattr(gp, name)) or ""
        assert len(told) >= 20, name
        assert not told.startswith(f"{name}("), name  # what dataclass writes by itself


FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(gp, name))]


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, "CausalCGPState"} - WITHOUT_EQUATION))
def test_public_functions_cite_their_equation(name: str) -> None:
    told = getattr(gp, name).__doc__.lower()
    assert [word for word in ("eq. ", "section ") if word in told] != []


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(file) for file in FILES}


def imports(file: Path) -> set[str]:
    """Modules of the library that a file imports anywhere in it."""
    package = module_name(file) if file.name == "__init__.py" else module_name(file).rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # a submodule, or a name out of the module
                whole = f"{source}.{alias.name}"
                found.add(whole if whole in NAMES else source)
    return {name for name in found if name.split(".")[0] == "gpattention"}


DOORS = {module_name(f) for f in FILES if f.name == "__init__.py"}


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file))
def test_imports_point_downward(file: Path) -> None:
    here = part(module_name(file))
    if here in ("", "__main__"):
        return  # the package itself only gathers names, and `python -m gpattention` is the command line
    assert here in RANKS or here in INDEPENDENT, f"give {here} a place in ORDER"
    for module in imports(file) - {"gpattention"}:
        there = part(module)
        if there == here:
            continue
        if here in INDEPENDENT:
            assert there in INDEPENDENT[here], f"{here} imports {module}"
        else:
            assert there in INDEPENDENT or RANKS[there] < RANKS[here], f"{here} imports {module}"


def test_gp_has_no_import_cycle() -> None:
    inside = {module_name(f): f for f in FILES if part(module_name(f)) == "gp"}
    graph = {name: imports(f) & set(inside) for name, f in inside.items()}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert set(order) == set(graph)
    assert [module for module, used in graph.items() if "gpattention.gp" in used] == []


# Calls and attributes that change the whole process, or a module for every thread: where they stand, and why
SHARED_STATE = (
    "manual_seed", "seed_all", "set_rng_state", "default_generator", "set_fastpath_enabled", "set_default_",
    "set_float32_matmul_precision", "_set_fp32_precision_setter", "fp32_precision =", "allow_tf32",
    "set_num_threads", "set_grad_enabled", "use_deterministic_algorithms", "set_stance", "signal.signal",
    "filterwarnings", "simplefilter", "setrecursionlimit", "setswitchinterval", "chdir", "umask", "setlocale",
    "environ[", "register_forward", "register_module_forward", "register_full_backward", ".training =",
    "_attn_implementation =", "fused_attn =", "__dict__[",
)  # fmt: skip
ALLOWED_STATE = {
    "concurrency.py": "counts who needs it, and puts it back after the last",
    "numerics.py": "through gp.concurrency",
    "hosts/convert.py": "changes a model for good, and says so; generators are restored",
    "models/converted.py": "hooks of converted layers, which stay",
    "models/encoder.py": "likewise, of a layer that is being made",
    "hosts/families/huggingface.py": "likewise, and the name in its configuration",
    "hosts/families/own.py": "the mode of a module that is being made, and what its last pass gave",
    "evaluation/suites/efficiency.py": "times a model in a process of its own",
    "training/engine.py": "a training run owns its process",
    "training/fit.py": "likewise, in the main thread",
    "training/folder.py": "likewise",
    "reports/drawing.py": "warnings of matplotlib while it draws, in a program that draws",
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file))
def test_nothing_else_changes_the_process(file: Path) -> None:
    """A flag of the process, or a hook for one call, changes what other threads compute meanwhile."""
    if part(module_name(file)) in ("experiments", "studies", "cli"):
        return  # programs own their process
    code = ast.unparse(_without_docstrings(ast.parse(file.read_text())))  # no comments either
    code = code.replace("Generator().manual_seed", "").replace("Generator(device).manual_seed", "")
    found = [text for text in SHARED_STATE if text in code]
    allowed = ALLOWED_STATE.get(file.relative_to(SOURCE / "gpattention").as_posix())
    assert bool(found) == (allowed is not None), f"found {found}, allowed is {allowed}"


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [x for x in body if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def python(*arguments: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    command, env = [sys.executable, *arguments], os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MEASURE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import gpattention
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
"""


def test_importing_is_light() -> None:
    for _ in range(3):
        seconds, new = json.loads(python("-c", MEASURE))
        if seconds < 0.5:
            break
    assert seconds < 0.5  # beyond torch's own, best of three
    extras = set()
    for requirements in PROJECT["optional-dependencies"].values():
        for requirement in requirements:
            name = requirement.split("[")[0].split(">")[0].split("=")[0].strip()
            extras |= MODULES.get(name, {name.replace("-", "_")})
    assert extras > {
        "PIL",
        "h5py",
        "lightning",
        "matplotlib",
        "scipy",
        "tensorboard",
        "transformers",
        "triton",
    }
    assert extras & set(new) == set()
    assert set(new) - set(sys.stdlib_module_names) <= {"gpattention", "numpy", "safetensors", "torch"}


def test_requirements() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["dependencies"] == ["torch>=2.11", "numpy", "rich", "safetensors", "typer"]
    assert gpattention.__version__ == PROJECT["version"]


def test_one_version_everywhere() -> None:
    version, changes = PROJECT["version"], (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changes, re.M)
    assert newest is not None
    assert newest[1] == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {version}\ndate-released: {newest[2]}\n" in citation


def built(kind: str, source: Path, folder: Path) -> Path:
    """A wheel or sdist of a source tree, made without fetching anything."""
    python("-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(source))
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def installed(wheel: Path, folder: Path) -> Path:
    """The programs of an environment that holds the wheel and nothing else of ours.

    What it depends on comes from here by a path: neither our editable install nor its hooks come along.
    """
    python("-m", "venv", "--without-pip", str(folder))
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    programs = folder / "bin"
    pip = ("-m", "pip", "--python", str(programs / "python"), "install", "--quiet", "--no-deps", "--no-index")
    python(*pip, "--ignore-installed", str(wheel))
    return programs


def ran(program: Path, *arguments: str) -> str:
    """What a program prints, away from the source tree."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [program, *arguments], cwd=program.parents[1], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SMOKE = """
import importlib.metadata, json
import torch
import gpattention
from gpattention.attention import build_attention
layer = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
host = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
handle = gpattention.attach(torch.nn.Sequential(host, torch.nn.Flatten(), torch.nn.Linear(64, 3)))
drawn = handle.predict(torch.randn(2, 4, 16), samples=2).probs.shape
made = build_attention("cgp", embed_dim=16, num_heads=2)(torch.randn(2, 4, 16), need=("output",)).output.shape
print(json.dumps([gpattention.__file__, importlib.metadata.version("gpattention"), drawn, made]))
"""


def test_wheel_holds_the_package_and_its_licence(wheel: Path) -> None:
    version = PROJECT["version"]
    assert wheel.name == f"gpattention-{version}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"gpattention-{version}.dist-info"
    assert {"gpattention/py.typed", f"{info}/licenses/LICENSE", f"{info}/METADATA"} <= names
    sources = {file.relative_to(SOURCE).as_posix() for file in FILES}
    assert {name for name in names if name.endswith(".py")} == sources


def test_a_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "empty")
    assert ran(programs / "gpattention", "--version") == f"gpattention {PROJECT['version']}\n"
    assert "gpattention demo --quick" in ran(programs / "gpattention")
    where, listed, drawn, made = json.loads(ran(programs / "python", "-c", SMOKE))
    assert Path(where).is_relative_to(tmp_path)
    assert (listed, drawn, made) == (PROJECT["version"], [2, 3], [2, 4, 16])


@pytest.mark.slow
def test_an_sdist_makes_the_same_wheel_which_trains_and_reports(wheel: Path, tmp_path: Path) -> None:
    archive = built("sdist", ROOT, tmp_path / "sdist")
    assert archive.name == f"gpattention-{PROJECT['version']}.tar.gz"
    shutil.unpack_archive(archive, tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    for part in (
        "tests/test_package.py",
        "recipes/digits-cgp.toml",
        "docs/index.md",
        "CHANGELOG.md",
        "Makefile",
    ):
        assert (source / part).is_file(), part
    again = built("wheel", source, tmp_path / "again")
    names = [sorted(zipfile.ZipFile(each).namelist()) for each in (wheel, again)]
    assert names[0] == names[1]
    program = installed(again, tmp_path / "empty") / "gpattention"
    few = ("--models", "softmax", "--kernel-epochs", "0", "--epochs", "1", "--jobs", "1")
    assert "report: runs/demo/report.html" in ran(program, "demo", *few)
    assert (tmp_path / "empty" / "runs" / "demo" / "report.html").stat().st_size > 10_000


# -- signs on the front doors


def exported() -> list[tuple[str, str]]:
    """Functions that a package exports, with the package."""
    doors = [module_name(f) for f in FILES if f.name == "__init__.py" and "__all__" in f.read_text()]
    found = []
    for door in doors:
        module = importlib.import_module(door)
        names = [n for n in module.__all__ if inspect.isfunction(inspect.unwrap(getattr(module, n)))]
        found += [(door, name) for name in names]
    return found


@pytest.mark.parametrize(("door", "name"), exported())
def test_exported_functions_say_what_they_take_give_and_raise(door: str, name: str) -> None:
    function = inspect.unwrap(getattr(importlib.import_module(door), name))
    text = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    documented = "Args:" in text or not signature.parameters
    assert documented, f"{door}.{name} has no Args:"
    missing = [p for p in signature.parameters if documented and signature.parameters and f"{p}:" not in text]
    assert missing == [], f"{door}.{name} does not say what {missing} are"
    gives = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    assert not gives or re.search(r"^(Returns|Yields):", text, re.M), f"{door}.{name} has no Returns:"
    body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(body))
    assert not raises or "Raises:" in text, f"{door}.{name} has no Raises:"


# Files whose names other rooms share though users do not need them, so that front doors stay readable.  A new
# import past a front door belongs into the door's `__all__`, not here.
SHARED_FILES = {
    "attention": {"base", "registry", "scgp"},
    "data": {"cifar", "corrupted", "datasets", "files", "shifts"},
    "evaluation": {"suites.findings"},
    "gp": {"correlated", "inputs", "reference", "sparse"},
    "metrics": {"calibration", "classification", "registry"},
    "models": {
        "config",
        "converted",
        "dropout",
        "embeddings.contextual",
        "multihead",
        "predict",
        "prediction",
        "projected",
        "warm_start",
    },
    "reports": {"drawing", "sections.calibration", "sections.shift", "style"},
    "strangeness": {"adaptive_temperature", "detectors", "strangeness"},
    "runs": {"folder", "inputs", "recipe", "records", "results", "tables"},
    "training": {"devices", "engine", "feeding", "folder", "objective", "schedule"},
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file))
def test_rooms_are_entered_by_their_front_doors(file: Path) -> None:
    """What another room needs is exported by that room, so that its files can move unnoticed.

    The studies have no common door: each of their files is one, for its command.
    """
    here = part(module_name(file))
    past = sorted(
        name
        for name in imports(file)
        if part(name) not in (here, "", "studies")
        and here != ""
        and name.count(".") > 1
        and name not in DOORS
        and name.split(".", 2)[2] not in SHARED_FILES.get(part(name), ())
        and not hasattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
    )
    assert past == [], f"{file.name} imports past the front door: {past}"
