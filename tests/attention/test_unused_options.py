"""Every option that is taken changes a result, a gradient or what is trained; the others are refused."""

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention.attention import attention_class, build_attention, cgp, gaussian, list_attention
from gpattention.attention.option_types import option_annotations
from gpattention.gp.sparse_kind import CONDITIONALS
from tests.attention.variants import EMBED, HEADS, SMALL, VARIANTS, Variant, build, needs, tokens

BOTH = (False, True)
WAYS = ("rows", "none")
KERNELS = ("rbf", "ard_rbf", "exp_dot")
MODES: dict[str, dict[str, tuple[Any, ...]]] = {
    "softmax": {"causal": BOTH},
    "softmax-gp": {"causal": BOTH},
    "kernel": {"kernel": KERNELS, "normalize": WAYS, "symmetric": BOTH, "causal": BOTH},
    "direct": {"normalize": WAYS, "regularizer": attention_class("direct").regularizers, "causal": BOTH},
    "cgp": {"normalize": WAYS, "regularizer": attention_class("cgp").regularizers, "causal": BOTH},
    "scgp": {"normalize": WAYS, "regularizer": ("kl", "jensen", "none"), "conditional": CONDITIONALS},
    "sgpa": {"kernel": KERNELS, "regularizer": ("kl", "none")},
}  # fmt: skip
OTHER: dict[str, Any] = {  # values that are no default
    "batch_first": False,
    "bias": False,
    "dropout": 0.5,
    "include_noise": None,  # the opposite of what the mode has
    "inducing": "pooled",
    "jitter": 1e-2,
    "latent_prior": "latent",
    "learn_noise": False,
    "learn_prior_scale": False,
    "learn_scale": False,
    "max_stddev": 0.05,  # the capped amplitudes are those of the tokens here
    "noise": 0.3,
    "num_inducing": 4,
    "observation_noise": 0.3,
    "prior_scale": 0.5,
    "regularizer_samples": 4,
    "scale": 1.7,
    "values": None,  # likewise
}


def modes(kind: str) -> list[dict[str, Any]]:
    axes = MODES[kind]
    found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    known = [mode for mode in found if not mode.get("causal") or mode.get("regularizer", "none") == "none"]
    return [{**SMALL.get(kind, {}), **mode} for mode in known]


def other(name: str, mode: dict[str, Any]) -> Any:
    if name == "include_noise":
        return mode["normalize"] == "rows"
    if name == "values":
        return "paper" if mode["normalize"] == "rows" else "dual"
    return OTHER[name]


def told(kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """All that a module tells, and the gradients of all that it trains, by name."""
    module = build(Variant(kind, kind, options), stir=0.0)
    with torch.no_grad():
        for at, (name, x) in enumerate(sorted(module.named_parameters())):
            if not name.endswith("raw"):  # those are what some options say
                g = torch.Generator().manual_seed(at)
                x.add_(0.2 * torch.randn(x.shape, generator=g, dtype=x.dtype))
    module.train(bool(options.get("dropout")))
    g = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    asked = module(tokens(), need=needs(module), generator=g)
    found = {name: getattr(asked, name) for name in needs(module)}
    loss = torch.stack([x.square().sum() for x in found.values()]).sum()
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    found |= {f"gradient of {name}": x for name, x in zip(parameters, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def is_refused(kind: str, options: dict[str, Any], name: str) -> bool:
    try:
        build_attention(kind, embed_dim=EMBED, num_heads=HEADS, **options)
    except ValueError as error:
        if re.match(
            f"expected {name} to be .*, its default, .* since it would have no effect, got", str(error)
        ):
            return True
        raise
    return False


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("kind", list(MODES))
def test_each_option_has_an_effect_or_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = sorted(
        set(option_annotations(attention_class(kind))) - set(MODES[kind]) - {"device", "dtype", "regularizer"}
    )
    for mode in modes(kind):
        plain = told(kind, mode)
        for name in asked:
            options = {**mode, name: other(name, mode)}
            refused = is_refused(kind, options, name)
            with monkeypatch.context() as let:
                for module in (gaussian, cgp):
                    let.setattr(module, "refuse_unused", lambda *_, **__: None)
                assert alike(told(kind, options), plain) == refused, (mode, name)


def test_every_kind_is_asked() -> None:
    assert tuple(sorted(MODES)) == list_attention()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (kind, {"normalize": "none", name: value}, f"{name} to be {usual}, .* is 'none', .* got {value}")
        for kind in ("direct", "cgp", "scgp")
        for name, value, usual in (
            ("prior_scale", 0.5, 0.2),
            ("learn_prior_scale", False, True),
            ("max_stddev", 20.0, 2.0),
        )
    ),
    *(
        (kind, {name: value}, f"{name} to be {usual}, .* unless normalize is 'none', .* got {value}")
        for kind in ("direct", "cgp", "scgp")
        for name, value, usual in (("scale", 2.0, 1.0), ("learn_scale", False, True))
    ),
    *(
        ("cgp", {"regularizer": name, "regularizer_samples": 5}, "to be 1, .* 'monte_carlo', .* got 5")
        for name in ("kl", "marginal", "jensen", "joint", "none")
    ),
    *(
        ("cgp", {"regularizer": name, "latent_prior": "latent"}, f"'noisy', .* is '{name}', .* got 'latent'")
        for name in ("kl", "none")
    ),
    ("cgp", {"regularizer": "none", "observation_noise": 0.0}, "noise to be None, .* is 'none', .* got 0.0"),
    ("cgp", {"causal": True, "observation_noise": 0.0}, r"is 'none' \(causal attention's\), .* got 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_the_refusal_names_option_mode_and_value(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(kind, embed_dim=EMBED, num_heads=HEADS, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["direct", "cgp", "scgp"])
def test_defaults_written_out_are_no_mistake(kind: str, way: str) -> None:
    usual = {
        "scale": 1.0,
        "learn_scale": True,
        "prior_scale": 0.2,
        "learn_prior_scale": True,
        "max_stddev": 2,
    }
    build_attention(kind, embed_dim=EMBED, num_heads=HEADS, normalize=way, **usual)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_parameter_is_used(variant: Variant) -> None:
    module = build(variant)
    asked = module(tokens(), need=needs(module))
    loss = torch.stack([getattr(asked, name).square().sum() for name in needs(module)]).sum()
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    assert [name for name, x in zip(parameters, gradients, strict=True) if x is None] == []


@pytest.mark.parametrize("kernel", ["ard_rbf", "exp_dot"])
def test_the_variance_of_normalised_rows_is_kept_but_not_trained(kernel: str) -> None:
    """The tensors of a model saved with it as a parameter still have their places."""
    rows, plain = (build(Variant("", "kernel", {"kernel": kernel, "normalize": way})) for way in WAYS)
    assert rows.state_dict().keys() == plain.state_dict().keys()
    assert set(dict(plain.named_parameters())) - set(dict(rows.named_parameters())) == {"variance.raw"}
    rows.load_state_dict(plain.state_dict())
    assert torch.equal(rows.variance(), plain.variance().detach())
