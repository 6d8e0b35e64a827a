"""Random recipes and random words for `gpattention`: an exit code, a message, nothing written outside."""

import atexit
import functools
import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from gpattention.cli import main
from gpattention.runs.recipe import toml_value
from tests.cli import parsing
from tests.fuzz.tally import OUTSIDE, TRACEBACK, WRONG, Outcome, Tally, in_child, listing, scratch

SECONDS, MEMORY = 12.0, 2 << 30
CODES = (0, 1, 2, 130)
# work of minutes by its nature, or of several processes: only their refusals are of interest
LONG = {"demo", "bench", "reproduce", "adopt"}
NAMES = (
    "plain", "", ".", "..", "../evil", "../../evil", "../../../evil", "{outer}/evil", "a/b", "a\\b", "~",
    "-x", "a\x1b[2Jb", "a\nb", "a\x00b", "a\x7fb", "a\x9bb", "=1+1", "<script>", "a" * 300, "\u202eevil",
    " ", "NUL", "é", "|a|", "\\textbf{a}", "%s%n", "a\rb", "con.toml", "@SUM(1)",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2, 2**31, 2**64, 10**30, 4_000_000, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), True,
    False, "", "x", "../evil", "a\x1b[2Jb", [], [1], [[]], {}, {"a": 1}, "cpu", "é\u202e", "1", "None",
)  # fmt: skip
WORDS = (
    "-1", "0", "1", "3", "1e999", "nan", "99999999999999999999", "x", "", ",", "a,b", "=", "seed=", "=3", "é",
    "a\x1b[2Jb", "a\nb", "--", "-", "-o", "..x", "%s", "\udcff", "0,0", "1,-1", "cgp", "cgp,cgp", "cpu",
    "cuda:9", "model.config.width=4000000", "model.options={}", "phases.epochs=[1]", "name=\"../../evil\"",
    "a.b.c=1", "seed=-1", "optimizer.learning_rate=nan", "data.name=nothing", "model=3", "x" * 400,
)  # fmt: skip


EVENTS = ("\x1b[2J", "failed", 3, "validated", None)


# --- what commands are given --------------------------------------------------------------------------------


def plain_recipe(r: random.Random) -> dict[str, Any]:
    """One that trains in a second."""
    kind = r.choice(["softmax", "kernel", "sgpa", "direct", "cgp", "scgp", "softmax-gp", "kep-svgp"])
    options = {"num_inducing": 3} if kind in ("sgpa", "scgp") else {}
    return {
        "name": "tiny",
        "seed": r.randint(0, 5),
        "data": {"name": "digits"},
        "model": {"attention": kind, "options": options, "config": {"width": 4, "heads": 1, "depth": 1}},
        "optimizer": {"batch_size": 500},
        "phases": {"kernel_epochs": r.randint(0, 1), "epochs": 1},
        "regularizer": {"end": r.choice([0.0, 0.01])},
        "checkpoint": {"every": 1, "select": r.choice(["best", "best-nll", "last"])},
    }


def broken_recipe(r: random.Random, outer: Path) -> dict[str, Any]:
    """A sound one with one to three values that may not be."""
    plain = plain_recipe(r)
    if r.random() < 0.5:
        plain["name"] = r.choice(NAMES).replace("{outer}", str(outer))
        return plain
    for _ in range(r.choice([1, 1, 2, 3])):
        table = plain
        while True:
            key = r.choice([*table, "unheard_of"])
            if isinstance(table.get(key), dict) and table[key] and r.random() < 0.85:
                table = table[key]
                continue
            break
        if key == "name" and table is plain:
            table[key] = r.choice(NAMES).replace("{outer}", str(outer))
        elif r.random() < 0.15:
            table.pop(key, None)
        else:
            table[key] = r.choice(VALUES)
        phases = plain.get("phases")
        for name in ("epochs", "kernel_epochs") if isinstance(phases, dict) else ():
            if isinstance(phases.get(name), int):  # a long training teaches nothing
                phases[name] = min(phases[name], 2)
    return plain


def toml(plain: dict[str, Any]) -> str:
    lines = [f"{key_text(k)} = {toml_value(v)}" for k, v in plain.items() if not isinstance(v, dict)]
    for key, table in plain.items():
        if isinstance(table, dict):
            lines += [f"[{key_text(key)}]", *(f"{key_text(k)} = {toml_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


@functools.cache
def template() -> Path:
    """A folder with a run, a judged run, a shared model, a picture, sentences and a plan."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-template-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("lightning_fabric", "matplotlib.figure", "PIL.Image", "torchmetrics", "torch._dynamo"):
        importlib.import_module(name)  # once here, not in every child
    outcome = in_child(functools.partial(_make_template, folder), seconds=120, memory=None)
    if outcome.kind != "returned":
        raise RuntimeError(f"the template could not be made: {outcome}")
    return folder


def _make_template(folder: Path) -> None:
    from PIL import Image

    from gpattention.data.digits import bundled_digits

    os.chdir(folder)
    r = random.Random(0)
    plain = plain_recipe(r) | {"model": {"attention": "cgp", "config": {"width": 4, "heads": 1, "depth": 1}}}
    (folder / "sound.toml").write_text(toml(plain))
    assert main(["train", "sound.toml", "--run", "runs/trained", "--device", "cpu"]) == 0
    judged = ["--limit", "12", "--suite", "clean,ood", "--samples", "2", "--device", "cpu"]
    shutil.copytree("runs/trained", "runs/judged")
    assert main(["evaluate", "runs/judged", *judged]) == 0
    assert main(["models", "card", "runs/judged", "-o", "shared"]) == 0
    Image.fromarray(bundled_digits()[0][0, 0].numpy()).save("digit.png")
    (folder / "sentences.txt").write_text("The cat sat.\n\nCats the sit\n")
    (folder / "plan.toml").write_text('seeds = [0]\n[[runs]]\nrecipe = "sound"\n')


@functools.cache
def commands() -> list[parsing.Command]:
    return [command for command in parsing.commands() if not command.is_group]


# what options take, by how their values are called
CHOICES = {
    "NAME": ("digits", "cifar10", "cola", "textures", "table1", "fig3", "all"), "MEASURE": ("nll", "ece"),
    "SUITE": ("clean", "ood", "selective", "corrupted", "oversmoothing"), "SHELL": ("bash", "zsh", "fish"),
    "FORMAT": ("latex", "csv", "markdown"), "MODELS": ("softmax", "cgp", "scgp"), "DEVICE": ("cpu",),
    "PREDICTORS": ("model", "mean", "mc_dropout"), "STAGE": ("train", "evaluate", "results"),
    "TYPES": ("fog", "noise", "blur"), "N,N": ("1", "3", "5"), "SEVERITIES": ("1", "3", "5"),
}  # fmt: skip
FILES, FOLDERS = ("FILE", "INPUT", "OUT", "PLAN", "RECIPE"), ("FOLDER", "MODEL", "RUN", "RUNS")


SOUND = (
    *("train recipe.toml --device cpu",) * 8,
    "train recipe.toml --run made/r",
    "train --resume --run runs/trained",
    "train sound.toml --first-phase runs/trained",
    *("status runs", "report runs -o made/r.html", "evaluate runs --suite clean --limit 4 --samples 2") * 2,
    "status runs --json",
    "evaluate runs/hostile --suite clean --limit 5 --samples 2",
    "evaluate runs/judged --suite clean,ood --limit 12 --samples 2",
    "evaluate runs/trained --suite selective --limit 9 --samples 2 --json",
    "predict runs/trained digit.png",
    "predict runs/hostile digit.png --json",
    "predict shared digit.png",
    "report runs -o made/r.html",
    "report runs/hostile runs/judged -o made/x.html",
    "models card runs/hostile -o made/card",
    "models card runs/judged -o made/card --name é",
    "models run shared -o made/run",
    "paper all runs",
    "paper table1 runs --format latex",
    "sweep recipe.toml --over seed=1",
    "data check digits",
    "data list --json",
    "models",
    "completion bash",
)


def random_words(r: random.Random, inner: Path) -> list[str]:
    """A command line: a sound one, one with a word changed, or one of what a command takes."""
    if r.random() < 0.6:
        words = r.choice(SOUND).split()
        if r.random() < 0.4:
            words[r.randrange(1, len(words)) if len(words) > 1 else 0] = r.choice(
                (*WORDS, "runs/hostile", "runs")
            )
    else:
        words = composed(r, inner)
    if r.random() < 0.08:
        words.insert(r.randint(0, len(words)), r.choice(WORDS))
    words = [word for word in words if word != "--debug" and "\0" not in word]  # which asks for tracebacks
    for place, word in enumerate(words[:-1]):
        if word in ("--jobs", "--devices") and words[place + 1].isdigit():
            words[place + 1] = r.choice(["0", "1"])  # other processes would start anew
    return words


def composed(r: random.Random, inner: Path) -> list[str]:
    """Any command with arguments of its kind."""
    command = r.choice([c for c in commands() if c.path.split()[1] not in LONG or r.random() < 0.3])
    words = command.path.split()[1:]
    for place in command.places:
        if r.random() < 0.93:
            words += [random_value(r, place, inner) for _ in range(r.choice([1, 1, 1, 2]))]
    for option in command.options:
        if r.random() < 0.22 and option.flags[-1] != "--share-gpu":
            words.append(r.choice(option.flags))
            if option.takes != "nothing":
                words.append(random_value(r, option, inner))
    if words[0] in LONG:
        words.append(r.choice(["--seeds=x", "--unheard-of", "--models=nothing", "--jobs=-1"]))
    return words


def random_value(r: random.Random, option: parsing.Option, inner: Path) -> str:
    flag = option.flags[0] if option.flags else ""
    roll = r.random()
    if roll < 0.15:
        return r.choice(WORDS)
    if option.takes in CHOICES and roll < 0.9:
        choices = CHOICES[option.takes]
        return ",".join(r.sample(choices, k=min(len(choices), r.choice([1, 1, 2]))))
    if flag in ("-o", "--run", "--runs"):
        return f"made/{r.choice(['a', 'b c', 'é', 'x.html', 'ü'])}"
    if flag in ("--set", "--over"):
        return r.choice([w for w in WORDS if "=" in w])
    there = [str(p.relative_to(inner)) for p in inner.rglob("*") if "home" not in p.parts]
    if option.takes in FILES or r.random() < 0.3:
        return r.choice([*there, "recipe.toml", "recipe.toml", "missing", "digit.png"])
    if option.takes in FOLDERS:
        return r.choice([*there, "runs", "runs/trained", "runs/judged", "shared", "missing", "runs/hostile"])
    return r.choice([*WORDS, "recipe.toml", "runs/trained", "digit.png", "1", "2"])


# --- the checks ---------------------------------------------------------------------------------------------


def check(r: random.Random, tally: Tally) -> None:
    """One command in a folder of its own."""
    with scratch() as inner:
        outer = inner.parents[2]
        shutil.copytree(template(), inner, dirs_exist_ok=True)
        (inner / "home").mkdir()
        roll = r.random()
        (inner / "recipe.toml").write_text(
            toml(plain_recipe(r) if roll < 0.3 else broken_recipe(r, outer)), encoding="utf-8"
        )
        hostile = hostile_run(r, inner / "runs") if r.random() < 0.6 else "hostile"
        words = [word.replace("runs/hostile", f"runs/{hostile}") for word in random_words(r, inner)]
        before = listing(outer, but=inner)
        outcome = in_child(functools.partial(run_command, words, inner), seconds=SECONDS, memory=MEMORY)
        judge(words, outcome, inner, tally)
        if listing(outer, but=inner) != before:
            new = sorted(set(listing(outer, but=inner)) - set(before)) or ["a file was changed"]
            tally.fault(OUTSIDE, f"{words}: {new[0]!r} with {(inner / 'recipe.toml').read_text()[:300]!r}")


def hostile_run(r: random.Random, runs: Path) -> str:
    """A run whose files, and perhaps whose folder, say what they should not; the folder's name."""
    called = [name for name in NAMES if 0 < len(name) < 250 and not {"/", "\0"} & {*name} and name.strip(".")]
    folder = runs / r.choice(["hostile", *r.sample(called, 3)])
    shutil.copytree(runs / "trained", folder)
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["name"] = r.choice(NAMES)
    if r.random() < 0.3:
        recipe[r.choice(["seed", "data", "model"])] = r.choice([-1, "x", None, {}])
    (folder / "recipe.json").write_text(json.dumps(recipe))
    with (folder / "events.jsonl").open("a") as file:
        for _ in range(r.randint(0, 3)):
            event = {"time": r.choice([0, -1e30, "x", None]), "event": r.choice(EVENTS)}
            file.write(json.dumps(event | {"epoch": r.choice(VALUES[:6]), "reason": "\x1b[1m"}) + "\n")
    return folder.name


def run_command(words: list[str], inner: Path) -> int:
    """`main` as the shell would call it, its output kept in the folder."""
    os.setsid()
    os.chdir(inner)
    for name in ("GPATTENTION_DATA", "WORLD_SIZE", "RANK"):
        os.environ.pop(name, None)
    os.environ |= {"HOME": str(inner / "home"), "TMPDIR": str(inner / "home"), "COLUMNS": "100"}
    tempfile.tempdir = None
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(inner / "home" / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = ["gpattention", *words]
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def judge(words: list[str], outcome: Outcome, inner: Path, tally: Tally) -> None:
    """Faults of one command."""
    told = {name: _read(inner / "home" / name) for name in ("stdout", "stderr")}
    recipe = (inner / "recipe.toml").read_text(encoding="utf-8")
    context = f"{words} with {recipe[:500]!r}" if "recipe.toml" in words else f"{words}"
    if outcome.kind == "too slow":
        tally.add("stopped, too slow")
        if words[:1] == ["train"]:
            tally.fault(WRONG, f"a tiny training took over {SECONDS:.0f} s: {context}")
        return
    if outcome.kind != "returned":
        tally.fault(TRACEBACK, f"{outcome.error[:300] or outcome} at {outcome.where}: {context}")
        return
    tally.add(f"exit code {outcome.value}")
    if outcome.value not in CODES:
        tally.fault(WRONG, f"exit code {outcome.value}: {context}")
    if "Traceback (most recent" in told["stderr"] + told["stdout"]:
        tally.fault(TRACEBACK, f"{told['stderr'][-300:]!r}: {context}")
    if outcome.value in (1, 2) and not told["stderr"].strip() and not told["stdout"].strip():
        tally.fault(WRONG, f"exit code {outcome.value} without a word: {context}")
    for name, text in told.items():
        found = {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"}
        if found:
            place = min(text.index(c) for c in found)
            line = text[max(0, place - 60) : place + 40]
            tally.fault(WRONG, f"raw control characters on {name}: {line!r}: {context}")


def _read(file: Path) -> str:
    """As it is: "\\r" is no line break here."""
    return file.read_bytes().decode("utf-8", errors="replace") if file.is_file() else ""
