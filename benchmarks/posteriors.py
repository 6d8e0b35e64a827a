"""Times of the exact and sparse posteriors against softmax attention and their slow references.

Prints ratios measured in the same run; absolute times mean little between machines.  `gpattention bench cpu`
has the same table.
"""

from gpattention.cli.bench import shown
from gpattention.studies.bench import bench_posteriors
from gpattention.studies.bench.words import posterior_table

if __name__ == "__main__":
    print(shown(posterior_table(bench_posteriors())))
