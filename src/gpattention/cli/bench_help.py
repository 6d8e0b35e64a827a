"""What `gpattention bench --help` ends with."""

from gpattention.experiments.bench.lengths import MODELS
from gpattention.experiments.bench.variants import VARIANTS

EXAMPLES = """\
examples:
  gpattention bench step                          training steps of every kind on this machine
  gpattention bench length --device cuda          one module at growing lengths
  gpattention bench predict                       posterior samples of many images
  gpattention bench cpu                           a part of all on the CPU, in two minutes
  gpattention bench floor                         the least that a step can take
  gpattention bench plot results/bench            figures from numbers measured elsewhere

Times are those of one run, beside softmax attention and the paper's way of the same run.
`gpattention bench step --help` has more.
"""
STEP_EXAMPLES = f"""\
examples:
  gpattention bench step
  gpattention bench step --device cuda --out results/bench
  gpattention bench step --kinds softmax,cgp,scgp-16 --batch 50 --repeats 7
  gpattention bench step --device cuda --fused off --json plain.json

A step is forward, loss with draws and regulariser, backward, Adam, as a run makes it: on a GPU captured
as one graph, and profiled kernel by kernel. softmax and paper-kernel are always in the run. paper-* are
straight transcriptions of the paper's algorithm; exit code 1 if one of them does not compute what our
mathematics does.
kinds: {", ".join(VARIANTS)}
"""
LENGTH_EXAMPLES = f"""\
examples:
  gpattention bench length --device cuda --out results/bench
  gpattention bench length --device cpu --kinds scgp,softmax --longest 8192
  gpattention bench length --device cuda --kinds cgp,paper-cgp --repeats 3

One module with its projections, 4 heads of width 32, forward and backward. On a CPU every case has a
process of its own, whose resident memory is measured. A series ends where memory does.
kinds: {", ".join(MODELS)}
"""
PREDICT_EXAMPLES = """\
examples:
  gpattention bench predict --device cuda --out results/bench
  gpattention bench predict --images 500 --samples 20 --kinds softmax,cgp
  gpattention bench predict --device cuda --batch-size 256 --eager

model.predict on images that lie on the device: 10,000 of them on a GPU, 100 on a CPU. A kind that cannot
draw makes one pass.
"""
CPU_EXAMPLES = """\
examples:
  gpattention bench cpu
  gpattention bench cpu --batch 100 --repeats 5 --out results/bench

The posteriors alone at three lengths, training steps, and scgp up to 65,536 tokens with its memory.
"""
FLOOR_EXAMPLES = """\
examples:
  gpattention bench floor
  gpattention bench floor --kinds softmax,cgp --batch 25

Computed from the model's sizes, not measured; docs/benchmarks.md has the formulae.
"""
PLOT_EXAMPLES = """\
examples:
  gpattention bench plot results/bench

Draws what `bench length --out` measured on a machine without matplotlib.
"""
