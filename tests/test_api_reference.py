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
# modules that are front doors themselves
MODULES = ["gpattention.metrics.streaming", "gpattention.data.shifts", "gpattention.strangeness.detectors"]
# parts of the packages above them, which re-export what is public
INTERNAL = re.compile(r"^gpattention\.(cli|studies.*|reports\..*|gp\..*|ops.*)$")
# what studies take from a front door, and nobody else should
FOR_STUDIES = {
    f"gpattention.evaluation.{name}"
    for name in ("REDUCING", "check_as_much", "content_digest", "open_with_digest")
}
# room -> the package whose names it hands on, or that hands on its own: one entry, under that package
HANDED_ON = {
    "hosts": "gpattention",
    "evaluation": "gpattention.runs",
    "evaluation.suites": "gpattention.evaluation",
    "strangeness": "gpattention.evaluation",
}
# modules without a front door, of which pages name what a reader may call
NO_FRONT_DOOR = re.compile(r"^gpattention\.(studies\.\w+|numerics)\.\w+$")
COMMAND_LINE = Path(__file__).parent.parent / "docs/command-line.md"


def _entries() -> list[str]:
    return [name for page in sorted(PAGES.glob("*.md")) for name in ENTRY.findall(page.read_text())]


def _packages() -> list[str]:
    """Every package that says by `__all__` what is public."""
    found = [
        module.name for module in pkgutil.walk_packages(gpattention.__path__, "gpattention.") if module.ispkg
    ]
    packages = ["gpattention", *MODULES, *(name for name in found if not INTERNAL.match(name))]
    return [name for name in packages if hasattr(import_module(name), "__all__")]


def _object(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _public() -> set[str]:
    handed_on = {
        f"gpattention.{room}.{name}"
        for room, package in HANDED_ON.items()
        for name in import_module(package).__all__
    }
    named = {f"{package}.{name}" for package in _packages() for name in import_module(package).__all__}
    return named - handed_on - NO_PAGE - FOR_STUDIES


def test_packages_are_found() -> None:
    expected = "gp attention models hosts data metrics metrics.streaming runs training evaluation reports"
    assert {f"gpattention.{name}" for name in expected.split()} <= set(_packages())


def test_every_public_name_has_an_entry() -> None:
    assert sorted(_public() - set(_entries())) == []


def test_no_entry_is_doubled_or_unknown() -> None:
    entries = _entries()
    assert [name for name, count in Counter(entries).items() if count > 1] == []
    assert sorted(name for name in set(entries) - _public() if not NO_FRONT_DOOR.match(name)) == []


def test_every_study_of_the_command_line_has_an_entry() -> None:
    named = set(re.findall(r"`(gpattention\.studies\.\w+\.\w+)`", COMMAND_LINE.read_text()))
    assert len(named) >= 9
    assert sorted(named - set(_entries())) == []


@pytest.mark.parametrize("name", sorted(name for name in _entries()))
def test_entries_are_explained(name: str) -> None:
    """Functions, classes and their public methods have docstrings; constants have none to have."""
    thing = _object(name)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        return
    assert (inspect.getdoc(thing) or "").strip(), name
    if inspect.isclass(thing) and thing.__module__.startswith("gpattention"):
        fields = getattr(thing, "__dataclass_fields__", {})  # a default may be a function
        methods = [
            n for n, m in vars(thing).items() if inspect.isfunction(m) and n[0] != "_" and n not in fields
        ]
        silent = [n for n in methods if not (inspect.getdoc(getattr(thing, n)) or "").strip()]
        assert silent == [], name


def test_every_page_of_the_reference_is_in_the_index() -> None:
    index = (PAGES / "index.md").read_text()
    linked = set(re.findall(r"\((\w+\.md)\)", index))
    assert linked == {page.name for page in PAGES.glob("*.md")} - {"index.md"}
