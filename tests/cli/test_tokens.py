"""`gpattention tokens`: colours, JSON, pages, what is usual."""

import json
from pathlib import Path

import pytest
import torch

from gpattention.hosts import attach, load_language_model
from tests.cli.conftest import Run
from tests.hosts.decoder_hosts import decoder

CPU = ("--device", "cpu")
TEXT = "the film was good"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tmp_path_factory.mktemp("model")
    letters = "abcdefghijklmnopqrstuvwxyz .,'é"
    vocabulary = {"<unk>": 0, **{letter: 3 + n for n, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(made)
    model = decoder("grouped llama", use_cache=True)
    model.generation_config.eos_token_id = None
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = torch.Generator().manual_seed(0)
    lines = ["".join(chr(97 + n) for n in torch.randint(0, 26, (14,), generator=made)) for _ in range(30)]
    file = tmp_path_factory.mktemp("usual") / "lines.txt"
    file.write_text("\n".join(lines) + "\n\n")
    return file


def test_the_text_is_shown(folder: Path, run: Run) -> None:
    out = run("tokens", folder, TEXT, *CPU).out
    title, line = out.splitlines()
    assert title.startswith("surprise of the token that follows, in ranks")
    assert line.replace("[", "").replace("]", "") == TEXT
    assert "[" in line  # strong tokens, where there are no colours


def test_json_has_what_the_handle_says(folder: Path, run: Run) -> None:
    document = json.loads(run("tokens", folder, TEXT, "--json", *CPU).out)
    handle = attach(*load_language_model(folder))
    found = handle.token_uncertainty(TEXT)
    rows = document["tokens"]
    assert "".join(row["token"] for row in rows) == TEXT
    assert [row["next"] for row in rows[:-1]] == list(TEXT[1:])
    assert rows[-1]["next"] is rows[-1]["surprise"] is None
    assert [row["entropy"] for row in rows] == pytest.approx(found.entropy[0].tolist())
    assert document["flagged"] == []
    assert "strangeness" not in rows[0]


def test_usual_texts_are_fitted_written_and_read(folder: Path, usual: Path, tmp_path: Path, run: Run) -> None:
    options = ["--by", "strangeness", "--rate", "0.2", *CPU]
    first = run("tokens", folder, TEXT, "--held-out", usual, "--fitted", tmp_path, *options).out
    assert (tmp_path / "tokens.json").is_file()
    assert first.startswith("strangeness of the token read, in deviations")
    assert "flagged," in first
    assert run("tokens", folder, TEXT, "--fitted", tmp_path, *options).out == first
    document = json.loads(run("tokens", folder, TEXT, "--fitted", tmp_path, "--json", *options).out)
    assert {"strangeness", "p_value"} <= set(document["tokens"][0])
    assert document["flagged"][0].keys() == {"item", "start", "stop", "score", "text"}


def test_texts_are_continued(folder: Path, run: Run) -> None:
    greedy = json.loads(run("tokens", folder, TEXT, "--continue", "5", "--json", *CPU).out)
    assert len(greedy["tokens"]) == len(TEXT) - 1 + 5
    drawn = [
        json.loads(run("tokens", folder, TEXT, "--continue", "5", "--seed", seed, "--json", *CPU).out)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    handle = attach(*load_language_model(folder))
    new = torch.cat([step.next_ids for step in handle.generate(TEXT, 5)], 1)
    assert [row["next"] for row in greedy["tokens"][-5:]] == [
        handle.tokenizer.decode([i]) for i in new[0].tolist()
    ]


def test_a_page(folder: Path, tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.html"
    assert run("tokens", folder, "a<b", "--html", page, *CPU).out == ""
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.count("<span") == 3


def test_from_standard_input(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert run("tokens", folder, "-", *CPU).out == run("tokens", folder, TEXT, *CPU).out


@pytest.mark.parametrize(("words", "wanted"), [
    (("nowhere", "text"), "no folder and no GGUF file nowhere"),
    (("MODEL", "text", "--by", "colour"), "expected --by to be one of"),
    (("MODEL", "text", "--fitted", "nowhere"), "nowhere"),
])  # fmt: skip
def test_mistakes(words: tuple[str, ...], wanted: str, folder: Path, run: Run) -> None:
    given = [folder if word == "MODEL" else word for word in words]
    assert wanted in run("tokens", *given, *CPU, code=2).err
