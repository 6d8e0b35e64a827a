"""Streaming metrics give what their functions give, however batches and processes share the items."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchmetrics
from torch import Tensor
from torch.testing import assert_close

from gpattention import metrics
from gpattention.metrics import streaming
from tests.metrics.problems import CASES, SCORES, coarse, predictions
from tests.refusals import refusals

OF_ITEMS: dict[str, tuple[Callable, Callable]] = {
    "accuracy": (lambda classes: streaming.Accuracy(), metrics.accuracy),
    "mcc": (streaming.MCC, metrics.mcc),
    "nll": (lambda classes: streaming.NLL(), metrics.nll),
    "brier": (lambda classes: streaming.Brier(), metrics.brier),
    "ece": (lambda classes: streaming.ECE(), metrics.ece),
    "mce": (lambda classes: streaming.MCE(), metrics.mce),
    "ece10": (lambda classes: streaming.ECE(bins=10), lambda p, y: metrics.ece(p, y, bins=10)),
    "classwise": (streaming.ClasswiseECE, metrics.classwise_ece),
    "adaptive": (lambda classes: streaming.AdaptiveECE(), metrics.adaptive_ece),
    "aurc": (lambda classes: streaming.AURC(), metrics.aurc),
}

OF_SCORES: dict[str, tuple[Callable, Callable]] = {
    "auroc": (streaming.AUROC, metrics.auroc),
    "aupr_in": (streaming.AUPRIn, metrics.aupr_in),
    "aupr_out": (streaming.AUPROut, metrics.aupr_out),
    "fpr": (streaming.FPRAtTPR, metrics.fpr_at_tpr),
    "fpr80": (
        lambda: streaming.FPRAtTPR(tpr=0.8, positive="out"),
        lambda i, o: metrics.fpr_at_tpr(i, o, tpr=0.8, positive="out"),
    ),
}

CLOSE = {"rel": 1e-13, "abs": 1e-15}


def labelled(case: str) -> tuple[Tensor, Tensor]:
    """Scores [n + m], mixed, and which are outside."""
    inside, outside = SCORES[case]
    scores = torch.cat([inside, outside])
    marks = torch.arange(len(scores)) >= len(inside)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
    return scores[order], marks[order]


def fed(metric, *tensors: Tensor, size: int = 13):
    """The metric after items in batches."""
    for batch in zip(*(x.split(size) for x in tensors), strict=True) if len(tensors[0]) else ():
        metric.update(*batch)
    return metric


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OF_ITEMS)
def test_splits_of_items_do_not_matter(name: str, case: str) -> None:
    (build, function), (probs, labels) = OF_ITEMS[name], CASES[case]
    for size in (1, 13, 1000):
        value = fed(build(probs.shape[1]), probs, labels, size=size).compute()
        assert (value.shape, value.dtype) == ((), torch.float64)
        assert float(value) == pytest.approx(function(probs, labels), **CLOSE)


@pytest.mark.parametrize("case", SCORES)
@pytest.mark.parametrize("name", OF_SCORES)
def test_splits_of_scores_do_not_matter(name: str, case: str) -> None:
    build, function = OF_SCORES[name]
    for size in (1, 13, 1000):
        assert float(fed(build(), *labelled(case), size=size).compute()) == function(*SCORES[case])


def test_reliability_bins_and_another_certainty() -> None:
    probs, labels = coarse(100, 3)
    found = fed(streaming.Reliability(bins=10), probs, labels, size=7).compute()
    expected = vars(metrics.reliability_bins(probs, labels, bins=10))
    assert_close(found, expected, rtol=1e-13, atol=0, equal_nan=True)
    probs, labels = predictions(50, 3)
    certainty = -torch.special.entr(probs).sum(-1)
    found = fed(streaming.AURC(), probs, labels, certainty, size=8).compute()
    assert float(found) == metrics.aurc(probs, labels, certainty=certainty)


@pytest.mark.parametrize("name", OF_ITEMS)
class TestAsTorchmetrics:
    def test_forward_tells_the_batch_and_keeps_the_whole(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["ten"]
        metric = build(10)
        for p, y in zip(probs.split(100), labels.split(100), strict=True):
            assert float(metric(p, y)) == pytest.approx(function(p, y), **CLOSE)
        assert float(metric.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_reset_rounding_empty_batches_copies_and_pickles(self, name: str) -> None:
        (build, function), (probs, labels) = OF_ITEMS[name], CASES["three"]
        metric = build(3).half().float().to("cpu")  # a model in half precision does not round the states
        metric.update(*predictions(20, 3, seed=77))
        metric.reset()
        for part in (slice(0, 0), slice(0, 50), slice(50, 50)):  # empty ones add nothing
            metric.update(probs[part], labels[part])
        for again in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
            again.update(probs[50:], labels[50:])
            assert float(again.compute()) == pytest.approx(function(probs, labels), **CLOSE)

    def test_nothing_and_bad_batches_are_refused(self, name: str) -> None:
        metric = OF_ITEMS[name][0](3)
        metric.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"at least one item before compute\(\), got 0"):
            metric.compute()
        with pytest.raises(ValueError, match="labels from 0 to 2, got 3"):
            metric.update(torch.eye(3), torch.tensor([0, 1, 3]))


def test_a_collection_shares_the_states() -> None:
    probs, labels = CASES["ten"]
    names = ("accuracy", "nll", "ece", "mce", "aurc")
    group = torchmetrics.MetricCollection({name: OF_ITEMS[name][0](10) for name in names})
    for p, y in zip(probs.split(64), labels.split(64), strict=True):
        group.update(p, y)
    assert ["ece", "mce"] in group.compute_groups.values()
    for name, value in group.compute().items():
        assert float(value) == pytest.approx(OF_ITEMS[name][1](probs, labels), **CLOSE)


def test_sums_stay_small_and_exact() -> None:
    """Sum states do not grow, and a float32 sum of so many would be off in the fourth digit."""
    metric = streaming.NLL()
    probs = torch.tensor([[0.9, 0.1]]).expand(100_000, 2)
    for _ in range(30):
        metric.update(probs, torch.zeros(100_000, dtype=torch.int64))
    expected = -float(torch.tensor(0.9).double().log())
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-12)
    assert all(getattr(metric, name).numel() == 1 for name in metric._defaults)


GOOD = torch.zeros(3)
test_refusals = refusals([
    (lambda: streaming.ECE(bins=0), "bins to be a whole number >= 1", "0"),
    (lambda: streaming.AdaptiveECE(bins=0), "bins to be a whole number >= 1", "0"),
    (lambda: streaming.MCC(0), "classes to be a whole number >= 1", "0"),
    (lambda: streaming.ClasswiseECE(0), "classes to be a whole number >= 1", "0"),
    (lambda: streaming.FPRAtTPR(tpr=2), r"tpr in \(0, 1\]", "2"),
    (lambda: streaming.FPRAtTPR(positive="id"), "positive to be one of in, out", "id"),
    (lambda: streaming.MCC(4).update(*predictions(5, 3)), "probs of 4 classes", "3"),
    (lambda: streaming.ClasswiseECE(4).update(*predictions(5, 3)), "probs of 4 classes", "3"),
    (lambda: streaming.AUROC().update(GOOD, GOOD.long()), r"outside to be bool of shape \[3\]", "int64"),
    (lambda: streaming.AUROC().update(GOOD * torch.nan, GOOD > 0), "scores that can be ranked", "3 NaN of 3"),
    (lambda: fed(streaming.AUROC(), GOOD, GOOD > 0).compute(), "scores_out of at least 1 items", "0"),
])  # fmt: skip


# --- two processes with unequal shares, and one without any, give what one process gives --------------------

SHARES = {"unequal": ((0, 17), (17, None)), "none for the first": ((0, 0), (0, None))}


def problems() -> dict[tuple[str, str], tuple[Callable, tuple[Tensor, Tensor], float]]:
    """(case, metric) -> how it is made, its items, and its value on all of them."""
    of_items = {
        (case, name): (lambda b=build, c=case: b(CASES[c][0].shape[1]), CASES[case], function(*CASES[case]))
        for case in ("ties", "ten")
        for name, (build, function) in OF_ITEMS.items()
    }
    of_scores = {n: (build, labelled("ties"), f(*SCORES["ties"])) for n, (build, f) in OF_SCORES.items()}
    return of_items | {("ties", name): problem for name, problem in of_scores.items()}


def one_process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        found = {}
        for kind, shares in SHARES.items():
            mine = slice(*shares[rank])
            for key, (build, tensors, _) in problems().items():
                found[kind, *key] = fed(build(), *(x[mine] for x in tensors), size=9).compute()
            ties = fed(streaming.Reliability(), *(x[mine] for x in CASES["ties"]), size=9)
            found[kind, "reliability"] = ties.compute()
        metric = streaming.AURC()  # goes on after a synchronisation
        for part in (slice(100), slice(100, None)):
            mine = slice(60) if rank == 0 else slice(60, None)
            found["resumed"] = fed(metric, *(x[part][mine] for x in CASES["ten"]), size=9).compute()
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_processes_agree_with_the_whole(tmp_path: Path) -> None:
    mp.spawn(one_process, (str(tmp_path),), nprocs=2)
    bins = vars(metrics.reliability_bins(*CASES["ties"]))
    for found in (torch.load(tmp_path / f"{rank}.pt") for rank in range(2)):
        for kind in SHARES:
            for key, (_, _, expected) in problems().items():
                wanted = expected if key[1] in OF_SCORES else pytest.approx(expected, **CLOSE)
                assert float(found[kind, *key]) == wanted, (kind, key)
            assert_close(found[kind, "reliability"], bins, rtol=1e-13, atol=0, equal_nan=True)
        assert float(found["resumed"]) == pytest.approx(metrics.aurc(*CASES["ten"]), **CLOSE)
