"""Regularisers: the `gp` function's own number, with the sign of a loss, per head, real token and width."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.testing import assert_close

from gpattention import gp
from gpattention.attention import Attention, attention_class, list_attention
from gpattention.attention.base import normalised
from tests.attention.by_hand import gaussian_call, sgpa_call
from tests.attention.variants import (
    BATCH,
    HEADS,
    NAMED,
    TOKENS,
    VARIANTS,
    WIDTH,
    Variant,
    build,
    padding,
    tokens,
)
from tests.gp.calls import (
    cgp_kl,
    cgp_log_density,
    direct_kl,
    direct_log_density,
    scgp_kl,
    scgp_log_density,
    sgpa_kl,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SMALL: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": (5, 4)}, "sgpa": {"num_inducing": 5}}
DENSITIES: dict[str, Callable[..., gp.LogDensity]] = {
    "direct": direct_log_density,
    "cgp": cgp_log_density,
    "scgp": scgp_log_density,
}
KLS: dict[str, Callable[..., Tensor]] = {"direct": direct_kl, "cgp": cgp_kl, "scgp": scgp_kl}


def cases() -> list[Variant]:
    found = []
    for kind in KLS:
        for name in attention_class(kind).regularizers:
            for normalize in ("none", "rows"):
                options = {"regularizer": name, "normalize": normalize, **SMALL.get(kind, {})}
                found.append(Variant(f"{kind} {name} {normalize}", kind, options))
    for name in attention_class("sgpa").regularizers:
        found.append(Variant(f"sgpa {name}", "sgpa", {"regularizer": name, **SMALL["sgpa"]}))
    return found


every_case = pytest.mark.parametrize("variant", cases(), ids=lambda variant: variant.name)


def seeded() -> Generator:
    return torch.Generator().manual_seed(3)


def per_head(
    module: Any, x: Tensor, y: Tensor, real: Tensor | None, real_query: Tensor | None, **more: Any
) -> Tensor:
    """Negative log density or KL of every sequence and head.  [B, H]"""
    if module.kind == "sgpa":
        tensors, options = sgpa_call(module, x, real)
        return sgpa_kl(*tensors, **options)
    tensors, options = gaussian_call(module, x, y, real, real_query)
    if module.regularizer == "kl":
        return KLS[module.kind](*tensors, **options, **more)
    if module.regularizer == "monte_carlo":
        more = {"samples": module.regularizer_samples, "generator": seeded(), **more}
    density = DENSITIES[module.kind](*tensors, objective=module.regularizer, **options, **more)
    return -(density.query + density.key)


def by_hand(
    module: Any, x: Tensor, y: Tensor, real: Tensor | None, real_query: Tensor | None, **more: Any
) -> Tensor:
    if module.regularizer == "none":
        return torch.zeros((), dtype=x.dtype)
    total = per_head(module, x, y, real, real_query, **more).expand(x.shape[0], HEADS).sum()
    count = x.shape[0] * x.shape[1] if real_query is None else int(real_query.sum())
    return total / (HEADS * count * WIDTH)


@every_case
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_self_attention(variant: Variant, masked: bool) -> None:
    module, x = build(variant), tokens()
    ignore = padding() if masked else None
    real = None if ignore is None else ~ignore
    found = module(x, key_padding_mask=ignore, generator=seeded(), need=("regularizer",)).regularizer
    assert found.shape == ()
    assert_close(found, by_hand(module, x, x, real, real), **CLOSE)
    if variant.options["regularizer"] == "kl":
        assert float(found.detach()) > 0


@pytest.mark.parametrize(
    "variant", [c for c in cases() if c.kind != "sgpa"], ids=lambda variant: variant.name
)
def test_cross_attention_counts_real_queries(variant: Variant) -> None:
    module, x, y = build(variant), tokens(), tokens(length=5, seed=3)
    ignore, ignore_query = padding(length=5, seed=4), padding()
    everyone = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    need = ("regularizer",)
    found = module(x, y, key_padding_mask=ignore, generator=seeded(), need=need).regularizer
    assert_close(found, by_hand(module, x, y, ~ignore, everyone), **CLOSE)
    masks = {"key_padding_mask": ignore, "query_padding_mask": ignore_query}
    found = module(x, y, **masks, generator=seeded(), need=need).regularizer
    assert_close(found, by_hand(module, x, y, ~ignore, ~ignore_query), **CLOSE)


@pytest.mark.parametrize("regularizer", attention_class("kep-svgp").regularizers)
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_kep_svgp_on_its_authors_scale(regularizer: str, masked: bool) -> None:
    """One KSVD of the batch and the sum of the heads' KL, once a sequence's share is multiplied out."""
    etas = {name: eta for name, eta in {"eta_ksvd": 3.0, "eta_kl": 0.5}.items() if name[4:] in regularizer}
    module = build(NAMED["kep-svgp"], regularizer=regularizer, **etas)
    x, ignore = tokens(), padding() if masked else None
    found = module(x, key_padding_mask=ignore, need=("regularizer", "posterior"))
    count = BATCH * TOKENS if ignore is None else int((~ignore).sum())
    kl, ksvd = found.posterior.kl()[0].sum(), found.posterior.ksvd()
    expected = etas.get("eta_ksvd", 0.0) * ksvd + etas.get("eta_kl", 0.0) * kl
    assert_close(found.regularizer * HEADS * WIDTH * count / BATCH, expected, **CLOSE)


CGP_OPTIONS = [
    {"regularizer": "kl", "observation_noise": 0.3},
    {"regularizer": "marginal", "latent_prior": "latent", "observation_noise": 0.3},
    {"regularizer": "jensen", "latent_prior": "latent"},
    {"regularizer": "monte_carlo", "regularizer_samples": 5},
]


@pytest.mark.parametrize("options", CGP_OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_options_of_cgp(options: dict[str, Any]) -> None:
    module, x = build(Variant("cgp", "cgp", options)), tokens()
    more = {name: options[name] for name in ("observation_noise", "latent_prior") if name in options}
    found = module(x, generator=seeded(), need=("regularizer",)).regularizer
    assert_close(found, by_hand(module, x, x, None, None, **more), **CLOSE)
    plain = build(Variant("cgp", "cgp", {"regularizer": options["regularizer"]}))
    usual = plain(x, generator=seeded(), need=("regularizer",)).regularizer
    assert float((found - usual).detach().abs()) > 1e-3


def test_defaults() -> None:
    chosen = {kind: attention_class(kind).default_regularizer for kind in list_attention()}
    with_kl = dict.fromkeys(("cgp", "direct", "scgp", "sgpa"), "kl")
    assert chosen == with_kl | {"kep-svgp": "ksvd+kl"} | dict.fromkeys(
        ("kernel", "softmax", "softmax-gp"), "none"
    )
    for variant in VARIANTS:
        assert build(variant).regularizer == ("none" if variant.causal else chosen[variant.kind])


def test_normalisation() -> None:
    total = torch.arange(6, dtype=torch.float64).view(3, 2)
    for count in (3, torch.tensor(3.0)):
        assert float(normalised(total, count, head_dim=5, training=True)) == pytest.approx(15 / (2 * 3 * 5))
    nothing = torch.zeros(())
    assert float(normalised(0 * total, nothing, head_dim=5, training=False)) == 0


SHARES = ((0, 1), (1, BATCH))  # sequences of each process: one against two
PARALLEL = {c.name: c for c in cases() if c.name in ("cgp kl rows", "scgp dtc none", "sgpa kl")}
PARALLEL["kep-svgp"] = NAMED["kep-svgp"]


def value_and_gradients(module: Attention, x: Tensor, ignore: Tensor) -> list[Tensor]:
    value = module(x, key_padding_mask=ignore, need=("regularizer",)).regularizer
    gradients = torch.autograd.grad(
        value, list(module.parameters()), allow_unused=True, materialize_grads=True
    )
    return [value.detach(), *gradients]


def uneven_batch() -> tuple[Tensor, Tensor]:
    ignore = padding()
    ignore[0, 2:] = True
    return tokens(), ignore


def one_process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(SHARES))
    try:
        (start, end), (x, ignore) = SHARES[rank], uneven_batch()
        found = {}
        for name, variant in PARALLEL.items():
            module = build(variant)
            parts = [
                value_and_gradients(module.train(mode), x[start:end], ignore[start:end])
                for mode in (True, False)
            ]
            found[name] = parts
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_processes_average_to_the_whole_batch(tmp_path: Path) -> None:
    mp.spawn(one_process, (str(tmp_path),), nprocs=len(SHARES))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(SHARES))]
    x, ignore = uneven_batch()
    counts = [int((~ignore[start:end]).sum()) for start, end in SHARES]
    assert counts[0] * 3 < counts[1]
    for name, variant in PARALLEL.items():
        module = build(variant).train()
        expected = value_and_gradients(module, x, ignore)
        averaged = [(a + b) / 2 for a, b in zip(*(part[name][0] for part in parts), strict=True)]
        assert_close(averaged, expected, **CLOSE)
        for (start, end), part in zip(SHARES, parts, strict=True):  # in evaluation nobody waits for others
            alone = value_and_gradients(module, x[start:end], ignore[start:end])
            assert_close(part[name][1], alone, **CLOSE)
            assert float((part[name][0][0] - alone[0]).abs()) > 1e-3
