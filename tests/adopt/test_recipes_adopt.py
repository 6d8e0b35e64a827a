"""The recipes of docs/convert.md on tiny data: plain PyTorch, Trainer, Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpattention
from gpattention.adopt.convert_layer import converted_layers
from gpattention.models import Prediction
from tests.adopt.hosts import make

STEPS = 25


def data(family: str) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A converted host and five items to learn by heart."""
    host = make(family)
    gpattention.convert(host.model, "cgp")
    labels = torch.tensor([0, 1, 2, 1, 0])
    inputs = host.inputs if isinstance(host.inputs, dict) else {"x": host.inputs}
    return host.model, inputs, labels


def accuracy(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> float:
    told = gpattention.predict(model, inputs, samples=4)
    assert isinstance(told, Prediction)
    return float((told.label == labels).float().mean())


def added(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for layer in converted_layers(model) for p in layer.parameters()]


def test_a_plain_loop() -> None:
    model, inputs, labels = data("encoder")
    before = added(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(**inputs), labels) + 0.01 * gpattention.regularizer(model)
        loss.backward()
        optimizer.step()
    assert accuracy(model, inputs, labels) == 1.0
    assert all(not torch.equal(a, b) for a, b in zip(added(model), before, strict=True))


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class GPTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            told = super().compute_loss(model, inputs, *args, **kwargs)
            if not model.training:
                return told
            extra = 0.01 * gpattention.regularizer(model)
            return (told[0] + extra, told[1]) if isinstance(told, tuple) else told + extra

    model, inputs, labels = data("bert")
    before = added(model)
    items = [{**{n: x[i] for n, x in inputs.items()}, "labels": labels[i]} for i in range(len(labels))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=5, learning_rate=1e-2,
        report_to=[], save_strategy="steps", save_steps=STEPS, use_cpu=True, disable_tqdm=True, seed=0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = GPTrainer(model=model, args=arguments, train_dataset=items, eval_dataset=items)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7
    assert accuracy(model, inputs, labels) == 1.0
    assert all(not torch.equal(a, b) for a, b in zip(added(model), before, strict=True))
    again = gpattention.from_pretrained(tmp_path / f"checkpoint-{STEPS}")  # what the trainer itself saved
    assert all(torch.equal(a, b) for a, b in zip(added(again), added(model), strict=True))


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            *inputs, labels = batch
            return cross_entropy(self.model(*inputs), labels) + 0.01 * gpattention.regularizer(self.model)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    model, inputs, labels = data("encoder")
    before = added(model)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*inputs.values(), labels), batch_size=5
    )
    trainer = lightning.Trainer(
        max_epochs=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Classifier(model), loader)
    assert accuracy(model, inputs, labels) == 1.0
    assert all(not torch.equal(a, b) for a, b in zip(added(model), before, strict=True))
