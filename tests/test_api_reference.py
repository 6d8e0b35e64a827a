"""The API reference names every public thing once, and nothing that is not there or not explained."""

import inspect
import pkgutil
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import gpattention

PAGES = Path(__file__).parent.parent / "docs/api"
ENTRY = re.compile(r"^::: ([\w.]+)$", re.M)
NO_PAGE = {"gpattention.__version__", "gpattention.gp"}  # a string, and a package with a page of its own
# what `attach` and `convert` return or take, reached by their full paths
BESIDE_ALL = {
    "gpattention.adopt.conversion.Conversion",
    "gpattention.adopt.fitting.Candidate",
    "gpattention.adopt.fitting.Fit",
    "gpattention.adopt.fitting.FitOptions",
    "gpattention.adopt.handle.Handle",
    "gpattention.adopt.results.TokenPrediction",
    "gpattention.adopt.results.Values",
    "gpattention.adopt.settings.Settings",
    "gpattention.adopt.sites.Found",
    "gpattention.adopt.sites.LeftAlone",
    "gpattention.adopt.sites.Site",
}
# parts of the packages above them, which re-export what is public
INTERNAL = re.compile(r"^gpattention\.(cli|studies.*|experiments\..*|reports\..*|gp\..*|models\.fused)$")


def _entries() -> list[str]:
    return [name for page in sorted(PAGES.glob("*.md")) for name in ENTRY.findall(page.read_text())]


def _packages() -> list[str]:
    """Every package that says by `__all__` what is public."""
    found = [
        module.name for module in pkgutil.walk_packages(gpattention.__path__, "gpattention.") if module.ispkg
    ]
    packages = ["gpattention", *(name for name in found if not INTERNAL.match(name))]
    return [name for name in packages if hasattr(import_module(name), "__all__")]


def _object(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _public() -> set[str]:
    return {
        f"{package}.{name}" for package in _packages() for name in import_module(package).__all__
    } - NO_PAGE


def test_packages_are_found() -> None:
    expected = "gp attention models evaluation training experiments data metrics reports metrics.streaming"
    assert {f"gpattention.{name}" for name in expected.split()} <= set(_packages())


def test_every_public_name_has_an_entry() -> None:
    assert sorted((_public() | BESIDE_ALL) - set(_entries())) == []


def test_no_entry_is_doubled_or_unknown() -> None:
    entries = _entries()
    assert [name for name, count in Counter(entries).items() if count > 1] == []
    assert sorted(set(entries) - _public() - BESIDE_ALL) == []


@pytest.mark.parametrize("name", sorted(name for name in _entries()))
def test_entries_are_explained(name: str) -> None:
    """Functions, classes and their public methods have docstrings; constants have none to have."""
    thing = _object(name)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return
    assert (inspect.getdoc(thing) or "").strip(), name
    if inspect.isclass(thing) and thing.__module__.startswith("gpattention"):
        methods = {n: m for n, m in vars(thing).items() if inspect.isfunction(m) and not n.startswith("_")}
        silent = [n for n in methods if not (inspect.getdoc(getattr(thing, n)) or "").strip()]
        assert silent == [], name


def test_every_page_of_the_reference_is_in_the_index() -> None:
    index = (PAGES / "index.md").read_text()
    linked = set(re.findall(r"\((\w+\.md)\)", index))
    assert linked == {page.name for page in PAGES.glob("*.md")} - {"index.md"}
