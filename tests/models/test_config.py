"""Configs and model folders: what is refused, and that everything comes back as it was written."""

import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpattention.attention import registry
from gpattention.models import (
    AttentionConfig,
    TextConfig,
    TextTransformer,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from gpattention.models import config as config_module
from tests.models.small_models import KINDS, images, layer, sentences, text, vision

LAYERS = [
    *(layer(kind) for kind in KINDS),
    layer("kernel", kernel="ard_rbf", symmetric=True, normalize="none"),
    layer("cgp", causal=True, learn_noise=False, noise=0.05, normalize="none", scale=1.5),
    layer("cgp", regularizer="jensen", latent_prior="latent", observation_noise=0.0, max_stddev=3.0),
    layer("direct", bias=False, prior_scale=0.4, learn_prior_scale=False),
    layer("scgp", num_inducing=(4, 3), inducing="pooled", values="dual", conditional="independent"),
    layer("scgp", include_noise=True),
    layer("scgp", num_inducing=[4, 3], regularizer="dtc"),
    layer("sgpa", kernel="exp_dot", jitter=1e-5),
]
every_layer = pytest.mark.parametrize("given", LAYERS, ids=lambda x: f"{x.kind} {' '.join(x.options)}")

V, T, A = VisionConfig, TextConfig, AttentionConfig
ENTRIES = "attention entries with 'kind' and 'options'"
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *(
        (config, {name: bad}, f"{name} to be a whole number >= {least}, got {bad!r}")
        for config, least, bad, names in (
            (V, 1, 0, ("classes", "mlp_width", "channels", "patch")),
            (V, 1, 2.0, ("depth",)),
            (V, 1, True, ("heads",)),
            (T, 1, 0, ("embedding_width", "max_length")),
            (T, 2, 1, ("vocabulary",)),
            (T, 0, -1, ("contextual_width",)),
        )
        for name in names
    ),
    (V, {"width": 30}, "width to be a multiple of heads=4, got 30"),
    *((V, {"dropout": bad}, f"dropout in [0, 1), got {bad!r}") for bad in (1.0, -0.1, "much")),
    *((V, {"image_size": bad}, f"multiples of patch=4, got {bad}") for bad in (30, (32, 30), 0)),
    *((V, {"image_size": bad}, f"one whole number or two, got {bad}") for bad in (32.0, (8, 8, 8))),
    *((V, {"attention": kind(["cgp", "cgp"])}, "attention for 5 layers, got 2") for kind in (tuple, list)),
    *((V, {"attention": bad}, f"kind to be one of {', '.join(KINDS)}, got {bad!r}") for bad in ("cpg", 3)),
    (A, {"kind": "nothing"}, "got 'nothing'"),
    (A, {"options": {"dropout": 0.1}}, "sets dropout itself"),
    (A, {"options": {"num_heads": 2, "embed_dim": 8}}, "sets embed_dim, num_heads itself"),
    (lambda **o: vision(layer("cgp", **o)), {"num_inducing": 3}, "'cgp' attention does not take these"),
    (lambda **o: V.from_dict(o), {"colour": 1, "depht": 2}, "VisionConfig: colour, depht; known: attention"),
    (lambda **o: V.from_dict(o), {"attention": "cgp"}, "list of one entry per layer, got 'cgp'"),
    *(
        (lambda **o: V.from_dict(o | {"depth": 1}), {"attention": [bad]}, f"{ENTRIES}, got {bad}")
        for bad in ({"name": "cgp"}, {"kind": "cgp", "more": 1}, {"kind": "cgp", "options": 3})
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_refusals(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**options)


def test_one_attention_means_every_layer() -> None:
    config = VisionConfig(attention="softmax", depth=3)
    assert config.layers == config.attention == (AttentionConfig("softmax"),) * 3
    mixed = VisionConfig(attention=["softmax", layer("scgp")], depth=2)
    assert [(a.kind, a.regularizer) for a in mixed.layers] == [("softmax", "none"), ("scgp", "kl")]
    assert layer("cgp", regularizer="joint").regularizer == "joint"
    options = {"noise": 0.1}
    single = AttentionConfig("cgp", options)
    options["noise"] = 0.2  # options cannot be changed from outside
    assert single.options == {"noise": 0.1}


@every_layer
@pytest.mark.parametrize("config", [VisionConfig, TextConfig])
def test_round_trip_through_json(config: type[TransformerConfig], given: AttentionConfig) -> None:
    sizes: dict[str, Any] = (
        {"image_size": (8, 12), "channels": 1, "patch": 2} if config is VisionConfig else {}
    )
    layers = (given, "softmax")
    made = config(depth=2, width=16, heads=2, dropout=0.25, mlp_width=5, attention=layers, **sizes)
    again = config.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert again.layers[0].options == given.options
    assert {type(x) for x in again.layers[0].options.values()} <= {str, bool, int, float, tuple}
    if isinstance(again, VisionConfig):
        assert (again.sides, again.tokens) == ((8, 12), 24)


def check_equal(found: Transformer, saved: Transformer) -> None:
    ours, theirs = found.state_dict(), saved.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name].dtype != theirs[name].dtype] == []
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert found.config == saved.config


@every_layer
@pytest.mark.parametrize("make", [vision, text])
def test_everything_comes_back_bitwise(tmp_path: Path, make: Any, given: AttentionConfig) -> None:
    folder = tmp_path / "new" / "model"
    for dtype in (torch.float32, torch.float64):  # the second over the folder of the first
        model = make(given, dtype=dtype).train()
        model.save_pretrained(folder)
        loaded = type(model).from_pretrained(str(folder))
        check_equal(loaded, model)
        assert [module.training for module in loaded.modules()].count(True) == 0
        inputs = images(dtype=dtype) if make is vision else sentences(6, 3)
        expected = model.eval()(inputs).logits
        (folder / "model.safetensors").write_bytes(b"")  # a loaded model owns its memory
        assert torch.equal(loaded(inputs).logits, expected)
        trained = [p.requires_grad for p in model.parameters()]
        assert [p.requires_grad for p in loaded.parameters()] == trained


def test_files(tmp_path: Path) -> None:
    model = vision("cgp")
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    described = json.loads((tmp_path / "config.json").read_text())
    plain = json.loads(json.dumps(model.config.to_dict()))
    assert described == {"format_version": 1, "model": "VisionTransformer", "config": plain}
    (tmp_path / "fresh").touch()
    for path in tmp_path.iterdir():  # readable by whom other new files are
        assert path.stat().st_mode == (tmp_path / "fresh").stat().st_mode


@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_write_leaves_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    vision("cgp").save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls, replace = [], os.replace

    def fail(*args: Any) -> None:
        calls.append(args)
        if len(calls) == call:
            raise OSError("no space left")
        replace(*args)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        vision("cgp", seed=5, classes=4).save_pretrained(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()  # no temporary file is left
    assert after["config.json"] == before["config.json"]
    assert (after["model.safetensors"] == before["model.safetensors"]) == (call == 1)
    assert len(load_file(tmp_path / "model.safetensors")) == len(vision("cgp").state_dict())


TOO_LARGE: list[tuple[type[TransformerConfig], dict[str, Any]]] = [
    *((V, {name: 10**12}) for name in ("depth", "classes", "mlp_width")),
    *((T, {name: 10**12}) for name in ("vocabulary", "embedding_width", "contextual_width", "max_length")),
    (V, {"width": 4_000_000}),
    (V, {"channels": 10**9}),
    (V, {"image_size": 4 * 10**9}),
    (V, {"image_size": 10**9, "patch": 10**9}),
    (V, {"attention": layer("sgpa", num_inducing=100_000)}),
    (V, {"attention": layer("scgp", num_inducing=10**9)}),
    (V, {"attention": layer("scgp", num_inducing=(8, 10**9), inducing="pooled")}),
]


@pytest.mark.parametrize(("config", "options"), TOO_LARGE, ids=lambda x: str(x)[:60])
def test_models_that_no_memory_holds_are_refused_before_any_is_taken(
    config: type[TransformerConfig], options: dict[str, Any], folder: Path
) -> None:
    refusal = r"expected (\w+ of width .* at most 1e\+10 parameters|depth <= 10000|width to be at most \d+)"
    with pytest.raises(ValueError, match=refusal):
        config(**options)
    if config is VisionConfig and "attention" not in options:
        described = json.loads((folder / "config.json").read_text())
        described["config"].update(options)
        (folder / "config.json").write_text(json.dumps(described))
        refused(folder, ValueError, "config.json: expected ")


@every_layer
@pytest.mark.parametrize("make", [vision, text])
def test_the_limit_counts_every_parameter(
    make: Any, given: AttentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of just as many as allowed is made, of one more is not; attention is built without memory."""
    model = make(given, layer("softmax"))
    count = sum(parameter.numel() for parameter in model.parameters())
    plain, state = model.config.to_dict(), torch.get_rng_state()
    for limit in (count, count - 1):
        for module in (registry, config_module):
            monkeypatch.setattr(module, "MAX_PARAMETERS", limit)
        with nullcontext() if limit == count else pytest.raises(ValueError, match="parameters, got"):
            assert type(model.config).from_dict(plain) == model.config
    assert torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vision("cgp", dtype=torch.float32).save_pretrained(tmp_path)
    return tmp_path


def refused(
    folder: Path, error: type[Exception], *parts: str, model: type[Transformer] = VisionTransformer
) -> None:
    """Loading raises, and the message holds all the parts."""
    with pytest.raises(error) as raised:
        model.from_pretrained(folder)
    assert [part for part in parts if part not in str(raised.value)] == []


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_are_not_finite_are_refused_by_name(
    number: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = vision("cgp").to(dtype)
    name, parameter = list(model.named_parameters())[7]
    with torch.no_grad():
        parameter.view(-1)[1] = number
    model.save_pretrained(tmp_path)
    refused(
        tmp_path, ValueError, f"model.safetensors: expected finite numbers, got {number} in {name} (1 of "
    )


def test_weight_files_that_lie_or_are_cut_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = next(key for key in header if key != "__metadata__")

    def changed(**fields: Any) -> bytes:
        described = json.dumps({**header, name: {**header[name], **fields}}).encode()
        return len(described).to_bytes(8, "little") + described + body

    deep = b"[" * 5000
    for content in (
        *(changed(shape=shape) for shape in ([10**12], [2**63, 2], [-1])),
        *(changed(data_offsets=offsets) for offsets in ([0, 10**12], [8, 4])),
        *(changed(dtype=dtype) for dtype in ("F99", "F64")),
        (2**63).to_bytes(8, "little") + whole[8:],
        (10**9).to_bytes(8, "little") + whole[8:],
        len(deep).to_bytes(8, "little") + deep,
        *(whole[:keep] for keep in (0, 5, 100, -4, -1)),
        whole + b"more",
    ):
        file.write_bytes(content)
        refused(folder, ValueError, f"{file} is not a whole safetensors file")


def test_missing_files_and_another_class(folder: Path) -> None:
    message = "config.json: expected model 'TextTransformer', got 'VisionTransformer'"
    refused(folder, ValueError, str(folder), message, model=TextTransformer)
    refused(folder / "none", FileNotFoundError, f"no file {folder / 'none' / 'config.json'}")
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        refused(folder, FileNotFoundError, f"no file {folder / name}")


@pytest.mark.parametrize(("change", "message"), [
    ({"format_version": 2}, "expected format_version 1, got 2"),
    ({"author": "me"}, "expected a 'config' and no ['author']"),
    ({"config": {"depth": "2"}}, "depth to be a whole number >= 1, got '2'"),
    ({"config": {"attention": [{"kind": "cgp", "options": {"noise": -1}}], "depth": 1}}, "got -1"),
])  # fmt: skip
def test_defects_of_a_config(folder: Path, change: dict[str, Any], message: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(folder, ValueError, str(path), message)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[1]", b"3"])
def test_a_config_that_is_no_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    refused(folder, ValueError, str(folder / "config.json"))


def test_tensors_that_do_not_fit_the_config(folder: Path) -> None:
    path, name, head = folder / "model.safetensors", "blocks.1.attention.noise.raw", "head.weight"
    whole = load_file(path)
    for tensors, parts in (
        ({"w": torch.zeros(2)}, ("does not fit its config", "missing ['attend.weight'", "['w']")),
        ({n: x for n, x in whole.items() if n != name}, (f"missing ['{name}'], unexpected []",)),
        (whole | {"extra": torch.zeros(1)}, ("missing [], unexpected ['extra']",)),
        (whole | {head: torch.zeros(4, 16)}, ("expected head.weight of shape (3, 16), got (4, 16)",)),
        (whole | {head: torch.zeros(3, 16, dtype=torch.int64)}, ("floating-point numbers, got torch.int64",)),
    ):
        save_file(tensors, path)
        refused(folder, ValueError, str(path), *parts)
