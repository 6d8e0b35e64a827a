"""Running means of variances, against sums written by hand."""

import torch

from gpattention.models.variance_means import VarianceMeans

CPU = torch.device("cpu")


def test_rows_are_added_to_their_items() -> None:
    told = VarianceMeans(3, 2, CPU)
    told.add(torch.tensor([0, 0, 1]), [None, torch.tensor([[1.0], [3.0], [5.0]])])
    told.add(torch.tensor([1, 2, 2]), [None, torch.tensor([[7.0], [2.0], [4.0]])])
    assert told.means()[0] is None
    assert told.means()[1].tolist() == [[2.0], [6.0], [3.0]]


def test_half_precision_is_summed_in_single_and_double_stays() -> None:
    for given, kept in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        told = VarianceMeans(1, 300, CPU)
        for _ in range(300):  # in bfloat16 the sum would stay at 256
            told.add(torch.tensor([0]), [torch.ones(1, 2, dtype=given)])
        assert told.means()[0].dtype == kept
        assert told.means()[0].tolist() == [[1.0, 1.0]]
