"""Kernel attention as the paper's code computes it."""

from torch import Tensor

from gpattention.attention import KernelAttention
from gpattention.attention.base import Heads
from gpattention.experiments.bench.paper_gram import paper_gram


class PaperKernelAttention(KernelAttention):
    """Asymmetric rbf attention with its Gram matrix from a difference of every pair, per dimension."""

    def _mean(self, heads: Heads) -> Tensor:
        assert self.key is not None
        q, k = self._split(self.query(heads.queries)), self._split(self.key(heads.keys))
        return paper_gram(q, k) @ heads.v
