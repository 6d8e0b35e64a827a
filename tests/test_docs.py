"""Every block of the README and of the documentation runs, prints what it says and names real commands.

All pages below docs/ are found, however deep.  The Python blocks of a page share one namespace and run in a
folder of their own that holds the repository's `recipes` and `results`.  Comments, unseen by readers, steer
this:

    <!-- tests: slow -->                     the page takes long: it runs in the slow tier alone
    <!-- tests: quick OLD => NEW -->         the fast tier puts NEW for OLD, the slow one keeps OLD
    <!-- tests: weights -->                  the page as it stands wants weights no test has: fast tier only
    <!-- tests: needs transformers, onnx --> skip the page without these packages
    <!-- tests: run -->                      before a console block: its `gpattention` commands are run too
    <!-- tests: long -->                     before a block: the fast tier leaves it out
    <!-- tests: fragment -->                 before a block: not to be run

Notebooks below docs/notebooks are pages too, by `scripts/docs_notebooks.py`; they carry these words in their
metadata.  A block of the language `output` holds what the block above it prints.  Figures differ between
machines, so words are compared, and only where the page runs as it stands.
"""

import contextlib
import importlib.util
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpattention.attention import attention_class, list_attention
from gpattention.cli import main
from tests.cli.parsing import parsed

ROOT = Path(__file__).parent.parent
BUILT_IN = ("cgp", "direct", "kep-svgp", "kernel", "scgp", "sgpa", "softmax", "softmax-gp")
ELSEWHERE = {  # run by tests of their own, or formulae in the words of Python
    "docs/scaling.md": "tests/attention/test_sharded_docs.py",
    "docs/derivations/row-normalised.md": None,
}
GUIDES = ("docs/tutorials", "docs/how-to")  # folders whose pages all show something that runs
FENCE = re.compile(
    r"(?:<!-- tests: (run|long|fragment) -->\s*)?^```(python|console|output)\n(.*?)^```", re.M | re.S
)
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?%?")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_notebooks = _script("docs_notebooks")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, what is to be done with it, and what it should print."""

    language: str
    text: str
    order: str
    prints: str | None = None


@dataclass(frozen=True)
class Page:
    """A page by its name in the repository."""

    name: str

    @property
    def text(self) -> str:
        text = (ROOT / self.name).read_text()
        return text if self.name.endswith(".md") else _notebooks.as_markdown(json.loads(text))

    @property
    def weights(self) -> bool:
        return "<!-- tests: weights -->" in self.text

    @property
    def slow(self) -> bool:
        return "<!-- tests: slow -->" in self.text

    @property
    def shortened(self) -> bool:
        """Whether the fast tier runs less than the page says."""
        return bool(self.quick) or "<!-- tests: long -->" in self.text

    @property
    def quick(self) -> list[tuple[str, str]]:
        """Pairs of (text, text for the fast tier)."""
        return re.findall(r"<!-- tests: quick (.*?) => (.*?) -->", self.text)

    @property
    def needs(self) -> list[str]:
        named = re.findall(r"<!-- tests: needs (.*?) -->", self.text)
        return [package.strip() for line in named for package in line.split(",")]

    def blocks(self, *, reduced: bool = False) -> list[Block]:
        """Those to run, in order; `reduced` as the fast tier has them."""
        found: list[Block] = []
        for order, language, text in FENCE.findall(self.text):
            if language == "output":
                assert found, f"{self.name}: output above any code"
                found[-1] = Block(found[-1].language, found[-1].text, found[-1].order, text)
            else:
                found.append(Block(language, text, order))
        found = [b for b in found if b.order == "run" or (b.language == "python" and b.order != "fragment")]
        if not reduced:
            return found
        return [Block(b.language, self._reduced(b.text), b.order) for b in found if b.order != "long"]

    def commands(self) -> list[str]:
        """Lines of console blocks that call us, without their comments; continued lines are one."""
        blocks = re.findall(r"^```console\n(.*?)^```", self.text, re.M | re.S)
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        lines = [line.strip().removeprefix("$ ") for line in lines]
        return [re.split(r"\s+#\s", line)[0] for line in lines if re.match(r"gpattention [a-z]+", line)]

    def _reduced(self, text: str) -> str:
        for old, new in self.quick:
            text = text.replace(old, new)
        return text


def _pages() -> Iterator[Page]:
    yield Page("README.md")
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]):
        yield Page(path.relative_to(ROOT).as_posix())


ALL = list(_pages())
RUN = [page for page in ALL if page.name not in ELSEWHERE and page.blocks()]


def _tiers() -> list[object]:
    """Every page once in its tier; pages that the fast one shortens in both."""
    fast = [pytest.param(page, page.shortened, id=page.name) for page in RUN if not page.slow]
    slow = [
        pytest.param(page, False, id=f"{page.name}-whole", marks=pytest.mark.slow)
        for page in RUN
        if (page.slow or page.shortened) and not page.weights
    ]
    return [*fast, *slow]


@pytest.mark.parametrize(("page", "reduced"), _tiers())
def test_blocks_run(page: Page, reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in page.needs:
        pytest.importorskip(package)
    for folder in ("recipes", "results"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr("gpattention.attention.base._KINDS", dict(_kinds()))
    namespace: dict[str, object] = {"__name__": "docs"}
    with torch.random.fork_rng():
        for block in page.blocks(reduced=reduced):
            printed = _run(block, page.name, namespace)
            if block.prints is not None:
                assert _words(printed) == _words(block.prints), f"{page.name} prints:\n{printed}"


def _run(block: Block, name: str, namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            exec(compile(block.text, name, "exec"), namespace)
        else:
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    assert words[0] == "gpattention", f"{name}: only our own commands can be run: {line}"
                    assert main(words[1:]) == 0, f"{name}: {line}\n{printed.getvalue()}"
    return printed.getvalue()


def _words(text: str) -> list[str]:
    """What does not depend on the machine: everything but figures, and the rules and gaps between them."""
    words = NUMBER.sub("0", text).split()
    return [word for word in words if word != "*" and not re.fullmatch(r"[|:─-]+", word)]


def test_words_see_other_words_and_not_other_figures() -> None:
    shown = _words("* plain   NLL 0.12, 3 of 4\n| --- | ---: |")
    assert shown == _words("plain NLL -1.5e-03, 12 of 4")
    assert shown != _words("plain ECE 0.12, 3 of 4")
    assert shown != _words("plain NLL 0.12")


def _kinds() -> dict[str, type]:
    return {kind: attention_class(kind) for kind in BUILT_IN}


@pytest.mark.parametrize("page", [p for p in ALL if p.quick], ids=lambda page: page.name)
def test_what_the_fast_tier_replaces_is_there(page: Page) -> None:
    code = "\n".join(block.text for block in page.blocks())
    for old, new in page.quick:
        assert old in code, f"{page.name}: {old!r} => {new!r}"


def test_pages_that_run_elsewhere_exist() -> None:
    for page, test in ELSEWHERE.items():
        assert Page(page).blocks(), f"{page} shows no code"
        assert test is None or Path(page).name in (ROOT / test).read_text()


def test_every_guide_shows_something_that_runs() -> None:
    guides = [page for page in ALL if page.name.startswith(GUIDES) and not page.name.endswith("index.md")]
    assert len(guides) >= 4
    assert [page.name for page in guides if not page.blocks()] == []


@pytest.mark.parametrize("page", [p for p in ALL if p.commands()], ids=lambda page: page.name)
def test_commands_parse(page: Page) -> None:
    for command in page.commands():
        assert callable(parsed(shlex.split(command)[1:]).command.callback), command


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Page) -> None:
    """Files and headings; addresses of other sites are not looked at."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / page.name).parent / file if file else ROOT / page.name
        assert path.exists(), f"{page.name}: {target}"
        if heading and path.suffix in (".md", ".ipynb"):
            there = Page(path.resolve().relative_to(ROOT).as_posix())
            assert heading in _anchors(there.text), f"{page.name}: {target}"


def _anchors(text: str) -> set[str]:
    """Headings as the site names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}


@pytest.mark.parametrize("page", [p for p in ALL if p.name.endswith(".ipynb")], ids=lambda page: page.name)
def test_notebooks_keep_what_they_gave(page: Page) -> None:
    kept = json.loads((ROOT / page.name).read_text())
    shown = [output for cell in kept["cells"] for output in cell.get("outputs", ())]
    assert shown, "run it: python scripts/refresh_tutorials.py"
    assert {output["output_type"] for output in shown} <= {"stream", "display_data", "execute_result"}
    assert len(page.text) < 100_000


def test_the_readme_fits_one_screen() -> None:
    above, _, _ = Page("README.md").text.partition("\n## Licence")
    assert len(above.split()) <= 700
    assert above.index("make demo") < above.index("pip install")


def test_the_guide_has_an_example_of_every_kind() -> None:
    guide = (ROOT / "docs/attention.md").read_text()
    for kind in BUILT_IN:
        section = re.search(rf"\n## {kind}\n(.*?)(?=\n## |\Z)", guide, re.DOTALL)
        assert section, f"no section on {kind}"
        assert f'"{kind}"' in section.group(1)
        assert "```python" in section.group(1)


def test_the_table_of_kinds_agrees_with_the_registry() -> None:
    rows = {}
    for line in (ROOT / "docs/attention.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].strip("`") in BUILT_IN and len(cells) == 7:
            rows[cells[0].strip("`")] = cells[1:]
    assert set(rows) == set(BUILT_IN)
    assert set(BUILT_IN) <= set(list_attention())
    for kind, (draws, cross, causal, rows_too, regularizers, _) in rows.items():
        cls = attention_class(kind)
        assert (draws == "yes") == cls.draws, kind
        assert (cross == "yes") == cls.crosses, kind
        assert (causal == "yes") == cls.causal_form, kind
        assert (rows_too == "yes") == cls.normalizes, kind
        assert tuple(regularizers.split(", ")) == cls.regularizers, kind
