"""A whole report: what is there, what is missing, and what must never come through."""

import base64
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gpattention.evaluation import FITTED, predictor_name
from gpattention.reports import build_report
from gpattention.reports.sections import SECTIONS
from gpattention.runs import RunData
from gpattention.runs.records import Record
from tests.reports.reading import Element, read
from tests.reports.synthetic import KINDS, SUITES, ecdf, synthetic_run

NAMES = [section.name for section in SECTIONS]


def section(tree: Element, name: str) -> Element:
    return tree.one("section", id=name)


def made(*runs: RunData, **options: Any) -> Element:
    return read(build_report(runs, **options))


def small(kind: str = "cgp", **arguments: Any) -> RunData:
    return synthetic_run(kind, predictors=("model",), scores=("entropy",), **arguments)


def test_sections_can_be_left_out() -> None:
    tree = read(build_report([small()], without=["gallery", "cost"]))
    left = [name for name in NAMES if name not in ("gallery", "cost")]
    assert [part.attributes["id"] for part in tree.all("section")] == left
    assert [link.attributes["href"] for link in tree.one("nav").all("a")] == [f"#{name}" for name in left]
    with pytest.raises(ValueError, match=r"expected without to name sections \(summary, .*, got 'galery'"):
        build_report([small()], without=["galery"])
    with pytest.raises(ValueError, match="expected runs"):
        build_report([])


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


def number_of(cell: Element) -> str:
    """What stands in a cell of the summary, without its interval."""
    return "".join([*cell.texts, *(part.text for part in cell.all("b"))]).strip()


def test_the_best_is_bold_and_ece_has_its_company() -> None:
    runs = [small(kind, suites=("clean", "corrupted")) for kind in KINDS[:4]]
    table = made(*runs).one("table", class_="key summary")
    heads = [
        re.sub(r" [↑↓].*", "", head.text.strip()).strip() for head in table.one("thead").children[1].children
    ]
    shifted = ["accuracy, %", "NLL, nats", "ECE, 0 to 1"]
    assert heads == ["model", *shifted, "AURC, 0 to 1", *shifted]
    values = [
        [run.suites["clean"].value("test", m) for run in runs] for m in ("accuracy", "nll", "ece", "aurc")
    ]
    rows = table.one("tbody").children
    for column, (of_models, pick) in enumerate(zip(values, (max, min, min, min), strict=True), 1):
        bold = {i for i, row in enumerate(rows) if row.children[column].all("b")}
        shown = [f"{100 * x:.2f}" if column == 1 else f"{x:.3f}" for x in of_models if x is not None]
        assert bold == {i for i, text in enumerate(shown) if text == pick(shown, key=float)}
        assert [number_of(row.children[column]) for row in rows] == shown
        ends = [row.children[column].one("small", class_="ends").text for row in rows]
        assert all(re.fullmatch(r"[\d.]+ to [\d.]+", text) for text in ends)


def test_a_single_model_is_no_winner() -> None:
    tree = made(small(suites=("clean",)))
    assert tree.one("table", class_="key summary").all("b") == []
    assert "Best" not in tree.one("ul", class_="tiles").text


def test_tiles_show_ece_with_accuracy_and_nll(tree: Element) -> None:
    for tile in tree.one("ul", class_="tiles").children:
        if "ECE" in tile.text:
            assert re.search(r"accuracy \d.*NLL \d", tile.text)


def test_several_seeds_have_a_mean_and_a_standard_error(tree: Element) -> None:
    table = section(tree, "summary").all("table", class_="key summary")[0]
    softmax, scgp = table.one("tbody").children
    for row in (softmax, scgp):  # of one seed over items, of two by Student's t
        assert all(" to " in cell.one("small", class_="ends").text for cell in row.children[1:5])
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
    words = [section(made(each), "training").text for each in (run, paper)]
    assert ["Per head, token and dimension, before alpha" in text for text in words] == [True, False]
    assert ["a sequence's sum" in text for text in words] == [False, True]


def test_data_for_programs_is_the_table(tree: Element) -> None:
    (comparison,) = json.loads("".join(tree.one("script", id="report-data").texts))
    assert comparison["data"] == "digits"
    ours = synthetic_run("softmax", predictors=("model", "model+temperature"))
    number = comparison["models"]["softmax"]["model"]["test ece"]
    value = ours.suites["clean"].value("test", "ece")
    assert value is not None
    ends = pytest.approx([0.9 * value, 1.1 * value])
    assert number == {"mean": value, "standard_error": None, "runs": 1, "interval": ends}
    assert comparison["models"]["scgp"]["model"]["test ece"]["runs"] == 2


def test_a_run_without_anything_is_all_commands() -> None:
    run = RunData("fresh", {"data": {"name": "digits"}}, folder="my runs/it's")
    tree = made(run)
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


def with_p_values(kind: str, found: dict[str, Any] | None, **options: Any) -> RunData:
    run = small(kind, suites=("ood",), **options)
    ood = run.suites["ood"]
    curves = {name: curve for name, curve in ood.curves.items() if name != "p_values"}
    curves |= {"p_values": found} if found is not None else {}
    return replace(run, suites={"ood": replace(ood, curves=curves)})


def test_p_values_and_false_alarms_reach_the_page() -> None:
    test = ecdf([0.004, 0.02, *(i / 50 for i in range(3, 51))])
    far = ecdf([0.004] * 40 + [0.04] * 8 + [0.5] * 2)
    part = section(made(with_p_values("cgp", {"ood/far": far, "test": test})), "outliers")
    chart = part.one("figure", id="outliers-0-p-values-0")
    words = "False alarms on the test set: 2.0 % at a rate of 1 % and 4.0 % at a rate of 5 %."
    assert words in chart.one("figcaption").text
    assert words in (chart.one("svg").attributes["aria-label"] or "")
    assert {"test", "far"} <= {text for each in chart.all("text") for text in each.texts}
    table = chart.one("table")
    assert [head.text for head in table.one("thead").all("th")] == ["p-value", "test", "far"]
    assert cells(table)[:3] == [
        ["0.01", "0.02000", "0.8000"], ["0.02", "0.04000", "0.8000"], ["0.05", "0.04000", "0.9600"],
    ]  # fmt: skip
    assert ["test set (false alarms), at 1 %", "0.02000"] in [
        row for t in part.all("table") for row in cells(t)
    ]
    assert part.all(class_="missing") == []


def test_a_rate_below_every_p_value_has_no_share_of_false_alarms() -> None:
    few = ecdf([0.04, 0.5, 1.0])
    part = section(made(with_p_values("cgp", {"test": few, "ood/far": few})), "outliers")
    assert "False alarms on the test set: 33.3 % at a rate of 5 %." in part.text
    rows = [row for table in part.all("table") for row in cells(table)]
    assert ["test set (false alarms), at 1 %", "\u2013"] in rows
    none = ecdf([0.2, 0.5, 1.0])
    part = section(made(with_p_values("cgp", {"test": none})), "outliers")
    assert "Too few items to flag any." in part.text


def test_seeds_share_a_mean_of_false_alarms() -> None:
    runs = [
        with_p_values("cgp", {"test": ecdf(p)}, seed=seed) for seed, p in enumerate(([0.01, 1], [0.5, 1]))
    ]
    assert "25.0 % at a rate of 1 % and 25.0 % at a rate of 5 %" in section(made(*runs), "outliers").text


def test_runs_without_p_values_say_so() -> None:
    old = with_p_values("softmax", None)
    part = section(made(old, small("cgp", suites=("ood",)), small("scgp", suites=("clean",))), "outliers")
    words = part.one(class_="missing").text
    assert words.startswith("No p-values of strangeness of softmax: evaluated before there were any")
    assert words.endswith("gpattention evaluate runs/softmax --suite ood --fresh")
    assert [each.attributes["id"] for each in part.all("figure") if "p-values" in each.attributes["id"]] == [
        "outliers-0-p-values-0"
    ]
    alone = section(made(old), "outliers")
    assert len(alone.all(class_="missing")) == 1
    assert alone.all("figure")  # its histograms


def test_every_temperature_is_named() -> None:
    fitted = ("model", *(f"model+{name}" for name in FITTED))
    tree = made(synthetic_run(predictors=fitted, suites=("clean",)))
    tabs = [tab.text for tab in section(tree, "summary").all(role="tab")]
    assert tabs == [predictor_name(name) for name in fitted]
    assert tabs[-1] == "own prediction, temperature by strangeness"


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
    tree = made(whole, replace(part, suites=suites))
    heads = {chart.attributes["id"]: chart.one("thead").text for chart in tree.all("figure", class_="chart")}
    assert "cgp" not in heads["cost-0-own-train_epoch_seconds"]
    assert "cgp" in heads["corruptions-0-severity-0-accuracy"]
    assert "cgp" not in heads["corruptions-0-severity-0-ece"]
    assert "cgp" not in heads["corruptions-0-type-0-ece"]
    assert "reliability-0-0-0" in heads
    assert "reliability-0-0-1" not in heads


def ended(kind: str, **event: Any) -> RunData:
    return replace(small(kind, suites=()), events=[event])


def with_clean(kind: str, **changes: Any) -> RunData:
    run = small(kind, suites=("clean",))
    return replace(run, suites={"clean": replace(run.suites["clean"], **changes)})


def merged() -> RunData:
    run = small(suites=("clean",))
    run.suites["clean"].curves["health"][1]["problems"] = ["queries have merged"]
    return run


@pytest.mark.parametrize(
    ("name", "runs", "texts"),
    [
        # a note that all evaluated runs share carries no names
        ("outliers", [small("softmax", suites=("clean", "ood")), small("cgp", suites=("clean",))],
         ["Not evaluated: cgp", "gpattention evaluate runs/cgp --suite ood", " ood: a synthetic note"]),
        ("summary", [with_clean("softmax", notes=("a stand-in",)), with_clean("cgp")],
         ["softmax: a stand-in"]),
        ("training", [ended("cgp", event="failed", step=7, reason="the loss is nan"),
                      ended("softmax", event="stopped", step=3)],
         ["cgp failed at step 7: the loss is nan", "softmax stopped at step 3"]),
        ("health", [merged()], ["cgp, layer 2: queries have merged"]),
    ],
)  # fmt: skip
def test_notes_say_what_the_reader_should_know(name: str, runs: list[RunData], texts: list[str]) -> None:
    words = section(made(*runs), name).one("aside").text
    assert all(text in words for text in texts)
    assert "softmax: ood" not in words


def test_many_runs_make_a_short_command() -> None:
    tree = made(*(RunData(f"r{i}", {"x": i}, folder=f"r{i}") for i in range(9)))
    assert "gpattention evaluate r0 r1 r2 r3 ... --suite clean" in section(tree, "summary").text


PAINTED = ("variance of a token, by rank", "attention that a token gets, by rank")


def test_text_has_words_and_mcc_and_no_corruptions() -> None:
    run = small(texts=True, data="cola", suites=("clean",))
    tree = made(run)
    for line, title in zip(
        section(tree, "gallery").all(class_="painted")[0].all("div"), PAINTED, strict=True
    ):
        first, *words = line.all("p")
        assert first.text == title
        assert [word.text for word in words[0].all("span")][1] == "mechanical "
        assert any("background" in (word.attributes.get("style") or "") for word in words[0].all("span"))
    assert "MCC" in section(tree, "summary").text
    assert "this suite needs images" in section(tree, "corruptions").text
    assert "cola" in tree.one("title").text


def test_two_data_sets_are_two_parts_of_each_section() -> None:
    runs = [small(suites=("clean",)), small(texts=True, data="cola", suites=("clean",))]
    tree = made(*runs)
    for name in NAMES:
        assert [head.text for head in section(tree, name).all("h3")] == ["digits", "cola"]
    test_ids_are_unique_and_links_lead_somewhere(tree)


def opacities(card: Element) -> dict[str, list[float]]:
    """How deep each token is in each map of a card."""
    found = {}
    for svg in card.all("svg")[1:]:
        data = (svg.all("image")[1].attributes["href"] or "").removeprefix("data:image/png;base64,")
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
        found[(svg.attributes["aria-label"] or "").split()[0]] = pixels[:, :, 3].ravel().tolist()
    return found


def test_patches_are_shaded_by_attention_and_by_variance() -> None:
    run = small(suites=("clean",))
    item = run.suites["clean"].curves["gallery"]["most_wrong"][0]
    card = gallery_of(lambda _: None).all("li", class_="item")[0]
    shades = opacities(card)
    assert list(shades) == ["attention", "variance"]
    for what, found in shades.items():
        order = sorted(range(16), key=lambda i: item[f"token_{what}"][i])
        assert [found[i] for i in order] == sorted(found)
    assert "5" in card.text
    assert "instead of 3" in card.text
    assert re.search(r"entropy \d\.\d{3} nats", card.text)


def gallery_of(change: Any, **options: Any) -> Element:
    """The gallery of a run whose items were changed."""
    run = small(suites=("clean",), **options)
    for key, items in run.suites["clean"].curves["gallery"].items():
        for item in items if key != "answers" else ():
            change(item)
    return section(made(run), "gallery")


@pytest.mark.parametrize(
    "change",
    [{"token_variance": None, "token_attention": None}, {"grid": None},
     {"token_variance": [0.1] * 5, "token_attention": None}],
)  # fmt: skip
def test_items_without_a_grid_are_shown_plain(change: dict[str, Any]) -> None:
    cards = gallery_of(lambda item: item.update(change)).all("li", class_="item")
    assert {len(card.all("svg")) for card in cards} == {1}


@pytest.mark.parametrize("image", [{"shape": [8, 8, 1], "pixels": "<script>"}, {"shape": 3}, [[1], [2, 3]]])
def test_a_damaged_picture_costs_the_picture_alone(image: Any) -> None:
    cards = gallery_of(lambda item: item.update(image=image)).all("li", class_="item")
    assert cards
    assert all(not card.all("svg") and "confidence" in card.text for card in cards)


def test_a_class_token_is_no_patch() -> None:
    gallery = gallery_of(lambda item: item["token_variance"].insert(0, 9.0))
    assert len(opacities(gallery.all("li", class_="item")[0])["variance"]) == 16


def test_words_without_variance() -> None:
    gallery = gallery_of(lambda item: item.update(token_variance=None, token_attention=None), texts=True)
    assert not any("style" in word.attributes for word in gallery.all("span") if "mechanical" in word.text)
    assert "mechanical" in gallery.text


def test_the_gallery_opens_on_a_kind_with_a_posterior_and_shows_every_kind_of_item(tree: Element) -> None:
    gallery = section(tree, "gallery")
    tabs = gallery.one(role="tablist", aria_label="which model").all(role="tab")
    assert [tab.text for tab in tabs] == ["scgp", "softmax"]
    text = gallery.one(role="tabpanel", aria_labelledby=tabs[0].attributes["id"] or "").text
    for words in (
        "Known: test items",
        "Corrupted test items",
        "Foreign items",
        "near",
        "snow, severity 5",
    ):
        assert words in text


def test_pairs_of_a_sure_mistake_and_what_the_other_said() -> None:
    softmax, cgp = small("softmax", suites=("clean",)), small("cgp", suites=("clean",))
    theirs, ours = (run.suites["clean"].curves["gallery"] for run in (softmax, cgp))
    theirs["answers"] |= {
        "predicted": [5, 5, 5, 3],
        "labels": [3, 3, 3, 3],
        "confidence": [0.99, 0.98, 0.5, 0.99],
    }
    ours["answers"] |= {
        "predicted": [3, 5, 5, 5],
        "labels": [3, 3, 3, 3],
        "confidence": [0.7, 0.4, 0.95, 0.97],
    }
    part = section(made(softmax, cgp), "gallery")
    cards = part.one("ul", class_="gallery pairs").all("li")
    words = [card.text for card in cards if "0.990" in card.text and "0.700" in card.text]
    assert len(words) == 1
    assert "✓" in words[0]
    counts = part.one("table", class_="key").one("tbody").all("td")
    # sure mistakes 0 and 1 of softmax: right, and unsure; 2 and 3 of cgp: unsure, and right
    assert [cell.text for cell in counts] == ["2", "2", "2", "2"]
    ours["answers"]["items"] = "other items"
    assert section(made(softmax, cgp), "gallery").all("ul", class_="gallery pairs") == []


def test_a_slider_for_every_item_and_corruption(tree: Element) -> None:
    ladders = section(tree, "gallery").all("figure", class_="ladder")
    assert len(ladders) == 4
    for ladder in ladders:
        slider = ladder.one("input")
        assert (slider.attributes["type"], slider.attributes["max"]) == ("range", "2")
        assert ladder.one("label").attributes["for"] == slider.attributes["id"]
        frames = ladder.all("li", class_="frame")
        assert [frame.attributes["data-title"] for frame in frames] == [
            "as it is",
            "severity 2",
            "severity 5",
        ]
        assert all({"softmax", "scgp"} <= set(frame.text.split()) for frame in frames)


def test_two_sentences_on_top() -> None:
    def verdict(*runs: RunData) -> str:
        return section(made(*runs), "summary").one(class_="conclusion").text

    alone = verdict(small("cgp", suites=("clean",)))
    assert alone.startswith("cgp on the test set of digits (one seed, 95 % bootstrap over items): NLL ")
    assert "not evaluated on corrupted or foreign data" in alone
    one = verdict(small("softmax"), small("cgp"))
    assert one.startswith("Compared with softmax on the test set of digits (one seed each), cgp is ")
    assert "leave out how much seeds differ" in one
    assert "clear" not in one
    pairs = [valued(kind, seed, nll) for kind, nll in (("softmax", 0.4), ("cgp", 0.2)) for seed in range(3)]
    several = verdict(*pairs)
    assert "clearly better in NLL (0.201 vs 0.401 nats)" in several
    assert "not clearly different in" in several
    assert "Student's t over the seeds, at 95 %" in several
    assert verdict(*pairs, valued("sgpa", 0, 0.1)).count("of 3 models the best by validation NLL") == 1


def valued(kind: str, seed: int, nll: float) -> RunData:
    """A run of a given NLL, about which seeds differ little, and of accuracies that differ by seed alone."""
    run = small(kind, seed=seed, suites=("clean",))
    values = {"nll": nll + seed / 1000, "accuracy": 0.9 + (seed if kind == "cgp" else 2 - seed) / 100}
    records = tuple(replace(r, value=values.get(r.metric, r.value)) for r in run.suites["clean"].records)
    return replace(run, suites={"clean": replace(run.suites["clean"], records=records)})


def test_equal_lines_are_drawn_once() -> None:
    runs = [small(kind, suites=()) for kind in ("softmax", "cgp")]
    tree = made(*runs)
    alpha = tree.one("figure", id="training-0-alpha")
    assert [head.text for head in alpha.one("thead").all("th")] == ["epoch", "all models"]
    loss = tree.one("figure", id="training-0-train_loss")
    assert [head.text for head in loss.one("thead").all("th")] == ["epoch", "softmax", "cgp"]


def test_environments_that_differ_have_a_column_each() -> None:
    two = with_clean("cgp", environment={"device": "H200"})
    tables = section(made(with_clean("softmax"), two), "environment").all("table", class_="key")
    assert [head.text for head in tables[0].one("thead").all("th")] == ["what", "softmax", "cgp"]
    assert ["device", "cpu", "H200"] in cells(tables[0])
    assert ["model.attention", "softmax", "cgp"] in cells(tables[1])


# what an evaluation kept: no curve at all, or this many items of each group; None: there was none
KEPT = (None, "no curve", {}, {"most_wrong": 0}, {"most_wrong": 2, "most_certain": 1})
PAIRS = [(KEPT[i], KEPT[j]) for i, j in ((0, 0), (0, 2), (1, 3), (0, 4), (4, 4))]


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


@pytest.mark.parametrize(("softmax", "cgp"), PAIRS)
def test_a_section_only_where_it_shows_something(softmax: Any, cgp: Any) -> None:
    tree = made(run_with("softmax", softmax), run_with("cgp", cgp))
    shown = items(softmax) + items(cgp)
    fresh = softmax is None and cgp is None
    assert parts(tree) == [name for name in NAMES if name != "gallery" or shown or fresh]
    if not (shown or fresh):
        assert tree.all(href="#gallery") == []
        return
    gallery = section(tree, "gallery")
    assert len(gallery.all("li", class_="item")) == shown
    assert ("--suite clean" in gallery.text) == fresh
    for label, found in {"softmax": softmax, "cgp": cgp}.items():
        assert (f"Gallery of {label} in numbers" in gallery.text) == (items(found) > 0)


def test_the_first_seed_that_has_items() -> None:
    runs = [run_with("cgp", "no curve"), run_with("cgp", {"most_wrong": 0}, seed=1)]
    assert "gallery" not in parts(made(*runs))
    tree = made(*runs, run_with("cgp", {"most_wrong": 2}, seed=2))
    assert len(section(tree, "gallery").all("li", class_="item")) == 2


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
        if "p_values" in curves:
            curves["p_values"][HOSTILE] = curves["p_values"]["test"]
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
    assert {each.tag for each in tree.all()} <= {each.tag for each in plain.all()} | {"aside", "h3"}
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
