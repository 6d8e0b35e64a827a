"""Times of the exact and sparse posteriors against softmax attention and their slow references.

Prints ratios measured in the same run; absolute times mean little between machines.  `gpattention bench cpu`
has the same table.
"""

from gpattention.cli.bench import posteriors_table
from gpattention.experiments.bench_posteriors import bench_posteriors

if __name__ == "__main__":
    print(posteriors_table(bench_posteriors()))
