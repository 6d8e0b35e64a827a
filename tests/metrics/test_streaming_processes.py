"""Two processes with unequal shares, and one without any, give what one process gives."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gpattention import metrics
from gpattention.metrics import streaming
from tests.metrics.problems import CASES, SCORES
from tests.metrics.test_streaming import CLOSE, OF_ITEMS, OF_SCORES, labelled

CASES_HERE = ("ties", "ten")
SCORES_HERE = ("ties",)
SHARES = {"unequal": ((0, 17), (17, None)), "none for the first": ((0, 0), (0, None))}
BATCH = 9


def run(metric, tensors, share: tuple[int, int | None]):
    """The value on one process, which sees its share in batches."""
    parts = [tensor[slice(*share)] for tensor in tensors]
    if len(parts[0]):
        for batch in zip(*(part.split(BATCH) for part in parts), strict=True):
            metric.update(*batch)
    return metric.compute()


def one_process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        found = {}
        for kind, shares in SHARES.items():
            for case in CASES_HERE:
                for name, (build, _) in OF_ITEMS.items():
                    metric = build(CASES[case][0].shape[1])
                    found[kind, case, name] = run(metric, CASES[case], shares[rank])
            for case in SCORES_HERE:
                for name, (build, _) in OF_SCORES.items():
                    found[kind, case, name] = run(build(), labelled(case), shares[rank])
            bins = run(streaming.Reliability(), CASES["ties"], shares[rank])
            found[kind, "ties", "reliability"] = bins
        metric = streaming.AURC()  # goes on after a synchronisation
        probs, labels = CASES["ten"]
        run(metric, (probs[:100], labels[:100]), ((0, 60), (60, None))[rank])
        found["resumed"] = run(metric, (probs[100:], labels[100:]), ((0, 60), (60, None))[rank])
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_processes_agree_with_the_whole(tmp_path: Path) -> None:
    mp.spawn(one_process, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for kind in SHARES:
            for case in CASES_HERE:
                for name, (_, function) in OF_ITEMS.items():
                    expected = function(*CASES[case])
                    assert float(found[kind, case, name]) == pytest.approx(expected, **CLOSE), (
                        kind,
                        case,
                        name,
                    )
            for case in SCORES_HERE:
                for name, (_, function) in OF_SCORES.items():
                    assert float(found[kind, case, name]) == function(*SCORES[case]), (kind, case, name)
            bins = metrics.reliability_bins(*CASES["ties"])
            for field, value in found[kind, "ties", "reliability"].items():
                torch.testing.assert_close(value, getattr(bins, field), rtol=1e-13, atol=0, equal_nan=True)
        assert float(found["resumed"]) == pytest.approx(metrics.aurc(*CASES["ten"]), **CLOSE)
