"""A program for `torchrun`: the toy problem in several processes, one of which a test can kill.

torchrun --nproc-per-node 2 -m tests.training.many FOLDER ATTENTION [kill STEP | resume]
"""

import os
import signal
import sys

import torch

from gpattention.training import Progress, TrainingStoppedError, fit
from tests.training.toy import toy_data, toy_recipe


def main(folder: str, attention: str, what: str = "", step: str = "-1") -> None:
    """Train; rank 1 dies after a step if asked to, or rank 0 is asked to stop."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    data = toy_data()
    if what == "kill" and rank == 1:
        count = [0]

        def prepare(inputs, items, epoch):
            count[0] += 1
            if count[0] == int(step):
                os.kill(os.getpid(), signal.SIGKILL)
            return inputs

        data = type(data)(**{**vars(data), "prepare": prepare})

    def progress(p: Progress) -> None:
        if what == "stop" and p.step == int(step):
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = toy_recipe(attention, optimizer__keyed_dropout=True)
    try:
        fit(recipe, data, folder, resume=what == "resume", progress=progress)
    except TrainingStoppedError as stopped:
        sys.stdout.write(f"rank {rank}: {stopped}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
