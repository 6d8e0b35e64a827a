"""What sparse attention sends when its tokens are spread over processes, and how long a call takes.

One module with its projections, learned inducing inputs, independent draws, forward and backward with the
regulariser; the sequence is cut evenly over gloo processes of one thread each.  For every process: tokens,
all-reduces and bytes of their payloads, forward and backward together, and the best time of a few calls.
On a GPU the processes share one device; a single one meets itself through NCCL.

    python benchmarks/sharding.py --processes 4 --tokens 65536
    python benchmarks/sharding.py --processes 1 --tokens 1048576 --device cuda --fused on
"""

import argparse
import tempfile
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from gpattention import gp
from gpattention.attention import build_attention
from gpattention.ops import ShardNoise, count_traffic


def payload(args: argparse.Namespace) -> int:
    """Bytes of one all-reduce by the formula of docs/scaling.md, for one inducing set, without row sums."""
    m, D = args.inducing, args.width
    return 4 * args.batch * args.heads * (3 * m**2 + m * D + 3)


def measure(rank: int, args: argparse.Namespace, group: Any) -> dict[str, float]:
    """One process's share of the work."""
    torch.manual_seed(0)
    width = args.heads * args.width
    module = build_attention(
        "scgp", embed_dim=width, num_heads=args.heads, num_inducing=args.inducing,
        normalize=args.normalize, regularizer=args.regularizer, device=args.device,
    )  # fmt: skip
    module.shard_tokens(group)
    first, end = (args.tokens * r // args.processes for r in (rank, rank + 1))
    seeded = torch.Generator().manual_seed(rank)
    x = torch.randn(args.batch, end - first, width, generator=seeded).to(args.device)
    items = torch.arange(args.batch, device=args.device)
    times = []
    for _ in range(args.repeats + 1):
        noise = ShardNoise(0, items, torch.zeros_like(items), first_token=first, tokens=args.tokens)
        dist.barrier(group)
        wait(args.device)
        start = time.perf_counter()
        with count_traffic() as traffic, gp.fused_kernels(args.fused):
            out = module(x, draw="independent", generator=noise, need=("output", "regularizer"))
            (out.output.square().mean() + out.regularizer).backward()
        wait(args.device)
        times.append(time.perf_counter() - start)
    best = min(times[1:])  # the first call warms up
    return {"tokens": end - first, "all-reduces": traffic.collectives, "bytes": traffic.payload, "s": best}


def wait(device: str) -> None:
    """Until all that was asked of a GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def one_process(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Meet the others, measure, and let the first print for all."""
    torch.set_num_threads(1)
    backend = "nccl" if args.device == "cuda" and args.processes == 1 else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=args.processes
    )
    try:
        rows: list[Any] = [None] * args.processes
        dist.all_gather_object(rows, measure(rank, args, dist.group.WORLD))
        if rank == 0:
            show(rows, args)
    finally:
        dist.destroy_process_group()


def show(rows: list[dict[str, float]], args: argparse.Namespace) -> None:
    """A line for each process, then the formula."""
    print("process   tokens   all-reduces   bytes   seconds")
    for rank, row in enumerate(rows):
        print(f"{rank:7d} {row['tokens']:8d} {row['all-reduces']:13d} {row['bytes']:7d} {row['s']:9.3f}")
    if args.normalize == "none" and args.fused != "on":
        print(f"formula: {payload(args)} bytes each way, {2 * payload(args)} together")


def main() -> None:
    """Read the sizes and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384, help="of each sequence, over all processes")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--inducing", type=int, default=16)
    parser.add_argument("--normalize", choices=("none", "rows"), default="none")
    parser.add_argument("--regularizer", choices=("dtc", "dtc_bound", "kl"), default="dtc")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fused", choices=("auto", "on", "off"), default="auto")
    args = parser.parse_args()
    if not 1 <= args.processes <= args.tokens:
        parser.error(f"expected between 1 process and one for each token, got {args.processes}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(one_process, (args, folder), nprocs=args.processes)


if __name__ == "__main__":
    main()
