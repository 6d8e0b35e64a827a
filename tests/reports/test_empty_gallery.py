"""A report has a gallery where there are items to show or a command that makes them, and else none."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpattention.reports import build_report
from gpattention.reports.sections import SECTIONS
from gpattention.reports.sections.gallery import GROUPS
from gpattention.runs import RunData
from tests.reports.reading import Element, read
from tests.reports.synthetic import synthetic_run

NAMES = [section.name for section in SECTIONS]
KEYS = [key for key, _, _ in GROUPS]
# what an evaluation kept: no curve at all, or this many items of each group; None: there was none
kept = (
    st.none() | st.just("no curve") | st.fixed_dictionaries({}, optional={k: st.integers(0, 2) for k in KEYS})
)


def run_with(kind: str, kept: Any, data: str = "digits", seed: int = 0) -> RunData:
    suites = ("clean",) if kept is not None else ()
    run = synthetic_run(kind, predictors=("model",), scores=("entropy",), suites=suites, data=data, seed=seed)
    if kept is None:
        return run
    clean = run.suites["clean"]
    curves = {name: curve for name, curve in clean.curves.items() if name != "gallery"}
    if kept != "no curve":
        curves["gallery"] = {key: clean.curves["gallery"][key][:count] for key, count in kept.items()}
    return replace(run, suites={"clean": replace(clean, curves=curves)})


def items(kept: Any) -> int:
    return sum(kept.values()) if isinstance(kept, dict) else 0


def parts(tree: Element) -> list[str]:
    """Names of the sections, which are those of the navigation."""
    names = [str(part.attributes["id"]) for part in tree.all("section")]
    assert [link.attributes["href"] for link in tree.one("nav").all("a")] == [f"#{name}" for name in names]
    return names


@settings(deadline=None, max_examples=15)
@given(softmax=kept, cgp=kept)
def test_a_section_only_where_it_shows_something(softmax: Any, cgp: Any) -> None:
    tree = read(build_report([run_with("softmax", softmax), run_with("cgp", cgp)]))
    shown = items(softmax) + items(cgp)
    fresh = softmax is None and cgp is None
    assert parts(tree) == [name for name in NAMES if name != "gallery" or shown or fresh]
    if not (shown or fresh):
        assert 'href="#gallery' not in build_report([run_with("softmax", softmax), run_with("cgp", cgp)])
        return
    section = tree.one("section", id="gallery")
    assert len(section.all("li", class_="item")) == shown
    assert ("--suite clean" in section.text) == fresh
    for label, found in {"softmax": softmax, "cgp": cgp}.items():
        assert (f"Gallery of {label} in numbers" in section.text) == (items(found) > 0)


def test_the_first_seed_that_has_items() -> None:
    runs = [run_with("cgp", "no curve"), run_with("cgp", {"most_wrong": 0}, seed=1)]
    assert "gallery" not in parts(read(build_report(runs)))
    tree = read(build_report([*runs, run_with("cgp", {"most_wrong": 2}, seed=2)]))
    assert len(tree.one("section", id="gallery").all("li", class_="item")) == 2


def test_only_data_sets_that_have_one_stand_in_it() -> None:
    runs = [run_with("cgp", "no curve", "empty"), run_with("cgp", {"most_certain": 1}, "full")]
    tree = read(build_report(runs))
    assert [head.text for head in tree.one("section", id="gallery").all("h3")] == ["full"]
    assert [head.text for head in tree.one("section", id="summary").all("h3")] == ["empty", "full"]
