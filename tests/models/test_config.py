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
from safetensors.torch import load_file, save

from gpattention.attention import base
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
from tests.refusals import refusals

LAYERS = [
    *(layer(kind) for kind in KINDS),
    layer("kernel", kernel="ard_rbf", symmetric=True, normalize="none"),
    layer("cgp", causal=True, learn_noise=False, noise=0.05, normalize="none", scale=1.5),
    layer("cgp", regularizer="jensen", latent_prior="latent", observation_noise=0.0, max_stddev=3.0),
    layer("direct", bias=False, prior_scale=0.4, learn_prior_scale=False),
    layer("scgp", num_inducing=(4, 3), inducing="pooled", values="dual", conditional="independent"),
    layer("scgp", include_noise=True),
    layer("scgp", exact_when_shorter=True),
    layer("scgp", num_inducing=[4, 3], regularizer="dtc"),
    layer("sgpa", kernel="exp_dot", jitter=1e-5),
]
every_layer = pytest.mark.parametrize("given", LAYERS, ids=lambda x: f"{x.kind} {' '.join(x.options)}")

V, T, A = VisionConfig, TextConfig, AttentionConfig


def row(make: Callable[..., Any], field: str, bad: Any, got: str | None = None) -> tuple[Any, str, str]:
    """A field with a value that is refused."""
    return lambda: make(**{field: bad}), field, re.escape(repr(bad) if got is None else got)


test_refusals = refusals([
    *(row(V, name, 0) for name in ("classes", "mlp_width", "channels", "patch")),
    *(row(T, name, 0) for name in ("embedding_width", "max_length")),
    row(V, "depth", 2.0), row(V, "heads", True), row(T, "vocabulary", 1), row(T, "contextual_width", -1),
    row(V, "width", 30), *(row(V, "dropout", bad) for bad in (1.0, -0.1, "much")),
    *(row(V, "image_size", bad) for bad in (30, (32, 30), 0, 32.0, (8, 8, 8))),
    *(row(V, "attention", kind(["cgp", "cgp"]), "got 2") for kind in (tuple, list)),
    *((lambda bad=bad: V(attention=bad), "kind", f"got {bad!r}") for bad in ("cpg", 3)),
    row(A, "kind", "nothing"), (lambda: A(options={"dropout": 0.1}), "dropout", "options"),
    (lambda: A(options={"num_heads": 2, "embed_dim": 8}), "embed_dim, num_heads", "options"),
    (lambda: vision(layer("cgp", num_inducing=3)), "'cgp'", "num_inducing"),
    (lambda: V.from_dict({"colour": 1, "depht": 2}), "'colour' in VisionConfig", "known: attention"),
    (lambda: V.from_dict({"attention": "cgp"}), "attention", "got 'cgp'"),
    *(
        (lambda bad=bad: V.from_dict({"depth": 1, "attention": [bad]}), "'options'", re.escape(f"got {bad}"))
        for bad in ({"name": "cgp"}, {"kind": "cgp", "more": 1}, {"kind": "cgp", "options": 3})
    ),
])  # fmt: skip


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
    config: type[TransformerConfig], options: dict[str, Any]
) -> None:
    refusal = r"expected (\w+ of width .* at most 1e\+10 parameters|depth <= 10000|width to be at most \d+)"
    with pytest.raises(ValueError, match=refusal):
        config(**options)


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
        for module in (base, config_module):
            monkeypatch.setattr(module, "MAX_PARAMETERS", limit)
        with nullcontext() if limit == count else pytest.raises(ValueError, match="parameters, got"):
            assert type(model.config).from_dict(plain) == model.config
    assert torch.equal(torch.get_rng_state(), state)


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
    with pytest.raises(ValueError, match=rf"model.safetensors: .* got {number} in {name} \(1 of "):
        VisionTransformer.from_pretrained(tmp_path)


WEIGHTS = "model.safetensors"
NOISE, HEAD = "blocks.1.attention.noise.raw", "head.weight"


def stored(folder: Path) -> Path:
    vision("cgp", dtype=torch.float32).save_pretrained(folder)
    return folder


def written(folder: Path, name: str, content: bytes) -> Transformer:
    """Loading a folder one of whose files holds something else."""
    (stored(folder) / name).write_bytes(content)
    return VisionTransformer.from_pretrained(folder)


def described(folder: Path, **change: Any) -> Transformer:
    whole = json.loads((stored(folder) / "config.json").read_text())
    return written(folder, "config.json", json.dumps(whole | change).encode())


def tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> Transformer:
    whole = load_file(stored(folder) / WEIGHTS)
    return written(folder, WEIGHTS, save(change(whole)))


def without(folder: Path, *names: str) -> Transformer:
    stored(folder)
    for name in names:
        (folder / name).unlink()
    return VisionTransformer.from_pretrained(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return (stored(tmp_path_factory.mktemp("whole")) / WEIGHTS).read_bytes()


def test_weight_files_that_lie_or_are_cut_are_refused(whole: bytes, tmp_path: Path) -> None:
    size = int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = next(key for key in header if key != "__metadata__")

    def changed(**fields: Any) -> bytes:
        false = json.dumps({**header, name: {**header[name], **fields}}).encode()
        return len(false).to_bytes(8, "little") + false + body

    deep = b"[" * 5000
    for content in (
        *(changed(shape=shape) for shape in ([10**12], [2**63, 2], [-1])),
        *(changed(data_offsets=offsets) for offsets in ([0, 10**12], [8, 4])),
        *(changed(dtype=dtype) for dtype in ("F99", "F64")),
        *(length.to_bytes(8, "little") + whole[8:] for length in (2**63, 10**9)),
        len(deep).to_bytes(8, "little") + deep,
        *(whole[:keep] for keep in (0, 5, 100, -4, -1)),
        whole + b"more",
    ):
        with pytest.raises(ValueError, match=f"{tmp_path / WEIGHTS} is not a whole safetensors file"):
            written(tmp_path, WEIGHTS, content)


test_defects_of_folders = refusals([
    (lambda f: TextTransformer.from_pretrained(stored(f)), "config.json.*model", "got 'VisionTransformer'"),
    (lambda f: described(f, format_version=2), "config.json.*format_version", "got 2"),
    (lambda f: described(f, author="me"), "config", r"\['author'\]"),
    (lambda f: described(f, config={"depth": "2"}), "config.json.*depth", "got '2'"),
    (
        lambda f: described(f, config={"attention": [{"kind": "cgp", "options": {"noise": -1}}], "depth": 1}),
        "config.json", "got -1",
    ),
    (lambda f: described(f, config={"depth": 10**12}), "config.json.*depth", "10000"),
    *((lambda f, c=c: written(f, "config.json", c), "config.json", "") for c in (b"", b"{", b"\xff", b"[1]")),
    (lambda f: tensors(f, lambda x: {"w": torch.zeros(2)}), "safetensors.*attend.weight", '"w"'),
    (lambda f: tensors(f, lambda x: {n: y for n, y in x.items() if n != NOISE}), "does not fit", NOISE),
    (lambda f: tensors(f, lambda x: x | {"extra": torch.zeros(1)}), "does not fit", "extra"),
    (lambda f: tensors(f, lambda x: x | {HEAD: torch.zeros(4, 16)}), HEAD, r"\[4, 16\].*\[3, 16\]"),
    (lambda f: tensors(f, lambda x: x | {HEAD: torch.zeros(3, 16).long()}), HEAD, "got torch.int64"),
])  # fmt: skip
test_missing_files = refusals([
    (lambda f: VisionTransformer.from_pretrained(f / "none"), "no file", "none/config.json"),
    (lambda f: without(f, WEIGHTS), "no file", WEIGHTS),
    (lambda f: without(f, WEIGHTS, "config.json"), "no file", "config.json"),
], FileNotFoundError)  # fmt: skip
