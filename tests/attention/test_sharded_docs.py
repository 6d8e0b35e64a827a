"""The guide's example runs in two processes, and the measuring command prints what the guide's tables say."""

import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import pytest

from gpattention.attention import build_attention
from tests.processes import in_processes

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs/scaling.md").read_text()


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def one_set(batch: int, heads: int, m: int, width: int) -> int:
    """Bytes of one all-reduce by the guide's formula for a common inducing set."""
    return 4 * batch * heads * (3 * m**2 + m * width + 3)


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    return str(block)


def run_example(rank: int, port: int) -> str:
    """As `torchrun` would, in a process of its own."""
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(meeting)
    with redirect_stdout(StringIO()) as output:
        exec(compile(example(), "docs/scaling.md", "exec"), {})
    return output.getvalue()


def test_the_example_runs(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for rank, output in enumerate(in_processes(partial(run_example, port=port), 2, tmp_path, meet=False)):
        assert output == f"process {rank}: 2 all-reduces of {one_set(3, 2, 16, 32)} bytes\n"


@pytest.mark.slow  # three interpreters start
def test_the_measuring_command() -> None:
    output = run("benchmarks/sharding.py", "--processes", "2", "--tokens", "257", "--repeats", "1")
    lines = [line.split() for line in output.splitlines()]
    assert [line[:4] for line in lines[1:3]] == [
        ["0", "128", "2", str(2 * one_set(1, 4, 16, 32))],
        ["1", "129", "2", str(2 * one_set(1, 4, 16, 32))],
    ]


def test_the_tables_agree_with_the_formula() -> None:
    each = one_set(1, 4, 16, 32)
    measured = [line for line in GUIDE.splitlines() if f"2 x {each:,}" in line and line.startswith("|")]
    assert len(measured) >= 4
    assert all(f"| {2 * each:,} |" in line for line in measured if "100 µs" not in line)
    rows = 4 * 4 * 16
    assert f"| {2 * (each + rows):,} | 2 x ({each:,} + {rows}) |" in GUIDE
    module = build_attention("scgp", embed_dim=128, num_heads=4, num_inducing=16, normalize="none")
    parameters = sum(p.numel() for p in module.parameters())
    assert f"{parameters:,}, that is {4 * parameters:,} bytes" in GUIDE
