"""A conversion that is refused, or fails anywhere on its way, leaves the model as it was."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import gpattention
from gpattention.adopt import convert as converting
from gpattention.adopt import convert_huggingface, convert_own, convert_timm, convert_torch
from gpattention.gp import NumericalError
from tests.adopt.hosts import HOSTS, Host, make
from tests.adopt.test_convert_families import logits

TABLES = [name for name, value in nn.Module().__dict__.items() if isinstance(value, dict | set)]


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a module is but the values of its weights: identities, attributes, tables, configs."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = module.__dict__
        found[f"{name} itself"] = (id(module), type(module))
        found[f"{name} attributes"] = {key: id(value) for key, value in own.items()}
        found[f"{name} plain"] = {k: v for k, v in own.items() if isinstance(v, bool | int | float | str)}
        for table in TABLES:
            content = own[table]
            content = {k: id(v) for k, v in content.items()} if isinstance(content, dict) else set(content)
            found[f"{name} {table}"] = list(content.items()) if isinstance(content, dict) else content
        config = own.get("config")
        found[f"{name} config"] = deepcopy(getattr(config, "__dict__", None))
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def check_undone(
    host: Host, error: type[BaseException], match: str | None, during: Callable[[], Any]
) -> None:
    host.model.eval()
    answers, before, tensors = logits(host), state(host.model), weights(host.model)
    generator = torch.random.get_rng_state()
    with pytest.raises(error, match=match):
        during()
    assert state(host.model) == before
    assert all(torch.equal(x, tensors[name]) for name, x in host.model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert gpattention.conversion_of(host.model) is None
    assert torch.equal(logits(host), answers)


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"kind": "softmax"}, "expected kind"),
    ({"draw": "joint"}, "expected draw"),
    ({"seed": 0.5}, "expected seed"),
    ({"causal": True}, "the host decides"),
    ({"nonsense": 1}, None),
    ({"noise": -1.0}, None),
    ({"noise": "much"}, None),
    ({"normalize": "columns"}, None),
    ({"regularizer": "nonsense"}, None),
    ({"kind": "scgp", "num_inducing": 0}, None),
    ({"kind": "sgpa", "num_inducing": -2}, None),
    ({"layers": ["nowhere"]}, "expected layers"),
    ({"layers": []}, "none to convert"),
    ({"example": {}}, None),
]


@pytest.mark.parametrize("family", HOSTS)
def test_refusals_change_nothing(family: str) -> None:
    host = make(family)
    for arguments, match in REFUSED:
        check_undone(
            host, ValueError, match, lambda given=arguments: gpattention.convert(host.model, **given)
        )


@pytest.mark.parametrize("family", HOSTS)
def test_examples_that_the_host_does_not_take_change_nothing(family: str) -> None:
    host = make(family)

    def convert() -> None:
        gpattention.convert(host.model, "cgp", example=torch.zeros(2, 3, 1, 1, 1))

    check_undone(host, Exception, None, convert)


STEPS = {
    "place": [
        (convert_torch, "place"),
        (convert_timm, "place"),
        (convert_own, "place"),
        (convert_huggingface, "place"),
        (convert_own, "warm_start"),
    ],
    "finish": [(convert_huggingface, "finish"), (converting, "_keep_record"), (convert_own, "warm_start")],
    "hook": [(nn.Module, "register_forward_pre_hook"), (nn.Module, "register_forward_hook")],
    "example": [(converting, "_place_inducing")],
}


@pytest.mark.parametrize("error", [ValueError, NumericalError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", [name for name in HOSTS if "exp_dot" not in name])  # no kind takes those
def test_failures_on_the_way_change_nothing(
    family: str, step: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make(family)
    for holder, name in STEPS[step]:
        original, calls = getattr(holder, name), []

        def fails(*args: Any, original: Any = original, calls: list[int] = calls, **kwargs: Any) -> Any:
            calls.append(1)
            done = original(*args, **kwargs)  # after it changed what it changes
            if step != "place" or len(calls) == host.sites or original.__name__ == "warm_start":
                raise error("on the way")
            return done

        monkeypatch.setattr(holder, name, fails)
    check_undone(
        host, error, "on the way", lambda: gpattention.convert(host.model, "cgp", example=host.inputs)
    )
    monkeypatch.undo()
    gpattention.convert(host.model, "cgp", example=host.inputs)
    assert torch.isfinite(logits(host)).all()


def test_hooks_can_be_removed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    host = make("encoder")
    attention = host.model.get_submodule("encoder.layers.0.self_attn")
    calls: list[int] = []
    kept = attention.register_forward_pre_hook(lambda *_: calls.append(1))

    def fails(*_: object) -> None:
        raise ValueError("on the way")

    monkeypatch.setattr(converting, "_place_inducing", fails)
    check_undone(host, ValueError, "on the way", lambda: gpattention.convert(host.model, example=host.inputs))
    assert calls
    kept.remove()
    calls.clear()
    logits(host)
    assert not calls


def pyramid() -> Host:
    """Three of its four layers merge their tokens before they make keys of them."""
    import transformers

    config = transformers.SegformerConfig(
        num_labels=3, hidden_sizes=[16] * 4, num_attention_heads=[2] * 4, depths=[1] * 4
    )  # fmt: skip
    model = transformers.SegformerForImageClassification(config)
    return Host(model, {"pixel_values": torch.randn(2, 3, 32, 32)}, 4)


@pytest.mark.parametrize("kind", ["cgp", "direct", "scgp", "softmax-gp", "kernel", "sgpa"])
def test_attention_to_merged_tokens_is_refused_before_anything_is_changed(kind: str) -> None:
    torch.manual_seed(0)
    host = pyramid()
    for example in (None, host.inputs):
        check_undone(
            host, ValueError, "keys of fewer tokens, which sequence_reduction",
            lambda x=example: gpattention.convert(host.model, kind, example=x),
        )  # fmt: skip
    whole = [site.name for site in gpattention.find_sites(host.model).sites][-1:]  # merges no tokens
    gpattention.convert(host.model, kind, layers=whole, example=host.inputs)
    assert torch.isfinite(logits(host)).all()
