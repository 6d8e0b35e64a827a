"""Configs and model folders: what is refused, and that everything comes back as it was written."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpattention.attention import registry
from gpattention.models import (
    AttentionConfig,
    TextConfig,
    Transformer,
    TransformerConfig,
    VisionConfig,
    VisionTransformer,
)
from gpattention.models import config as config_module
from tests.models.small_models import KINDS, attentions, images, layer, sentences, text, vision

LAYERS = [
    *(layer(kind) for kind in KINDS),
    layer("kernel", kernel="ard_rbf", symmetric=True, normalize="none"),
    layer("cgp", causal=True, learn_noise=False, noise=0.05, normalize="none", scale=1.5),
    layer("cgp", regularizer="jensen", latent_prior="latent", observation_noise=0.0, max_stddev=3.0),
    layer("direct", bias=False, prior_scale=0.4, learn_prior_scale=False),
    layer(
        "scgp",
        num_inducing=(4, 3),
        inducing="pooled",
        values="dual",
        include_noise=True,
        conditional="independent",
    ),
    layer("scgp", num_inducing=[4, 3], regularizer="dtc"),
    layer("sgpa", kernel="exp_dot", jitter=1e-5),
]
every_layer = pytest.mark.parametrize("given", LAYERS, ids=lambda x: f"{x.kind} {' '.join(x.options)}")
both_models = pytest.mark.parametrize("make", [vision, text])


class TestConfig:
    @pytest.mark.parametrize(
        ("config", "options", "message"),
        [
            (VisionConfig, {"classes": 0}, "expected classes to be a whole number >= 1, got 0"),
            (VisionConfig, {"depth": 2.0}, "expected depth to be a whole number >= 1, got 2.0"),
            (VisionConfig, {"heads": True}, "expected heads to be a whole number >= 1, got True"),
            (VisionConfig, {"width": 30}, "expected width to be a multiple of heads=4, got 30"),
            (VisionConfig, {"mlp_width": 0}, "expected mlp_width to be a whole number >= 1, got 0"),
            (VisionConfig, {"dropout": 1.0}, "expected dropout in [0, 1), got 1.0"),
            (VisionConfig, {"dropout": -0.1}, "expected dropout in [0, 1), got -0.1"),
            (VisionConfig, {"dropout": "much"}, "expected dropout in [0, 1), got 'much'"),
            (VisionConfig, {"channels": 0}, "expected channels to be a whole number >= 1, got 0"),
            (VisionConfig, {"patch": 0}, "expected patch to be a whole number >= 1, got 0"),
            (VisionConfig, {"image_size": 30}, "expected image_size to be multiples of patch=4, got 30"),
            (VisionConfig, {"image_size": (32, 30)}, "to be multiples of patch=4, got (32, 30)"),
            (VisionConfig, {"image_size": 0}, "expected image_size to be multiples of patch=4, got 0"),
            (
                VisionConfig,
                {"image_size": 32.0},
                "expected image_size to be one whole number or two, got 32.0",
            ),
            (VisionConfig, {"image_size": (8, 8, 8)}, "to be one whole number or two, got (8, 8, 8)"),
            (VisionConfig, {"attention": ("cgp", "cgp")}, "expected attention for 5 layers, got 2"),
            (VisionConfig, {"attention": ["cgp", "cgp"]}, "expected attention for 5 layers, got 2"),
            (VisionConfig, {"attention": "cpg"}, "expected kind to be one of cgp, direct, kernel"),
            (VisionConfig, {"attention": "cpg"}, "got 'cpg'"),
            (VisionConfig, {"attention": 3}, "scgp, sgpa, softmax, softmax-gp, got 3"),
            (TextConfig, {"vocabulary": 1}, "expected vocabulary to be a whole number >= 2, got 1"),
            (TextConfig, {"embedding_width": 0}, "expected embedding_width to be a whole number >= 1, got 0"),
            (TextConfig, {"contextual_width": -1}, "expected contextual_width to be a whole number >= 0"),
            (TextConfig, {"max_length": 0}, "expected max_length to be a whole number >= 1, got 0"),
            (AttentionConfig, {"kind": "nothing"}, "got 'nothing'"),
            (AttentionConfig, {"options": {"dropout": 0.1}}, "the model sets dropout itself"),
            (
                AttentionConfig,
                {"options": {"num_heads": 2, "embed_dim": 8}},
                "sets embed_dim, num_heads itself",
            ),
        ],
    )
    def test_errors(self, config: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            config(**options)

    def test_options_are_refused_when_the_model_is_made(self) -> None:
        with pytest.raises(ValueError, match=r"'cgp' attention does not take these options.*num_inducing"):
            vision(layer("cgp", num_inducing=3))

    def test_one_attention_means_every_layer(self) -> None:
        config = VisionConfig(attention="softmax", depth=3)
        assert config.layers == config.attention == (AttentionConfig("softmax"),) * 3
        mixed = VisionConfig(attention=["softmax", layer("scgp")], depth=2)
        assert [a.kind for a in mixed.layers] == ["softmax", "scgp"]
        assert mixed.layers[0].regularizer == "none"
        assert mixed.layers[1].regularizer == "kl"
        assert layer("cgp", regularizer="joint").regularizer == "joint"

    def test_options_cannot_be_changed_from_outside(self) -> None:
        options = {"noise": 0.1}
        config = AttentionConfig("cgp", options)
        options["noise"] = 0.2
        assert config.options == {"noise": 0.1}

    @every_layer
    @pytest.mark.parametrize("config", [VisionConfig, TextConfig])
    def test_round_trip_through_json(self, config: type[TransformerConfig], given: AttentionConfig) -> None:
        made = config(depth=2, width=16, heads=2, dropout=0.25, mlp_width=5, attention=(given, "softmax"))
        again = config.from_dict(json.loads(json.dumps(made.to_dict())))
        assert again == made
        assert again.layers[0].options == given.options
        assert {type(x) for x in again.layers[0].options.values()} <= {str, bool, int, float, tuple}

    def test_round_trip_of_sizes(self) -> None:
        made = VisionConfig(image_size=(8, 12), channels=1, patch=2)
        assert VisionConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
        assert (made.sides, made.tokens) == ((8, 12), 24)

    @pytest.mark.parametrize(
        ("plain", "message"),
        [
            (
                {"colour": 1, "depht": 2},
                "unknown keys in VisionConfig: colour, depht; known: attention, channels",
            ),
            (
                {"attention": [{"name": "cgp"}]},
                "expected attention entries with 'kind' and 'options', got {'name'",
            ),
            (
                {"attention": [{"kind": "cgp", "more": 1}]},
                "expected attention entries with 'kind' and 'options'",
            ),
            (
                {"attention": "cgp"},
                "expected attention to be a list of one entry per layer, got 'cgp'",
            ),
            (
                {"attention": [{"kind": "cgp", "options": 3}], "depth": 1},
                "with 'kind' and 'options', got {'kind'",
            ),
        ],
    )
    def test_errors_of_from_dict(self, plain: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            VisionConfig.from_dict(plain)


def check_equal(found: Transformer, saved: Transformer) -> None:
    ours, theirs = found.state_dict(), saved.state_dict()
    assert list(ours) == list(theirs)
    assert [name for name in ours if ours[name].dtype != theirs[name].dtype] == []
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert found.config == saved.config


class TestFolder:
    @every_layer
    @both_models
    def test_everything_comes_back_bitwise(self, tmp_path: Path, make: Any, given: AttentionConfig) -> None:
        for number, dtype in enumerate((torch.float32, torch.float64)):
            model = make(given, dtype=dtype).train()
            model.save_pretrained(tmp_path / "new" / str(number))
            loaded = type(model).from_pretrained(str(tmp_path / "new" / str(number)))
            check_equal(loaded, model)
            assert [module.training for module in loaded.modules()].count(True) == 0
            inputs = images(dtype=dtype) if make is vision else sentences(6, 3)
            assert torch.equal(loaded(inputs).logits, model.eval()(inputs).logits)
            trained = [p.requires_grad for p in model.parameters()]
            assert [p.requires_grad for p in loaded.parameters()] == trained

    def test_files(self, tmp_path: Path) -> None:
        model = vision("cgp")
        model.save_pretrained(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
        described = json.loads((tmp_path / "config.json").read_text())
        assert described == {"format_version": 1, "model": "VisionTransformer", "config": plain(model)}
        (tmp_path / "fresh").touch()
        for path in tmp_path.iterdir():  # readable by whom other new files are
            assert path.stat().st_mode == (tmp_path / "fresh").stat().st_mode

    def test_saving_over_an_old_folder(self, tmp_path: Path) -> None:
        vision("cgp").save_pretrained(tmp_path)
        newer = vision("scgp", seed=5)
        newer.save_pretrained(tmp_path)
        check_equal(VisionTransformer.from_pretrained(tmp_path), newer)

    def test_a_loaded_model_owns_its_memory(self, tmp_path: Path) -> None:
        model = vision("cgp")
        model.save_pretrained(tmp_path)
        loaded = VisionTransformer.from_pretrained(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with torch.no_grad():
            model.head.weight.zero_()
        assert torch.equal(loaded.norm.weight, model.norm.weight)
        assert loaded.head.weight.count_nonzero() > 0

    @pytest.mark.parametrize("call", [1, 2])
    def test_a_failed_write_leaves_whole_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
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

    def test_a_config_that_is_no_json_writes_nothing(self, tmp_path: Path) -> None:
        model = vision("cgp")
        object.__setattr__(
            model.config, "dropout", torch.float32
        )  # stands for an option of a kind of one's own
        with pytest.raises(TypeError, match="not JSON serializable"):
            model.save_pretrained(tmp_path)
        assert list(tmp_path.iterdir()) == []


def plain(model: Transformer) -> dict[str, Any]:
    return json.loads(json.dumps(model.config.to_dict()))


def test_buffers_of_fixed_noise_are_stored(tmp_path: Path) -> None:
    model = vision(layer("cgp", learn_noise=False))
    attentions(model)[0].noise.set(0.33)
    model.save_pretrained(tmp_path)
    found = attentions(VisionTransformer.from_pretrained(tmp_path))[0].noise()
    assert torch.allclose(found, torch.full((2,), 0.33, dtype=torch.float64))


TOO_LARGE: list[tuple[type[TransformerConfig], dict[str, Any]]] = [
    (VisionConfig, {"width": 4_000_000}),
    (TextConfig, {"width": 4_000_000}),
    (VisionConfig, {"depth": 10**12}),
    (VisionConfig, {"classes": 10**12}),
    (VisionConfig, {"mlp_width": 10**12}),
    (VisionConfig, {"channels": 10**9}),
    (VisionConfig, {"image_size": 4 * 10**9}),
    (VisionConfig, {"image_size": (4, 4 * 10**9)}),
    (VisionConfig, {"image_size": 10**9, "patch": 10**9}),
    (TextConfig, {"vocabulary": 10**12}),
    (TextConfig, {"embedding_width": 10**12}),
    (TextConfig, {"contextual_width": 10**12}),
    (TextConfig, {"max_length": 10**12}),
    (VisionConfig, {"width": 10**30, "heads": 1}),
    (VisionConfig, {"attention": layer("sgpa", num_inducing=100_000)}),
    (VisionConfig, {"attention": layer("sgpa", num_inducing=10**18)}),
    (VisionConfig, {"attention": layer("scgp", num_inducing=10**9)}),
    (VisionConfig, {"attention": layer("scgp", num_inducing=(8, 10**9), inducing="pooled")}),
]


@pytest.mark.parametrize(("config", "options"), TOO_LARGE, ids=lambda x: str(x)[:60])
def test_models_that_no_memory_holds_are_refused_before_any_is_taken(
    config: type[TransformerConfig], options: dict[str, Any], tmp_path: Path
) -> None:
    refusal = r"expected (\w+ of width .* at most 1e\+10 parameters|depth <= 10000|width to be at most \d+)"
    with pytest.raises(ValueError, match=refusal):
        config(**options)
    if config is VisionConfig and "attention" not in options:
        vision("softmax").save_pretrained(tmp_path)
        told = json.loads((tmp_path / "config.json").read_text())
        told["config"].update(options)
        (tmp_path / "config.json").write_text(json.dumps(told))
        with pytest.raises(ValueError, match=r"config\.json: expected "):
            VisionTransformer.from_pretrained(tmp_path)


@every_layer
@pytest.mark.parametrize("kind", ["vision", "text"])
def test_the_limit_counts_every_parameter(
    kind: str, given: AttentionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of just as many as allowed is made, of one more is not; attention is built without memory."""
    model = (vision if kind == "vision" else text)(given, layer("softmax"))
    count = sum(parameter.numel() for parameter in model.parameters())
    plain = model.config.to_dict()
    state = torch.get_rng_state()
    for limit in (count, count - 1):
        for module in (registry, config_module):
            monkeypatch.setattr(module, "MAX_PARAMETERS", limit)
        if limit == count:
            assert type(model.config).from_dict(plain) == model.config
        else:
            with pytest.raises(ValueError, match="parameters, got"):
                type(model.config).from_dict(plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_large_models_that_can_be_meant_are_not_refused() -> None:
    VisionConfig(width=8192, depth=12, heads=8)  # 5.6e9
    VisionConfig(attention=layer("scgp", num_inducing=10_000))
    VisionConfig(attention=layer("sgpa", num_inducing=1000))


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
    told = f"got {number} in {re.escape(name)}"
    with pytest.raises(ValueError, match=rf"model\.safetensors: expected finite numbers, {told} \(1 of \d+ "):
        VisionTransformer.from_pretrained(tmp_path)


def test_headers_that_lie_are_refused(tmp_path: Path) -> None:
    vision("softmax").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, body = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    name = next(key for key in header if key != "__metadata__")

    def changed(**fields: Any) -> bytes:
        told = json.dumps({**header, name: {**header[name], **fields}}).encode()
        return len(told).to_bytes(8, "little") + told + body

    deep = b"[" * 5000
    for content in (
        changed(shape=[10**12]),
        changed(shape=[2**63, 2]),
        changed(data_offsets=[0, 10**12]),
        changed(data_offsets=[8, 4]),
        changed(dtype="F99"),
        changed(dtype="F32"),
        changed(shape=[-1]),
        (2**63).to_bytes(8, "little") + whole[8:],
        (10**9).to_bytes(8, "little") + whole[8:],
        len(deep).to_bytes(8, "little") + deep,
        b"",
        whole[:-4],
        whole + b"more",
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
            VisionTransformer.from_pretrained(tmp_path)
