"""Everything a module refuses, with an error that names the argument and its value."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from gpattention.attention import build_attention, list_attention
from tests.attention.variants import (
    BATCH,
    EMBED,
    HEADS,
    NAMED,
    TOKENS,
    VARIANTS,
    Variant,
    build,
    every,
    tokens,
)


@pytest.mark.parametrize("kind", ["softmax", "kernel"])
@pytest.mark.parametrize(
    "asked", [{"draw": "independent"}, {"draw": "joint"}, {"need": ("variance",)}, {"need": ("posterior",)}]
)
def test_kinds_without_a_posterior_say_so(kind: str, asked: dict[str, Any]) -> None:
    module = build(NAMED["softmax" if kind == "softmax" else "kernel rbf rows"])
    (name, value), *_ = asked.items()
    with pytest.raises(ValueError, match=f"'{kind}' attention has no posterior") as error:
        module(tokens(), **asked)
    assert f"{name}={value!r}" in str(error.value)


X = tokens()
MASK = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
BAD_CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "need": ("cgp rows", (X,), {"need": ("output", "colour")}, "got 'colour'"),
    "need without a comma": (
        "cgp rows",
        (X,),
        {"need": "variance"},
        r"need to be a tuple of names, got the text 'variance': write \('variance',\)",
    ),
    "draw": ("cgp rows", (X,), {"draw": "both"}, "got 'both'"),
    "no samples": (
        "cgp rows",
        (X,),
        {"draw": "joint", "samples": 0},
        "samples to be a whole number >= 1, got 0",
    ),
    "samples of a fraction": (
        "cgp rows",
        (X,),
        {"draw": "joint", "samples": 2.5},
        "whole number >= 1, got 2.5",
    ),
    "samples of a flag": (
        "cgp rows",
        (X,),
        {"draw": "joint", "samples": True},
        "whole number >= 1, got True",
    ),
    "samples of the mean": ("cgp rows", (X,), {"samples": 3}, "samples=3 without a draw"),
    "width": ("softmax", (X[..., :5],), {}, r"query of shape \[B, N, 12\].*got \(3, 7, 5\)"),
    "axes": ("softmax", (X[None],), {}, r"query of shape.*got \(1, 3, 7, 12\)"),
    "unbatched key": ("softmax", (X, X[0]), {}, r"key of shape.*got \(7, 12\)"),
    "value width": ("softmax", (X, X, X[..., :3]), {}, r"value of shape.*got \(3, 7, 3\)"),
    "value alone": ("softmax", (X, None, X), {}, "value without a key"),
    "key batch": ("direct rows", (X, X[:1]), {}, r"one batch size.*key of \[1, 7\]"),
    "value length": ("kernel rbf rows", (X, X, X[:, :4]), {}, r"as many values as keys.*\[3, 4\]"),
    "mask type": ("softmax", (X,), {"key_padding_mask": MASK.long()}, "key_padding_mask to be bool.*int64"),
    "mask shape": ("softmax", (X,), {"key_padding_mask": MASK[:, :4]}, r"shape \[3, 7\].*got shape \(3, 4\)"),
    "query mask": ("softmax", (X,), {"query_padding_mask": MASK[0]}, r"query_padding_mask.*\(7,\)"),
    "inducing inputs": ("cgp rows", (X,), {"inducing": X}, "'cgp' attention takes no inducing inputs"),
    "inducing shape": ("sgpa rbf", (X,), {"inducing": X}, r"\(2, 5, 12\), got \(3, 7, 12\)"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused(case: str) -> None:
    name, inputs, options, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build(NAMED[name])(*inputs, **options)


@every([variant for variant in VARIANTS if variant.causal])
@pytest.mark.parametrize("queries", [1, 9])
def test_causal_attention_refuses_other_numbers_of_queries(variant: Variant, queries: int) -> None:
    message = f"query with as many tokens as key.*got query of {queries} tokens and key of {TOKENS}"
    with pytest.raises(ValueError, match=message):
        build(variant)(tokens(length=queries), X)


BAD_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"regularizer": "entropy"}, f"'{kind}' attention.*got 'entropy'") for kind in list_attention()),
    *((kind, {"colour": 3}, f"'{kind}' attention does not take.*'colour'") for kind in list_attention()),
    *((kind, {"kernel": "laplace"}, "rbf, ard_rbf, exp_dot, got 'laplace'") for kind in ("kernel", "sgpa")),
    *((kind, {"normalize": "max"}, "got 'max'") for kind in ("kernel", "direct", "cgp", "scgp")),
    *(
        (kind, {"normalize": "rows"}, "does not take.*'normalize'")
        for kind in ("softmax", "softmax-gp", "sgpa")
    ),
    *((kind, {"causal": True, "regularizer": "kl"}, "got 'kl'") for kind in ("direct", "cgp")),
    *((kind, {"causal": True}, "does not take.*'causal'") for kind in ("scgp", "sgpa")),
    *(
        (kind, {"noise": 1e-5}, "above the floor 0.0001, got 1e-05")
        for kind in ("softmax-gp", "direct", "scgp")
    ),
    ("scgp", {"inducing": "sampled"}, "got 'sampled'"),
    ("scgp", {"values": "printed"}, "got 'printed'"),
    ("scgp", {"conditional": "fitc"}, "expected conditional to be .* got 'fitc'"),
    ("scgp", {"num_inducing": 0}, "expected num_inducing to be a whole number >= 1, got 0"),
    ("scgp", {"num_inducing": (4, -1)}, "expected num_inducing to be a whole number >= 1, got -1"),
    ("scgp", {"num_inducing": (4, 4, 4)}, r"got \(4, 4, 4\)"),
    *(
        ("scgp", {"num_inducing": bad}, f"num_inducing to be a whole number >= 1, got {bad}")
        for bad in (2.5, None)
    ),
    ("sgpa", {"num_inducing": 0}, "got 0"),
    ("sgpa", {"num_inducing": 2.5}, "expected num_inducing to be a whole number, got 2.5"),
    # text is what a recipe brings, and any text is true
    *(
        (kind, {"learn_noise": "False"}, "expected learn_noise to be true or false, got 'False'")
        for kind in ("softmax-gp", "direct", "cgp", "scgp")
    ),
    *(
        (kind, {"causal": "no"}, "expected causal to be true or false, got 'no'")
        for kind in ("kernel", "cgp")
    ),
    ("kernel", {"symmetric": 0}, "expected symmetric to be true or false, got 0"),
    ("scgp", {"include_noise": "no"}, "expected include_noise to be true or false, got 'no'"),
    *((kind, {"dropout": "0.1"}, "expected dropout to be a number, got '0.1'") for kind in list_attention()),
    ("direct", {"noise": "0.1"}, "expected noise to be a number, got '0.1'"),
    ("direct", {"noise": True}, "expected noise to be a number, got True"),
    ("direct", {"max_stddev": None}, "expected max_stddev to be a number, got None"),
    ("cgp", {"observation_noise": "0"}, "expected observation_noise to be a number, got '0'"),
    ("cgp", {"regularizer_samples": "3"}, "expected regularizer_samples to be a whole number, got '3'"),
    ("sgpa", {"jitter": -1.0}, r"expected jitter in \(0, 1\), got -1.0"),
    ("cgp", {"latent_prior": "flat"}, "got 'flat'"),
    ("cgp", {"regularizer_samples": 0}, "expected regularizer_samples to be a whole number >= 1, got 0"),
    *(
        ("cgp", {"observation_noise": bad}, f"expected observation_noise >= 0 and finite, got {bad}")
        for bad in (-1.0, math.inf, math.nan)
    ),
    *(
        ("direct", {"normalize": way, name: bad}, f"expected {name} to be finite and above .*, got {bad}")
        for way, name in (("rows", "noise"), ("rows", "prior_scale"), ("none", "scale"))
        for bad in (-1.0, math.inf, math.nan)
    ),
    *(
        ("softmax-gp", {name: -1.0}, f"expected {name} to be finite and above .*, got -1.0")
        for name in ("noise", "prior_scale")
    ),
    *(
        (kind, {"noise": 1e300}, r"expected noise to be finite .*, got 1e\+300 as torch.float32")
        for kind in ("softmax-gp", "direct", "cgp", "scgp")
    ),
    *(
        (kind, {"num_inducing": 2**70}, r"attention of at most 1e\+10 parameters, got")
        for kind in ("scgp", "sgpa")
    ),
    ("cgp", {"max_stddev": 0.0}, "max_stddev > 0, got 0.0"),
    ("softmax", {"dropout": 1.0}, "dropout in .*got 1.0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(kind, embed_dim=EMBED, num_heads=HEADS, **options)


def test_numbers_of_other_libraries_are_numbers() -> None:
    for noise in (1, np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        build_attention("cgp", embed_dim=EMBED, num_heads=HEADS, noise=noise, observation_noise=None)
    build_attention("sgpa", embed_dim=EMBED, num_heads=HEADS, num_inducing=np.int64(4))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="got 12 and 5"):
        build_attention("softmax", embed_dim=12, num_heads=5)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cgp, direct, kernel.*got 'magic'"):
        build_attention("magic", embed_dim=EMBED, num_heads=HEADS)


@pytest.mark.parametrize("kind", list_attention())
@pytest.mark.parametrize("name", ["embed_dim", "num_heads"])
@pytest.mark.parametrize("bad", ["4", None, 4.0, True, (1, 2), 0, -2, 2**70], ids=repr)
def test_bad_sizes_are_refused(kind: str, name: str, bad: Any) -> None:
    """By name, before they meet a comparison or a tensor."""
    with pytest.raises(ValueError, match=f"expected {name} "):
        build_attention(kind, **{"embed_dim": EMBED, "num_heads": HEADS, name: bad})
