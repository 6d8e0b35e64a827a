"""Many runs on many machines: tasks of a Ray cluster in the place of processes of this machine.

>>> from gpattention.studies.ray_cluster import ray_cluster
>>> with ray_cluster(["/shared/runs"], jobs=8, device="cuda") as cluster:
...     run_sweep(recipe, over, jobs=8, folder="/shared/runs", device=cluster.device, engine=cluster)

A task is a process of its own on its node, started as on one machine; what it writes lies in the shared
folders, and nothing else travels.  That every node sees these, with the same packages, is checked first.
"""

import os
import platform
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil, floor
from multiprocessing import parent_process
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

import gpattention
from gpattention.checks import check_choice
from gpattention.files import StrPath, make_folder
from gpattention.studies.scheduler import GRACE, Died, Lost, Work, Worker, side_by_side
from gpattention.training.folder import PATIENCE

DEVICES = ("auto", "cpu", "cuda")
LEASE = 120.0  # seconds after which a file server has given up the locks of a lost machine
SEEN = 10.0  # seconds that what a node wrote may take until it is seen here
PROBE = ".node-check-"  # how files of the check of shared folders begin


class ClusterError(OSError):
    """A node is not what the work needs.

    Attributes:
        node: its address.
        field: what is wrong there: gpattention, torch, python, reads, writes, data.
        value: what it is.
        expected: what it should be.
    """

    def __init__(self, node: str, field: str, value: object, expected: object) -> None:
        super().__init__(f"node {node}: expected {field} to be {expected}, got {value}")
        self.node, self.field, self.value, self.expected = node, field, value, expected


@dataclass(eq=False)
class _Remote(Worker):
    """A task on some node."""

    reference: Any


class RayEngine:
    """An `Engine` of the scheduler whose processes run on the nodes of a cluster.

    Args:
        jobs: tasks at once.
        device: auto, cpu or cuda; auto is cuda where any node has a GPU.
        gpus: GPUs of all nodes together.

    Raises:
        ValueError: another device, or cuda without a GPU in the cluster.
    """

    def __init__(self, jobs: int, device: str, gpus: float) -> None:
        check_choice("the device of a cluster", device, DEVICES)
        self.device = ("cuda" if gpus else "cpu") if device == "auto" else device
        if self.device == "cuda" and not gpus:
            raise ValueError("expected nodes with a GPU for the device cuda, got none in the cluster")
        self.share = gpu_share(jobs, gpus) if self.device == "cuda" else 0.0
        # a process adds up its sums as one of this machine would: in as many threads
        self._threads = torch.get_num_threads()

    def start(self, work: Work, slot: int, task: Any, fresh: bool, tries: int) -> _Remote:
        """Give a task to the cluster, which begins it where its share is free."""
        import ray

        remote = ray.remote(max_retries=0, num_cpus=1, num_gpus=self.share)(_on_node)
        reference = remote.remote(work, task, self._threads if fresh else 1, tries)
        return _Remote(slot, task, time.monotonic(), reference)

    def answers(self, workers: Sequence[_Remote], seconds: float) -> Iterator[tuple[_Remote, bool, Any]]:
        """Wait so long for tasks that are done."""
        import ray

        ready, _ = ray.wait([worker.reference for worker in workers], timeout=seconds)
        for worker in [each for each in workers if each.reference in ready]:
            yield worker, True, _answer(worker.reference)

    def stop(self, worker: _Remote) -> None:
        """Ask a task to save what it trains; one that has not begun never will."""
        import ray

        ray.cancel(worker.reference)

    def end(self, workers: Sequence[_Remote]) -> None:
        """Ask all and wait; what does not end is ended."""
        import ray

        for worker in workers:
            self.stop(worker)
        if workers:
            references = [worker.reference for worker in workers]
            _, left = ray.wait(references, num_returns=len(references), timeout=2 * GRACE)
            for reference in left:
                ray.cancel(reference, force=True)


def gpu_share(jobs: int, gpus: float) -> float:
    """Of one GPU, what each of so many tasks at once may have; a task never has several.

    >>> gpu_share(8, 8), gpu_share(12, 8), gpu_share(1, 8)
    (1.0, 0.5, 1.0)
    """
    return floor(1e4 / max(1, ceil(jobs / gpus))) / 1e4  # Ray counts in ten-thousandths


def _answer(reference: Any) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError

    try:
        return ray.get(reference)
    except TaskCancelledError:
        return Died(-signal.SIGTERM)
    except RayTaskError:  # of ours, before or after the work: whoever works gives failures as answers
        raise
    except (
        RayError
    ) as lost:  # a node, its network, or its worker for want of memory: from afar they look alike
        return Lost(next(iter(str(lost).strip().splitlines()), type(lost).__name__))


# On a node


def _on_node(work: Work, task: Any, threads: int, tries: int) -> Any:
    """A task in a process as one machine starts it; Ray's interrupt asks it to save and stop."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray's is one for each CPU that it reserves
    inside = partial(_in_process, work, threads, tries)
    return next(
        (answer for _, answer, _ in side_by_side(inside, [task], 1, fresh=True)), Died(-signal.SIGTERM)
    )


def _in_process(work: Work, threads: int, tries: int, task: Any, slot: int) -> Any:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if tries:
        PATIENCE.set(LEASE)
    return work(task, slot)


def _end_with_parent() -> None:
    """A node that lost its cluster must not go on writing beside the one that took its task over."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# Before any work


@contextmanager
def ray_cluster(
    folders: Iterable[StrPath], *, jobs: int, device: str = "auto", data: StrPath | None = None
) -> Iterator[RayEngine]:
    """Connect to the cluster of RAY_ADDRESS, else to one that runs here or is made here; check its nodes.

    Args:
        folders: what the tasks read and write; they must be shared by all nodes under the same path.
        jobs: tasks at once, among which the GPUs are divided.
        device: auto, cpu or cuda.
        data: folder of the datasets, where one is needed.

    Yields:
        What `side_by_side`, `run_sweep`, `train_plan` and `evaluate_plan` take as their engine.

    Raises:
        ImportError: Ray is not installed.
        ClusterError: a node cannot do the work.
        ValueError: a device that the cluster does not have.
    """
    try:
        import ray.exceptions  # not ray alone: any folder of that name would do
    except ImportError as error:
        raise ImportError("a cluster needs Ray: pip install 'gpattention[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(log_to_driver=False)
    try:
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        engine = RayEngine(jobs, device, float(ray.cluster_resources().get("GPU", 0)))
        for folder in dict.fromkeys(Path(folder).absolute() for folder in folders):
            check_nodes(nodes, folder, data)
        yield engine
    finally:
        if ours:
            ray.shutdown()


def check_nodes(nodes: Mapping[str, str], folder: Path, data: StrPath | None = None) -> None:
    """Refuse nodes with other packages, or that do not see a folder as this process does.

    Every node reads what this process wrote and writes what this process reads, in small files that are
    removed again.

    Args:
        nodes: their addresses by their identities.
        folder: made if it is not there.
        data: folder of the datasets.

    Raises:
        ClusterError: the first thing that is wrong.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    make_folder(folder)
    ours, token = folder / f"{PROBE}{uuid4().hex}", uuid4().hex
    ours.write_text(token)
    try:
        remote = ray.remote(max_retries=0, num_cpus=0)(probe_node)
        asked = {}
        for node, address in nodes.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            theirs = ours.with_name(f"{ours.name}-{node}")
            place = None if data is None else str(Path(data).absolute())
            asked[address, theirs] = remote.options(scheduling_strategy=there).remote(ours, theirs, place)
        for (address, theirs), reference in asked.items():
            try:
                found = ray.get(reference)
            except ray.exceptions.RayError as error:  # its own words name the module that is missing, perhaps
                last = str(error).strip().splitlines()[-1]
                raise ClusterError(address, "gpattention", last, gpattention.__version__) from error
            check_probe(address, found, token, theirs, data)
    finally:
        for file in folder.glob(f"{ours.name}*"):
            with suppress(OSError):
                file.unlink()


def probe_node(ours: Path, theirs: Path, data: str | None) -> dict[str, str]:
    """What a node has and sees; it writes what it read where the one that asks will look.

    Args:
        ours: a file that the one that asks has written.
        theirs: the file to write.
        data: folder of the datasets.

    Returns:
        Versions, what was read, what came of writing, and whether the data are there.
    """
    found = {**_versions(), "reads": "", "writes": "", "data": ""}
    deadline = time.monotonic() + SEEN
    while not found["reads"]:
        try:
            found["reads"] = ours.read_text()
            theirs.write_text(found["reads"])
        except OSError as error:
            failed = "writes" if found["reads"] else "reads"
            found[failed] = f"{type(error).__name__}: {error}"
            if failed == "writes" or time.monotonic() > deadline:
                break
            found["reads"] = ""
            time.sleep(0.2)
    if data is not None and not Path(data).is_dir():
        found["data"] = "no such folder"
    return found


def check_probe(
    node: str, found: Mapping[str, str], token: str, theirs: Path, data: StrPath | None = None
) -> None:
    """Compare what a node answered with what it should be.

    Args:
        node: its address.
        found: answer of `probe_node`.
        token: what stood in the file that it was to read.
        theirs: the file that it was to write.
        data: folder of the datasets.

    Raises:
        ClusterError: the first difference.
    """
    for field, expected in _versions().items():
        if found[field] != expected:
            raise ClusterError(node, field, found[field], f"{expected}, as here")
    if found["reads"] != token:
        raise ClusterError(node, "reads", found["reads"] or "nothing", f"what was written to {theirs.parent}")
    if found["writes"]:
        raise ClusterError(node, "writes", found["writes"], f"possible in {theirs.parent}")
    deadline = time.monotonic() + SEEN
    while not theirs.is_file():
        if time.monotonic() > deadline:
            raise ClusterError(node, "writes", "a file that is not seen here", f"shared in {theirs.parent}")
        os.listdir(theirs.parent)  # a file server's client looks anew
        time.sleep(0.2)
    if found["data"]:
        raise ClusterError(node, "data", found["data"], f"the folder {data}")


def _versions() -> dict[str, str]:
    found = {"gpattention": gpattention.__version__, "torch": torch.__version__}
    return {**found, "python": platform.python_version()}
