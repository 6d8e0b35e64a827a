"""The real files, where GPATTENTION_DATA says that they are."""

import os

import pytest
import torch

from gpattention.data import CIFAR10, check, load

STATES = {status.name: status.state for status in check()} if os.environ.get("GPATTENTION_DATA") else {}


def need(name: str, *states: str) -> None:
    if STATES.get(name) not in (states or ("present",)):
        pytest.skip(f"{name} is not in the folder that GPATTENTION_DATA names")


def test_cola() -> None:
    need("cola")
    data = load("cola")
    assert {n: len(p) for n, p in data.parts.items()} == {
        "train": 6536, "validation": 726, "test": 1816, "ood/out-of-domain": 516,
    }  # fmt: skip
    labels = torch.cat([part.labels for part in (data.train, data.validation, data.test)])
    assert torch.bincount(labels).tolist() == [2528 + 162, 6023 + 365]
    assert torch.bincount(data.ood["out-of-domain"].labels).tolist() == [162, 354]
    raw = load("cola", form="raw")
    assert any('"' in sentence for part in raw.parts.values() for sentence in part.sentences)


def test_cifar10() -> None:
    need("cifar10")
    data = load("cifar10")
    assert [len(part) for part in data.parts.values()] == [45_000, 5_000, 10_000]
    assert torch.bincount(torch.cat([data.train.labels, data.validation.labels])).tolist() == [5000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10
    published = CIFAR10.published
    assert torch.tensor(data.normalisation.mean).allclose(torch.tensor(published.mean), atol=2e-3)
    assert torch.tensor(data.normalisation.std).allclose(torch.tensor(published.std), atol=2e-3)
