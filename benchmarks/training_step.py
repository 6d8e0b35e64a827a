"""One training step of our transformers against one of the paper's kernel attention, on this CPU.

The paper's configuration for CIFAR-10: depth 5, width 128, 4 heads, 64 tokens, batch 100, float32; a step
is forward, loss with regulariser and draws, backward and Adam.  The baseline builds its Gram matrix as the
paper's code does, by one broadcast difference [B, H, d, N, N]; that it computes the same attention as our
`kernel` module is checked.  The same as `gpattention bench step --device cpu`.
"""

import sys

from gpattention.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", "--device", "cpu"]))
