"""Random attention modules and transformers: forward, backward, padding, saving and loading."""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpattention import gp
from gpattention.attention import attention_class, build_attention, list_attention
from gpattention.models import (
    AttentionConfig,
    TextConfig,
    TextTransformer,
    VisionConfig,
    VisionTransformer,
    predict,
)
from tests.attention.by_hand import heads_by_hand, merge
from tests.attention.variants import VARIANTS, build, padding, tokens
from tests.fuzz.tally import BITS, WRONG, Tally, torch_generator

TOLERANCE = 1e-8  # of float64, where only the order of a sum may differ
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "softmax": {"causal": (False, True)},
    "kernel": {
        "kernel": ("rbf", "ard_rbf", "exp_dot"), "symmetric": (False, True), "normalize": ("none", "rows"),
        "causal": (False, True),
    },
    "softmax-gp": {
        "causal": (False, True), "noise": (0.01, 0.3), "learn_noise": (False, True),
        "prior_scale": (0.05, 0.2, 1.0), "learn_prior_scale": (False, True),
    },
    "gaussian": {
        "normalize": ("none", "rows"), "noise": (1e-3, 0.01, 0.5), "learn_noise": (False, True),
        "scale": (0.5, 1.0, 2.0), "learn_scale": (False, True), "prior_scale": (0.05, 0.2, 1.0),
        "learn_prior_scale": (False, True), "max_stddev": (0.5, 2.0),
    },
    "direct": {"causal": (False, True)},
    "cgp": {
        "causal": (False, True), "latent_prior": ("noisy", "latent"), "observation_noise": (None, 0.1),
        "regularizer_samples": (1, 3),
    },
    "scgp": {
        "inducing": ("learned", "pooled"), "num_inducing": (1, 4, (3, 5)), "values": (None, "paper", "dual"),
        "include_noise": (None, True, False), "conditional": ("deterministic", "independent"),
    },
    "sgpa": {"num_inducing": (1, 4), "kernel": ("rbf", "ard_rbf", "exp_dot"), "jitter": (1e-6, 1e-3)},
    "kep-svgp": {"rank": (1, 3), "tokens": (None, 2, 30), "eta_ksvd": (None, 2.0), "eta_kl": (1.0, 0.0)},
    "any": {"bias": (False, True), "dropout": (0.0, 0.3)},
}  # fmt: skip
BAD: tuple[Any, ...] = (
    -1, 0, float("nan"), float("inf"), "rubbish", None, [], (1, 2, 3), 1e300, True, b"x", 2**70,
)  # fmt: skip


def check(r: random.Random, tally: Tally) -> None:
    r.choice((check_attention, check_by_hand, check_model, check_bad_options))(r, tally)


def random_options(r: random.Random, kind: str, *, share: float = 0.4) -> dict[str, Any]:
    tables = [kind, *(("gaussian",) if kind in ("direct", "cgp", "scgp") else ())]
    found = {
        name: r.choice(values)
        for table in tables
        for name, values in OPTIONS[table].items()
        if r.random() < share or name == "num_inducing"
    }
    if r.random() < 0.5:
        found["regularizer"] = r.choice(attention_class(kind).regularizers)
    return found


def stir(module: nn.Module, r: random.Random) -> nn.Module:
    """Parameters off their initial values."""
    g = torch_generator(r)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=g).to(parameter))
    return module


def check_attention(r: random.Random, tally: Tally) -> None:
    """Padding of any content changes nothing, gradients are finite, a loaded module gives the same bits."""
    kind = r.choice(list_attention())
    heads = r.randint(1, 3)
    sizes = {"embed_dim": heads * r.randint(1, 5), "num_heads": heads}
    options = random_options(r, kind)
    if r.random() < 0.3:
        options["bias"] = False
    try:
        module = build_attention(kind, **sizes, **options)
    except ValueError:
        tally.add("refusals")
        return
    module = stir(module, r).double().eval()
    batch, real, more = r.randint(1, 3), r.randint(1, 7), r.randint(1, 4)
    g = torch_generator(r)
    short = torch.randn(batch, real, sizes["embed_dim"], generator=g, dtype=torch.float64)
    short = torch.nn.functional.layer_norm(short, short.shape[-1:]) if short.shape[-1] > 1 else short
    rubbish = r.choice([float("nan"), float("inf"), 1e30, 0.0])
    long = torch.cat([short, torch.full((batch, more, short.shape[-1]), rubbish, dtype=torch.float64)], 1)
    ignore = (torch.arange(real + more) >= real).expand(batch, -1)
    able = {"weights": module.weighs, "variance": module.draws}
    need = ("output", "regularizer", *(name for name, can in able.items() if can))
    if getattr(module, "regularizer", "none") == "monte_carlo":
        need = tuple(name for name in need if name != "regularizer")  # numbers are laid out along the padding
    try:
        alone = module(short, need=need)
        padded = module(long.requires_grad_(), key_padding_mask=ignore, need=need)
    except gp.NumericalError:
        tally.add("refusals")
        return
    label = f"{kind} {sizes} {options}"
    _close(tally, f"{label}: output of padded tokens", padded.output[:, :real], alone.output)
    if module.weighs:
        _close(tally, f"{label}: weights of padded tokens", padded.weights[:, :, :real, :real], alone.weights)
    if module.draws:
        _close(tally, f"{label}: variance of padded tokens", padded.variance[:, :, :real], alone.variance)
    loss = padded.output[:, :real].square().sum()
    if "regularizer" in need:
        _close(tally, f"{label}: regulariser of padded tokens", padded.regularizer, alone.regularizer)
        loss = loss + padded.regularizer
    loss.backward()
    for name, x in [("tokens", long), *module.named_parameters()]:
        tally.add("comparisons")
        if x.grad is not None and not bool(x.grad.isfinite().all()):
            tally.fault(WRONG, f"{label}: the gradient of {name} is not finite")
    if long.grad is not None and bool(long.grad[:, real:].any()):
        tally.fault(WRONG, f"{label}: padding has a gradient")
    other = build_attention(kind, **sizes, **options).double().eval()
    other.load_state_dict(module.state_dict())
    draw = r.choice(["none", "independent", "joint"]) if module.draws and not module.causal else "none"
    seed = r.getrandbits(40)
    with torch.no_grad():
        outputs = [
            m(short, draw=draw, generator=torch.Generator().manual_seed(seed)).output for m in (module, other)
        ]
    _equal(tally, f"{label}: a module with the same state, draw={draw}", *outputs)


def check_by_hand(r: random.Random, tally: Tally) -> None:
    """The module's mean and variance against the formula written out."""
    variant = r.choice(VARIANTS)
    module = build(variant, seed=r.getrandbits(30), stir=r.choice([0.0, 0.1, 0.3]))
    x = tokens(seed=r.getrandbits(30)) * 10 ** r.uniform(-1, 0.3)
    ignore = padding(seed=r.getrandbits(30)) if r.random() < 0.7 else None
    try:
        result = module(
            x, key_padding_mask=ignore, need=("output", *(("posterior",) if module.draws else ()))
        )
        mean, variance = heads_by_hand(module, x, real=None if ignore is None else ~ignore)
    except gp.NumericalError:
        tally.add("refusals")
        return
    _close(tally, f"{variant.name}: output by hand", result.output, merge(module, mean))
    if variance is not None and result.posterior is not None:
        _close(tally, f"{variant.name}: variance by hand", result.posterior.variance, variance)


def random_stack(r: random.Random, depth: int) -> tuple[AttentionConfig, ...]:
    return tuple(AttentionConfig(k, random_options(r, k)) for k in r.choices(list_attention(), k=depth))


def check_model(r: random.Random, tally: Tally) -> None:
    """A transformer with any stack: saved, loaded, predicting the same bits; sentences padded further."""
    depth, heads, g = r.randint(1, 3), r.randint(1, 2), torch_generator(r)
    sizes: dict[str, Any] = {
        "classes": r.randint(1, 4), "depth": depth, "heads": heads, "width": heads * r.choice([2, 3, 4]),
        "dropout": r.choice([0.0, 0.2]), "mlp_width": r.choice([None, 1, 7]),
        "attention": random_stack(r, depth),
    }  # fmt: skip
    try:
        if r.random() < 0.5:
            channels, patch = r.randint(1, 3), r.randint(1, 3)
            sides = (patch * r.randint(1, 3), patch * r.randint(1, 3))
            config: Any = VisionConfig(image_size=sides, patch=patch, channels=channels, **sizes)
            model: Any = VisionTransformer(config)
            inputs = torch.randn(r.randint(1, 4), channels, *sides, generator=g)
        else:
            config = TextConfig(vocabulary=12, embedding_width=r.randint(1, 5), max_length=8, **sizes)
            model = TextTransformer(config)
            inputs = torch.randint(1, 12, (r.randint(1, 4), r.randint(1, 6)), generator=g)
    except ValueError:
        tally.add("refusals")
        return
    stir(model, r)
    samples, seed, draw = r.randint(1, 3), r.getrandbits(31), r.choice(["none", "independent"])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        loaded = type(model).from_pretrained(Path(folder))
    if loaded.config != model.config:
        tally.fault(BITS, f"{config}: loaded with another config")
    asked = {"samples": samples if draw != "none" and model.draws else 1, "seed": seed, "draw": draw}
    asked["draw"] = draw if model.draws else "none"
    try:
        first = predict(model, inputs, **asked)
        again = predict(loaded, inputs, **asked)
        one_by_one = predict(model, inputs, batch_size=1, **asked)
    except gp.NumericalError:
        tally.add("refusals")
        return
    _equal(tally, f"{config}: loaded model", first.logits, again.logits)
    tally.add("comparisons")
    gap = float((first.logits - one_by_one.logits).abs().max())
    if not gap <= 2e-3 * max(1.0, float(first.logits.abs().max())):
        tally.fault(WRONG, f"{config}: items one by one differ by {gap:.1e}")
    model.train()
    output = model(inputs, need=("logits", "regularizer"))
    loss = output.logits.square().sum() + (0.0 if output.regularizer is None else output.regularizer)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            tally.fault(WRONG, f"{config}: the gradient of {name} is not finite")


def check_bad_options(r: random.Random, tally: Tally) -> None:
    """Nonsense is refused by name, or is no nonsense."""
    kind = r.choice(list_attention())
    options: dict[str, Any] = random_options(r, kind)
    sizes: dict[str, Any] = {"embed_dim": 4, "num_heads": 2}
    known = [*options, *OPTIONS["any"], "regularizer", "unheard_of"]
    name = r.choice([*known, *sizes])
    bad = r.choice(BAD)
    if name in sizes:
        sizes[name] = bad
    else:
        options[name] = bad
    try:
        module = build_attention(kind, **sizes, **options).eval()
        module(torch.randn(1, 3, 4))
    except (ValueError, gp.NumericalError) as error:
        tally.add("refusals")
        if not str(error):
            tally.fault(WRONG, f"{kind} {name}={bad!r}: refused without a word")
    except (TypeError, RuntimeError, AttributeError, OverflowError, IndexError, MemoryError) as error:
        tally.fault("tracebacks", f"{kind} {name}={bad!r}: {type(error).__name__}: {error}"[:300])


def _close(tally: Tally, what: str, found: Tensor, wanted: Tensor) -> None:
    tally.add("comparisons")
    if found.shape != wanted.shape:
        tally.fault(WRONG, f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
        return
    gap = float((found - wanted).detach().abs().max()) if found.numel() else 0.0
    size = max(1.0, float(wanted.detach().abs().max()) if wanted.numel() else 1.0)
    if not gap <= TOLERANCE * size:
        tally.fault(WRONG, f"{what}: differs by {gap:.1e} of {size:.1e}")


def _equal(tally: Tally, what: str, found: Tensor, wanted: Tensor) -> None:
    tally.add("comparisons")
    if not torch.equal(found, wanted):
        tally.fault(BITS, f"{what}: other bits")
