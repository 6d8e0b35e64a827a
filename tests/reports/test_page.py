"""A whole report: what is there, what is missing, and what must never come through."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from gpattention.evaluation.records import Record
from gpattention.reports import build_report
from gpattention.reports.sections import SECTIONS
from gpattention.runs import RunData
from tests.reports.reading import Element, read
from tests.reports.synthetic import KINDS, SUITES, synthetic_run

NAMES = [section.name for section in SECTIONS]


def section(tree: Element, name: str) -> Element:
    return tree.one("section", id=name)


def small(kind: str = "cgp", **arguments: Any) -> RunData:
    return synthetic_run(kind, predictors=("model",), scores=("entropy",), **arguments)


def test_sections_can_be_left_out() -> None:
    tree = read(build_report([small()], without=["gallery", "cost"]))
    left = [name for name in NAMES if name not in ("gallery", "cost")]
    assert [part.attributes["id"] for part in tree.all("section")] == left
    assert [link.attributes["href"] for link in tree.one("nav").all("a")] == [f"#{name}" for name in left]
    with pytest.raises(ValueError, match=r"expected without to name sections \(summary, .*, got 'galery'"):
        build_report([small()], without=["galery"])


def test_every_section_has_charts_with_words_and_numbers(tree: Element) -> None:
    assert [part.attributes["id"] for part in tree.all("section")] == NAMES
    assert [link.attributes["href"] for link in tree.one("nav").all("a")] == [f"#{name}" for name in NAMES]
    for name in set(NAMES) - {"summary", "gallery", "environment"}:
        charts = section(tree, name).all("figure", class_="chart")
        assert charts, name
        for chart in charts:
            svg = chart.one("svg")
            assert svg.all("text")
            assert len(svg.attributes["aria-label"] or "") > 20
            assert len(chart.one("details").all("td")) >= 2
            assert chart.one("figcaption").text.strip()
    assert tree.all(class_="missing") == []


def test_ids_are_unique_and_links_lead_somewhere(tree: Element) -> None:
    ids = [element.attributes["id"] for element in tree.all() if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    for element in tree.all():
        for key in ("href", "aria-controls", "aria-labelledby"):
            target = element.attributes.get(key)
            if target and not target.startswith("data:"):
                assert target.removeprefix("#") in ids, target


def test_nothing_is_fetched(page: str) -> None:
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"@import|url\((?!#)|\bsrc=", page)
    policy = read(page).one("meta", http_equiv="Content-Security-Policy").attributes["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy


def test_the_same_runs_give_the_same_page() -> None:
    pages = {build_report([small(suites=("clean",))], "title") for _ in range(2)}
    assert len(pages) == 1


def cells(table: Element) -> list[list[str]]:
    return [[cell.text.strip() for cell in row.children] for row in table.one("tbody").children]


def test_the_best_is_bold_and_ece_has_its_company() -> None:
    runs = [small(kind, suites=("clean", "corrupted")) for kind in KINDS[:4]]
    table = read(build_report(runs)).one("table", class_="key summary")
    heads = [re.sub(r" .*", "", head.text.strip()) for head in table.one("thead").children[1].children]
    assert heads == ["model", "accuracy", "NLL", "ECE", "AURC", "accuracy", "NLL", "ECE"]
    values = [
        [run.suites["clean"].value("test", m) for run in runs] for m in ("accuracy", "nll", "ece", "aurc")
    ]
    rows = table.one("tbody").children
    for column, (of_models, pick) in enumerate(zip(values, (max, min, min, min), strict=True), 1):
        bold = {i for i, row in enumerate(rows) if row.children[column].all("b")}
        best = pick(value for value in of_models if value is not None)
        assert bold == {i for i, value in enumerate(of_models) if f"{value:.3f}" == f"{best:.3f}"}
        assert [row.children[column].text.strip() for row in rows] == [f"{value:.3f}" for value in of_models]


def test_a_single_model_is_no_winner() -> None:
    tree = read(build_report([small(suites=("clean",))]))
    assert tree.one("table", class_="key summary").all("b") == []
    assert "Best" not in tree.one("ul", class_="tiles").text


def test_tiles_show_ece_with_accuracy_and_nll(tree: Element) -> None:
    for tile in tree.one("ul", class_="tiles").children:
        if "ECE" in tile.text:
            assert re.search(r"accuracy \d.*NLL \d", tile.text)


def test_several_seeds_have_a_mean_and_a_standard_error(tree: Element) -> None:
    softmax, scgp = cells(section(tree, "summary").all("table", class_="key summary")[0])
    assert not any("±" in cell for cell in softmax)
    assert all("±" in cell for cell in scgp[1:])
    assert "softmax 1, scgp 2" in section(tree, "summary").text
    assert "the same seed" not in section(tree, "summary").text
    again = read(build_report([small(), replace(small(), name="again")], without=NAMES[1:]))
    assert (
        "Some runs of cgp have the same seed: these count once, by their mean"
        in section(again, "summary").text
    )


def test_a_regulariser_that_is_summed_is_not_called_normalised() -> None:
    run = small()
    paper = replace(run, recipe={**run.recipe, "regularizer": {"normalised": False}})
    told = [section(read(build_report([each])), "training").text for each in (run, paper)]
    assert ["Per head, token and dimension, before alpha" in text for text in told] == [True, False]
    assert ["a sequence's sum" in text for text in told] == [False, True]


def test_data_for_programs_is_the_table(tree: Element) -> None:
    (comparison,) = json.loads("".join(tree.one("script", id="report-data").texts))
    assert comparison["data"] == "digits"
    ours = synthetic_run("softmax", predictors=("model", "model+temperature"))
    number = comparison["models"]["softmax"]["model"]["test ece"]
    assert number == {"mean": ours.suites["clean"].value("test", "ece"), "standard_error": None, "runs": 1}
    assert comparison["models"]["scgp"]["model"]["test ece"]["runs"] == 2


def test_a_run_without_anything_is_all_commands() -> None:
    run = RunData("fresh", {"data": {"name": "digits"}}, folder="my runs/it's")
    tree = read(build_report([run]))
    assert tree.all("figure") == []
    assert len(tree.all(class_="missing")) == len(NAMES) - 1  # all but the configuration
    suites = {
        "summary": "clean", "reliability": "clean", "corruptions": "corrupted", "outliers": "ood",
        "selective": "selective", "health": "clean", "oversmoothing": "oversmoothing", "cost": "efficiency",
        "gallery": "clean",
    }  # fmt: skip
    assert set(suites.values()) == set(SUITES)
    for name, suite in suites.items():
        command = f"""gpattention evaluate 'my runs/it'"'"'s' --suite {suite}"""
        assert command in section(tree, name).one(class_="missing").text


def test_suites_without_numbers_leave_no_chart() -> None:
    run = small()
    empty = {name: replace(suite, records=(), curves={}) for name, suite in run.suites.items()}
    tree = read(build_report([replace(run, rows=[], suites=empty)]))
    assert tree.all("figure") == []
    assert tree.all(role="tablist") == []


def test_a_model_that_lacks_some_numbers_is_left_out_of_their_charts() -> None:
    whole, part = small("softmax"), small("cgp")
    suites = {name: replace(suite, records=(), curves={}) for name, suite in part.suites.items()}
    corrupted = part.suites["corrupted"]
    kept = tuple(r for r in corrupted.records if r.metric == "accuracy")
    suites["corrupted"] = replace(corrupted, records=kept)
    tree = read(build_report([whole, replace(part, suites=suites)]))
    heads = {chart.attributes["id"]: chart.one("thead").text for chart in tree.all("figure")}
    assert "cgp" not in heads["cost-0-own-train_epoch_seconds"]
    assert "cgp" in heads["corruptions-0-severity-0-accuracy"]
    assert "cgp" not in heads["corruptions-0-severity-0-ece"]
    assert "cgp" not in heads["corruptions-0-type-0-ece"]
    assert "reliability-0-0-0" in heads
    assert "reliability-0-0-1" not in heads


def test_a_suite_that_some_runs_lack_is_said(tree: Element) -> None:
    runs = [small("softmax", suites=("clean", "ood")), small("cgp", suites=("clean",))]
    notes = section(read(build_report(runs)), "outliers").one("aside").text
    assert "Not evaluated: cgp" in notes
    assert "gpattention evaluate runs/cgp --suite ood" in notes
    assert "ood: a synthetic note" in notes
    assert "softmax: ood" not in notes  # all that were evaluated say so


def test_notes_of_some_runs_carry_their_names() -> None:
    one, two = (small(kind, suites=("clean",)) for kind in ("softmax", "cgp"))
    one = replace(one, suites={"clean": replace(one.suites["clean"], notes=("a stand-in",))})
    assert "softmax: a stand-in" in section(read(build_report([one, two])), "summary").one("aside").text


def test_many_runs_make_a_short_command() -> None:
    tree = read(build_report([RunData(f"r{i}", {"x": i}, folder=f"r{i}") for i in range(9)]))
    assert "gpattention evaluate r0 r1 r2 r3 ... --suite clean" in section(tree, "summary").text


def test_text_has_words_and_mcc_and_no_corruptions() -> None:
    run = small(texts=True, data="cola", suites=("clean",))
    tree = read(build_report([run]))
    words = section(tree, "gallery").all("span", class_="word")
    assert words[1].texts == ["mechanical"]
    assert 0 <= int((words[1].attributes["style"] or "").removeprefix("--shade:").removesuffix("%")) <= 80
    assert "MCC" in section(tree, "summary").text
    assert "this suite needs images" in section(tree, "corruptions").text
    assert "cola" in tree.one("title").text


def test_two_data_sets_are_two_parts_of_each_section() -> None:
    runs = [small(suites=("clean",)), small(texts=True, data="cola", suites=("clean",))]
    tree = read(build_report(runs))
    for name in NAMES:
        assert [head.text for head in section(tree, name).all("h3")] == ["digits", "cola"]
    test_ids_are_unique_and_links_lead_somewhere(tree)


def test_patches_are_shaded_by_their_variance() -> None:
    run = small(suites=("clean",))
    tree = read(build_report([run]))
    item = run.suites["clean"].curves["gallery"]["most_wrong"][0]
    card = section(tree, "gallery").all("li", class_="item")[0]
    shades = [float(rect.attributes["fill-opacity"] or 0) for rect in card.all("rect")]
    order = sorted(range(16), key=lambda i: item["token_variance"][i])
    assert [shades[i] for i in order] == sorted(shades)
    assert "5" in card.text
    assert "instead of 3" in card.text


@pytest.mark.parametrize("change", [{"token_variance": None}, {"grid": None}, {"token_variance": [0.1] * 5}])
def test_items_without_a_grid_are_shown_plain(change: dict[str, Any]) -> None:
    run = small(suites=("clean",))
    gallery = run.suites["clean"].curves["gallery"]
    for items in gallery.values():
        for item in items:
            item.update(change)
    tree = read(build_report([run]))
    for card in section(tree, "gallery").all("li", class_="item"):
        assert len(card.all("svg")) == 1


def test_a_class_token_is_no_patch() -> None:
    run = small(suites=("clean",))
    for item in run.suites["clean"].curves["gallery"]["most_wrong"]:
        item["token_variance"] = [9.0, *item["token_variance"]]
    card = section(read(build_report([run])), "gallery").all("li", class_="item")[0]
    assert len(card.all("rect")) == 16


def test_words_without_variance_and_empty_groups() -> None:
    run = small(texts=True, suites=("clean",))
    gallery = run.suites["clean"].curves["gallery"]
    gallery["most_wrong"] = []
    for item in (item for items in gallery.values() for item in items):
        item["token_variance"] = None
    tree = section(read(build_report([run])), "gallery")
    assert tree.all("span", class_="word") == []
    assert "mechanical" in tree.text
    assert "Most wrong" not in [head.text for head in tree.all("h4")]


def test_runs_that_did_not_finish_are_told() -> None:
    failed = replace(small(suites=()), events=[{"event": "failed", "step": 7, "reason": "the loss is nan"}])
    stopped = replace(small("softmax", suites=()), events=[{"event": "stopped", "step": 3}])
    told = section(read(build_report([failed, stopped])), "training").one("aside").text
    assert "cgp failed at step 7: the loss is nan" in told
    assert "softmax stopped at step 3" in told


def test_equal_lines_are_drawn_once() -> None:
    runs = [small(kind, suites=()) for kind in ("softmax", "cgp")]
    tree = read(build_report(runs))
    alpha = tree.one("figure", id="training-0-alpha")
    assert [head.text for head in alpha.one("thead").all("th")] == ["epoch", "all models"]
    loss = tree.one("figure", id="training-0-train_loss")
    assert [head.text for head in loss.one("thead").all("th")] == ["epoch", "softmax", "cgp"]


def test_problems_of_layers_are_told() -> None:
    run = small(suites=("clean",))
    run.suites["clean"].curves["health"][1]["problems"] = ["queries have merged"]
    assert (
        "cgp, layer 2: queries have merged" in section(read(build_report([run])), "health").one("aside").text
    )


def test_environments_that_differ_have_a_column_each() -> None:
    one, two = (small(kind, suites=("clean",)) for kind in ("softmax", "cgp"))
    two = replace(two, suites={"clean": replace(two.suites["clean"], environment={"device": "H200"})})
    tables = section(read(build_report([one, two])), "environment").all("table", class_="key")
    assert [head.text for head in tables[0].one("thead").all("th")] == ["what", "softmax", "cgp"]
    assert ["device", "cpu", "H200"] in cells(tables[0])
    assert ["model.attention", "softmax", "cgp"] in cells(tables[1])


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="expected runs"):
        build_report([])


HOSTILE = "<script>alert(1)</script>\"'&</style><img src=x onerror=alert(2)>$\\frac"


def poisoned(content: Any) -> Any:
    """Every text replaced, keys of the schema kept."""
    if isinstance(content, dict):
        return {key: poisoned(value) for key, value in content.items()}
    if isinstance(content, list):
        return [poisoned(value) for value in content]
    return HOSTILE if isinstance(content, str) else content


def poisoned_run(texts: bool) -> RunData:
    run = small(texts=texts)
    suites: dict[str, Any] = {}
    for name, suite in run.suites.items():
        records = tuple(
            replace(record, set=f"{record.set}/{HOSTILE}", detail=poisoned(record.detail))
            for record in suite.records
        )
        curves = poisoned(suite.curves)
        for curve in ("scores", "roc"):
            if curve in curves:
                first = next(iter(curves[curve].values()))
                curves[curve] = {HOSTILE: {HOSTILE: next(iter(first.values()))}}
        suites[name] = replace(
            suite, records=(*suite.records, *records), curves=curves, notes=(HOSTILE,),
            environment={HOSTILE: HOSTILE},
        )  # fmt: skip
    more = Record(f"corrupted/{HOSTILE.replace('/', '')}/3", "model", "ece", 0.5)
    corrupted = suites["corrupted"]
    suites["corrupted"] = replace(corrupted, records=(*corrupted.records, more))
    recipe = {**run.recipe, HOSTILE: {HOSTILE: [HOSTILE, texts]}, "data": {"name": HOSTILE}}
    events = [{"event": "failed", "reason": HOSTILE, "step": HOSTILE}]
    return RunData(HOSTILE, recipe, run.rows, events, suites, HOSTILE)


def test_hostile_data_stays_text(tree: Element) -> None:
    plain, tree = tree, read(build_report([poisoned_run(False), poisoned_run(True)], HOSTILE))
    assert len(tree.all("script")) == len(plain.all("script")) == 2
    assert len(tree.all("style")) == 1
    assert tree.all("img") == []
    assert {element.tag for element in tree.all()} <= {element.tag for element in plain.all()} | {
        "aside",
        "h3",
    }
    for element in tree.all():
        assert not any(key.startswith("on") for key in element.attributes)
    assert tree.one("title").text == HOSTILE
    drawn = [text for part in tree.all("text") for text in part.texts]
    assert any(text.startswith("<script>alert(1)</script>") for text in drawn)
    assert tree.text.count(HOSTILE) > 50
    json.loads("".join(tree.one("script", id="report-data").texts))


@pytest.mark.slow
def test_the_demo_fits_into_five_megabytes() -> None:
    page = build_report([synthetic_run(kind) for kind in KINDS])
    assert len(page.encode()) < 5_000_000
