"""Training steps with seeded dropout, to be run once fused and once plain."""

import torch
from torch import Tensor

from gpattention import gp
from gpattention.data import Batch
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from gpattention.runs import recipe_from_dict
from gpattention.training.engine import Controls, EagerEngine, GraphEngine, Objective, SingleProcess

OPTIONS = {
    "cgp": {"normalize": "none", "regularizer": "marginal"},
    "scgp": {"normalize": "none", "num_inducing": 16, "regularizer": "dtc"},
}


def problem(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Images of ten patterns in noise, a fifth of the labels wrong: the loss does not end at 0."""
    g = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 3, size, size, generator=g)
    labels = torch.randint(10, (count,), generator=g)
    images = patterns[labels] + 2 * torch.randn(count, 3, size, size, generator=g)
    wrong = torch.rand(count, generator=g) < 0.2
    return images, torch.where(wrong, torch.randint(10, (count,), generator=g), labels)


def losses(kind: str, mode: str, steps: int, *, device: str, batch: int, **config: int) -> Tensor:
    """What every step minimised.  [steps]"""
    options = OPTIONS.get(kind, {})
    recipe = recipe_from_dict({"model": {"attention": kind, "options": options}})
    torch.manual_seed(0)
    made = VisionConfig(attention=AttentionConfig(kind, options), **config)
    model = VisionTransformer(made).to(device)
    cuda = device == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, fused=cuda or None, capturable=cuda)
    objective = Objective(model, recipe, "gp")
    objective.seeded_dropout = True
    make = GraphEngine if cuda else EagerEngine
    engine = make(SingleProcess(torch.device(device)), objective, optimizer, recipe)
    images, labels = (x.to(device) for x in problem(20 * batch, made.sides[0]))
    found = []
    with gp.fused_kernels(mode):  # type: ignore[arg-type]
        for step in range(steps):
            items = torch.arange(step * batch, (step + 1) * batch, device=device) % len(images)
            engine.step([Batch(items, images[items], labels[items])], Controls(step, step, 5e-4, 0.01))
            engine.read()
            found.append(engine.last[0])
    return torch.tensor(found)
