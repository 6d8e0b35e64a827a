"""Seconds to corrupt 1,000 images of 32 x 32 pixels at all five severities, by corruption."""

import time

import torch

from gpattention.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt

IMAGES, SIDE = 1000, 32


def main() -> None:
    """Print a line for each corruption and the sum."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {IMAGES} images, 5 severities\n")
    total = 0.0
    for name in CORRUPTIONS:
        corrupt(images[:10], name, 1)  # warm
        start = time.perf_counter()
        for severity in SEVERITIES:
            corrupt(images, name, severity)
        seconds = time.perf_counter() - start
        total += seconds
        print(f"  {name:18s} {seconds:6.2f} s")
    print(f"  {'all':18s} {total:6.2f} s")


if __name__ == "__main__":
    main()
