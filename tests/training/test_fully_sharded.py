"""`fully_shard` in a loop of one's own: two processes take the step of one."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from gpattention.attention import attention_class, list_attention
from gpattention.gp import ItemNoise
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from tests.processes import in_processes

ITEMS = 4
KINDS = [kind for kind in list_attention() if attention_class(kind).__module__.startswith("gpattention.")]
SMALL: dict[str, dict[str, Any]] = {"scgp": {"num_inducing": 4}, "sgpa": {"num_inducing": 4}}


def trained(rank: int, kind: str, processes: int) -> dict[str, Tensor]:
    """The parameters after one step of Adam on the share of a process, its draws keyed to items."""
    torch.manual_seed(0)
    config = VisionConfig(
        classes=3, depth=2, width=16, heads=2, image_size=8, channels=1, patch=4, dropout=0.0,
        attention=AttentionConfig(kind, SMALL.get(kind, {})),
    )  # fmt: skip
    model = VisionTransformer(config).train()
    if processes > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (processes,))
        for block in model.blocks:
            # SGPA's inducing inputs pass through the layer below, whose weights have to be there still
            fully_shard(block, mesh=mesh, reshard_after_forward=kind != "sgpa")
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)
    g = torch.Generator().manual_seed(1)
    images, labels = torch.randn(ITEMS, 1, 8, 8, generator=g), torch.arange(ITEMS) % 3
    share = torch.arange(rank * ITEMS // processes, (rank + 1) * ITEMS // processes)
    told = model(
        images[share],
        draw="independent" if model.draws else "none",
        generator=ItemNoise(5, share, torch.zeros_like(share)),
        need=("logits", "regularizer"),
    )
    loss = cross_entropy(told.logits, labels[share])
    (loss if told.regularizer is None else loss + 0.1 * told.regularizer).backward()
    optimizer.step()
    whole = {name: x.full_tensor() if processes > 1 else x for name, x in model.named_parameters()}
    return {name: x.detach().clone() for name, x in whole.items()}


def all_trained(rank: int) -> dict[str, dict[str, Tensor]]:
    return {kind: trained(rank, kind, 2) for kind in KINDS}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    return in_processes(all_trained, 2, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_take_the_step_of_one(kind: str, pair: list[dict[str, dict[str, Tensor]]]) -> None:
    expected = trained(0, kind, 1)
    for found in pair:
        assert found[kind].keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(found[kind][name], x, rtol=0, atol=1e-5)
