"""Options of kinds: each is used or refused by name, and a constructor's own mistakes stay as they are."""

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from gpattention.attention import (
    Attention,
    CGPAttention,
    attention_class,
    build_attention,
    cgp,
    gaussian,
    kep_svgp,
    list_attention,
)
from gpattention.attention.base import make_attention, option_annotations
from gpattention.gp.sparse import CONDITIONALS
from tests.attention.variants import EMBED, HEADS, SMALL, VARIANTS, Variant, build, needs, tokens

SIZES: dict[str, int] = {"embed_dim": 8, "num_heads": 2}


class Broken(CGPAttention):
    """Its constructor has a bug that its caller cannot help."""

    def __init__(self, embed_dim: int, num_heads: int, *, power: float = 1.0, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, **options)
        self.power = power + None  # type: ignore[operator]


class Popping(CGPAttention):
    """Takes an option that no signature shows."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        self.shown = options.pop("hidden")
        super().__init__(embed_dim, num_heads, **options)


class Closed(CGPAttention):
    """Hands nothing up, and needs something."""

    def __init__(self, embed_dim: int, num_heads: int, *, rank: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.rank = rank


def make(cls: type[Attention], **options: Any) -> Attention:
    return make_attention(cls, "mine", 8, 2, options)


def test_an_unknown_option_is_named_beside_those_of_all_constructors_above() -> None:
    with pytest.raises(ValueError, match=r"options: unknown 'nosie' \(did you mean 'noise'\?\); ") as refused:
        build_attention("cgp", **SIZES, nosie=0.1, dropout=0.1)
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert {"bias", "dropout", "latent_prior", "noise", "normalize"} <= set(known)
    assert not {"self", "embed_dim", "num_heads", "options"} & set(known)
    assert isinstance(refused.value.__cause__, TypeError)


def test_a_mistake_inside_a_constructor_is_not_hidden() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as failure:
        make(Broken, power=2.0, noise=0.1)
    assert failure.traceback[-1].name == "__init__"
    assert failure.traceback[-1].path.name == "test_registry.py"


def test_annotations_that_cannot_be_read_are_not_checked() -> None:
    class Unreadable(Closed):
        pass

    def constructor(self: Closed, embed_dim: int, num_heads: int, *, rank: int) -> None:
        Closed.__init__(self, embed_dim, num_heads, rank=rank)

    constructor.__annotations__["rank"] = "OnlyForTypeCheckers"
    Unreadable.__init__ = constructor  # type: ignore[assignment, method-assign]
    assert make(Unreadable, rank="any").rank == "any"


def test_what_a_constructor_takes_by_other_ways_is_let_through() -> None:
    assert make(Popping, hidden=3, noise=0.1).shown == 3


@pytest.mark.parametrize(
    ("options", "message"), [({}, "missing a required .*'rank'"), ({"rank": 1, "noise": 1}, "'noise'")]
)
def test_a_signature_that_hands_nothing_up_is_the_last_word(options: dict[str, int], message: str) -> None:
    assert make(Closed, rank=1).rank == 1
    with pytest.raises(ValueError, match=f"'mine' attention does not take these options: .*{message}"):
        make(Closed, **options)


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
    "kep-svgp": {"merge": ("sum",), "regularizer": attention_class("kep-svgp").regularizers},
}  # fmt: skip
OTHER: dict[str, Any] = {  # values that are no default; with max_stddev 0.05 amplitudes are capped here
    "batch_first": False, "bias": False, "dropout": 0.5, "eta_kl": 0.5, "eta_ksvd": 3.0,
    "inducing": "pooled", "jitter": 1e-2,
    "latent_prior": "latent", "learn_noise": False, "learn_prior_scale": False, "learn_scale": False,
    "max_stddev": 0.05, "noise": 0.3, "num_inducing": 4, "observation_noise": 0.3, "prior_scale": 0.5,
    "rank": 2, "regularizer_samples": 4, "scale": 1.7, "tokens": 4,
}  # fmt: skip


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


def results(kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """All that a module returns, and the gradients of all that it trains, by name."""
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
        value = re.escape(repr(options[name]))
        if not re.match(f"expected {name} to be .*, its default, .* no effect, got {value}$", str(error)):
            raise
        return True
    return False


def alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


@pytest.mark.parametrize("kind", list(MODES))
def test_each_option_has_an_effect_or_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(MODES) == set(list_attention())
    # what `exact_when_shorter` does and refuses: test_short_sequences
    chosen = {*MODES[kind], "device", "dtype", "regularizer", "exact_when_shorter"}
    asked = sorted(set(option_annotations(attention_class(kind))) - chosen)
    for mode in modes(kind):
        plain = results(kind, mode)
        for name in asked:
            options = {**mode, name: other(name, mode)}
            refused = is_refused(kind, options, name)
            with monkeypatch.context() as let:
                for module in (gaussian, cgp, kep_svgp):
                    let.setattr(module, "refuse_unused", lambda *_, **__: None)
                assert alike(results(kind, options), plain) == refused, (mode, name)


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
