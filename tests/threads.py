"""Calls of several threads at once, and what must be as before after them."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

TIMEOUT = 60.0  # seconds after which a test that waits for a thread has failed


def at_once(calls: Sequence[Callable[[], Any]], *, errors: bool = False) -> list[Any]:
    """The results of all calls, each made by a thread of its own, begun together and switched all the time.

    An error of a call is raised here, or stands among the results if `errors` are expected.
    """
    results: list[Any] = [None] * len(calls)
    together = threading.Barrier(len(calls))

    def run(place: int) -> None:
        try:
            together.wait(TIMEOUT)
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException) and not errors:
            raise result
    return results


class Pause:
    """A place at which a call of another thread waits: `reached` by it, it goes on when it is `released`."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.released.wait(TIMEOUT), "nobody releases the thread"


@contextmanager
def paused(call: Callable[[], Any], pause: Pause) -> Iterator[list[Any]]:
    """Inside, a thread is in the middle of the call; afterwards the list holds what it gave."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)
            pause.reached.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert pause.reached.wait(TIMEOUT), "the thread never came there"
        assert not results, results
        yield results
    finally:
        pause.released.set()
        thread.join(TIMEOUT)
    assert not thread.is_alive()


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a call may leave behind: attributes and hooks of modules, configurations, switches of PyTorch."""
    modules = {}
    for name, module in model.named_modules():
        own = dict(vars(module))
        modules[name] = {key: dict(x) if isinstance(x, dict) else x for key, x in own.items()}
        if hasattr(own.get("config"), "_attn_implementation"):
            modules[name]["config"] = (own["config"].to_dict(), own["config"]._attn_implementation)
    state: dict[str, Any] = {"modules": modules, "process": _switches()}
    if "transformers" in sys.modules:
        from transformers.models.bert import modeling_bert

        state["functions"] = dict(modeling_bert.ALL_ATTENTION_FUNCTIONS)
        state["eager"] = modeling_bert.eager_attention_forward
    return state


def _switches() -> dict[str, Any]:
    return {
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "random": torch.get_rng_state().tolist(),
    }
