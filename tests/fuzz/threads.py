"""Calls from several threads at once against the same calls one after the other, bit for bit."""

import asyncio
import copy
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gpattention
from gpattention.models import predict
from tests.fuzz.tally import BITS, Tally
from tests.hosts import hosts
from tests.models import small_models
from tests.threads import at_once

SWITCH = 1e-6  # seconds between changes of thread: many
HOSTS = (
    "encoder", "encoder, batch second", "bert", "vit", "timm", "own softmax", "own kernel rows", "own text",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What a thread asks, and of whom."""

    label: str
    run: Callable[[], Tensor]


def check(r: random.Random, tally: Tally) -> None:
    """Two to eight threads with some calls each, in one or several ways of running them."""
    torch.set_num_threads(1)
    model, calls = r.choice((attached_calls, attached_calls, converted_calls, own_calls))(r)
    plan = [r.choice(calls) for _ in range(r.randint(4, 12))]
    threads = r.randint(2, 8)
    wanted = [outcome(call) for call in plan]
    before = state_of(model)  # a bare pass of a converted model has left its regulariser there
    tally.add("calls", len(plan))
    way = r.choice(["threads", "threads", "executor", "asyncio"])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        found = WAYS[way](plan, threads)
    finally:
        sys.setswitchinterval(interval)
    for call, ours, theirs in zip(plan, found, wanted, strict=True):
        tally.add("comparisons")
        if not same(ours, theirs):
            tally.fault(
                BITS, f"{call.label} from {threads} threads ({way}): {shown(ours)}, alone {shown(theirs)}"
            )
    for what in differences(before, state_of(model)):
        tally.fault(BITS, f"{plan[0].label}: after {threads} threads ({way}) {what}")


def random_calls(
    r: random.Random, label: str, predict: Callable[[int, int, int | None], Tensor], count: int
) -> list[Call]:
    """Predictions with random numbers of samples, seeds and sizes of batches."""
    calls = []
    for _ in range(count):
        asked = r.randint(0, 3), r.randint(0, 99), r.choice([None, 2, 7])
        calls.append(Call(f"{label}, samples={asked[0]}", partial(predict, *asked)))
    return calls


def attached_calls(r: random.Random) -> tuple[nn.Module, list[Call]]:
    """One handle, two handles of one model, and the bare host."""
    name = r.choice(HOSTS)
    host = hosts.make(name)
    if r.random() < 0.5:
        host.model.eval()

    def attached(model: nn.Module) -> Callable[..., Tensor]:
        handle = gpattention.attach(model, task="classification", call=host.call)
        return lambda n, s, b, x=host.inputs: handle.predict(x, n, s, batch_size=b).logits

    predicts = [attached(host.model) for _ in range(r.randint(1, 2))]
    calls = [c for i, each in enumerate(predicts) for c in random_calls(r, f"{name}, handle {i}", each, 3)]
    if not host.model.training:
        calls.append(Call(f"{name} itself", lambda: bare(host.model, host.inputs, host.call)))
    if r.random() < 0.5:
        bad = {"nothing": torch.zeros(2, 3)}
        calls.append(Call(f"{name}, bad inputs", lambda: predicts[0](1, 0, None, bad)))
    if r.random() < 0.3 and name not in ("bert",):
        other = attached(copy.deepcopy(host.model))
        calls.append(Call(f"{name}, a copy", lambda: other(2, 5, None)))
    return host.model, calls


def converted_calls(r: random.Random) -> tuple[nn.Module, list[Call]]:
    name = r.choice([n for n in HOSTS if n != "encoder, batch second"])
    host = hosts.make(name)
    kind = r.choice(["cgp", "direct"] if "kernel" in name else ["cgp", "direct", "softmax-gp", "kernel"])
    model, label = gpattention.convert(host.model, kind), f"{name} converted to {kind}"
    if r.random() < 0.5:
        model.eval()

    def converted(n: int, s: int, b: int | None) -> Tensor:
        return gpattention.predict(model, host.inputs, n, s, batch_size=b).logits

    calls = random_calls(r, label, converted, 4)
    if not model.training:
        calls.append(Call(f"{label}, itself", lambda: bare(model, host.inputs, host.call)))
    return model, calls


def own_calls(r: random.Random) -> tuple[nn.Module, list[Call]]:
    stack, images = r.choice(small_models.STACKS), r.random() < 0.5
    model = (small_models.vision if images else small_models.text)(*stack, dtype=torch.float32)
    inputs = small_models.images(dtype=torch.float32) if images else small_models.sentences(6, 3, 5)
    model.train(r.random() < 0.5)
    draw = r.choice(["none", "independent", "joint"]) if model.draws else "none"

    def own(n: int, s: int, b: int | None) -> Tensor:
        samples = max(n, 1) if draw != "none" else 1
        return predict(model, inputs, samples=samples, seed=s, draw=draw, batch_size=b).logits

    calls = random_calls(r, f"own {stack}, draw={draw}", own, 4)
    if not model.training:
        calls.append(Call(f"own {stack} itself", lambda: bare(model, inputs, lambda m, x: m(x))))
    return model, calls


def bare(model: nn.Module, inputs: Any, call: Callable[[Any, Any], Any]) -> Tensor:
    with torch.no_grad():
        output = call(model, inputs)
    return getattr(output, "logits", output)


def outcome(call: Call) -> Tensor | str:
    """What it gives, or the error that it raises."""
    try:
        return call.run().clone()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same(a: Tensor | str, b: Tensor | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a == b
    return torch.equal(a, b)


def shown(x: Tensor | str) -> str:
    return x[:200] if isinstance(x, str) else f"logits of sum {float(x.sum()):.6f}"


# --- ways to run calls at once ------------------------------------------------------------------------------


def in_threads(plan: list[Call], threads: int) -> list[Tensor | str]:
    """Each thread takes every n-th call, all begin together."""
    shares = [range(first, len(plan), threads) for first in range(threads)]
    found = at_once([lambda share=share: {i: outcome(plan[i]) for i in share} for share in shares])
    return [found[i % threads][i] for i in range(len(plan))]


def in_executor(plan: list[Call], threads: int) -> list[Tensor | str]:
    """The main thread calls as well."""
    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(outcome, call) for call in plan[1:]]
        return [outcome(plan[0]), *(each.result() for each in waiting)]


def in_asyncio(plan: list[Call], threads: int) -> list[Tensor | str]:
    async def gather() -> list[Tensor | str]:
        return list(await asyncio.gather(*(asyncio.to_thread(outcome, call) for call in plan)))

    return asyncio.run(gather())


WAYS = {"threads": in_threads, "executor": in_executor, "asyncio": in_asyncio}


# --- what must be as before ---------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """All of the host and of the process that a call could leave changed."""
    found: dict[str, Any] = {
        "torch's fast path": torch.backends.mha.get_fastpath_enabled(),
        "gradients": torch.is_grad_enabled(),
        "the attention": getattr(getattr(model, "config", None), "_attn_implementation", None),
        "the default type": torch.get_default_dtype(),
    }
    for name, module in model.named_modules():
        found[f"mode of {name!r}"] = module.training
        found |= {f"attribute {key} of {name!r}": True for key in vars(module)}
        found[f"hooks of {name!r}"] = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found[f"class of {name!r}"] = type(module).__name__
    for name, x in model.state_dict().items():
        found[f"weights of {name!r}"] = x.clone()
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = []
    for key in before.keys() | after.keys():
        a, b = before.get(key), after.get(key)
        equal = torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        if not equal:
            found.append(f"{key} is another" if isinstance(a, Tensor) else f"{key} is {b}, was {a}")
    return sorted(found)[:2]
