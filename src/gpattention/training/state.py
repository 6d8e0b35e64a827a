"""The state of a run between two steps, to and from a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist

from gpattention.training.checkpoint import Checkpoint, CheckpointError


def pack(
    model: nn.Module,
    optimizer: optim.Optimizer,
    counters: Mapping[str, Any],
    random: Sequence[Mapping[str, Tensor]],
) -> Checkpoint:
    """Model, optimiser and every process's random-number states as tensors, counters as JSON."""
    tensors = {f"model.{name}": x for name, x in model.state_dict().items()}
    plain = optimizer.state_dict()
    for index, entries in plain["state"].items():
        tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(x) for name, x in entries.items()}
    for rank, states in enumerate(random):
        tensors |= {f"random.{rank}.{name}": x for name, x in states.items()}
    return Checkpoint({name: x.clone() for name, x in tensors.items()}, dict(counters))


def unpack(checkpoint: Checkpoint, model: nn.Module, optimizer: optim.Optimizer, rank: int = 0) -> None:
    """Put everything back; a checkpoint of another model is refused before anything changes."""
    weights = _below("model.", checkpoint.tensors)
    wanted = model.state_dict()
    if set(weights) != set(wanted) or any(weights[n].shape != wanted[n].shape for n in wanted):
        raise CheckpointError("the checkpoint holds another model than the recipe describes")
    model.load_state_dict(weights)
    plain = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, x in _below("optimizer.", checkpoint.tensors).items():
        index, _, entry = name.partition(".")
        state.setdefault(int(index), {})[entry] = x
    optimizer.load_state_dict({"state": state, "param_groups": plain["param_groups"]})
    random = _below(f"random.{rank}.", checkpoint.tensors)  # none for a process that was not there
    if "cpu" in random:
        torch.set_rng_state(random["cpu"])
    device = next(model.parameters()).device
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"], device)


def random_states(device: torch.device, world_size: int) -> list[dict[str, Tensor]]:
    """Of every process, of its own device; all of them must call it together."""
    own = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        own["cuda"] = torch.cuda.get_rng_state(device)
    if world_size == 1:
        return [own]
    states: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
    dist.all_gather_object(states, own)
    return states


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
