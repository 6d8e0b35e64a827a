"""One pass by moments beside 100 draws: digits models of several seeds, trained here, and what a pass costs.

    python benchmarks/moments.py --write results/draws            direct attention, seeds 0, 1 and 2
    python benchmarks/moments.py --kinds direct cgp --seeds 0 1 2 --kernel-epochs 10 --epochs 20
    python benchmarks/moments.py --kinds --encoder --device cuda      PyTorch's encoder alone, on a GPU

Models are those of `gpattention demo`, with a schedule of its own.  On the test images, and on others under
shifts that are no corruptions: accuracy, NLL and ECE of 100 draws, of the mean, and of moments; the ratio of
the logits' variance by moments to that of the draws, and Spearman's correlation of the two over items.  Time
is the least of several turns, in plain passes of the same images; so is that of an `nn.TransformerEncoder`
of BERT-base's size, 8 x 128 tokens, of which every layer draws.
"""

import argparse
import json
import platform
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from signals import graph_times, least_times, peak_memory, print_kernels
from torch import Tensor, nn

import gpattention
from gpattention.evaluation import ItemSet, run_sets, shifted_items
from gpattention.hosts import Handle
from gpattention.metrics import accuracy, ece, nll
from gpattention.models import Prediction
from gpattention.runs.folder import open_run
from gpattention.studies.demo import demo_recipe
from gpattention.training import train_recipe

CPU, DRAWS, DATE = torch.device("cpu"), 100, "2026-11-19"


class Classifier(nn.Module):
    """An encoder of BERT-base's size that reads embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(768, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, E] -> [B, C]"""
        logits: Tensor = self.head(self.encoder(x)[:, 0])
        return logits


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's."""
    ranks = torch.stack([each.argsort().argsort().double() for each in (x, y)])
    return float(ranks.corrcoef()[0, 1])


def compared(model: Any, items: ItemSet) -> dict[str, float]:
    """Moments beside draws on one set."""
    inputs, labels = items.inputs(0, len(items), CPU), items.labels
    assert labels is not None
    draws, mean = model.predict(inputs, samples=DRAWS), model.predict(inputs, samples=0)
    moments = model.predict(inputs, method="moments")
    found: dict[str, float] = {}
    named: dict[str, Prediction] = {"draws": draws, "mean": mean, "moments": moments}
    for name, prediction in named.items():
        for metric in (accuracy, nll, ece):
            found[f"{metric.__name__} {name}"] = metric(prediction.probs.double(), labels)
    assert moments.logit_variance is not None
    ours, theirs = moments.logit_variance.sum(-1), draws.logits.var(0).sum(-1)  # [B]
    found["variance ratio"] = float((ours / theirs).median())
    found["rank correlation"] = rank_correlation(ours, theirs)
    found["entropy correlation"] = rank_correlation(moments.entropy, draws.entropy)
    return found


def passes(plain: Callable[[], Any], moments: Callable[[], Any], repeats: int, device: str = "cpu") -> float:
    """Plain passes that one by moments takes."""
    times = least_times({"plain": plain, "moments": moments}, repeats, device)
    return times["moments"] / times["plain"]


def encoder_facts(repeats: int, device: str, kernels: bool) -> dict[str, Any]:
    """Plain passes that PyTorch's encoder takes by moments, and on a GPU the peak of memory."""
    torch.manual_seed(0)
    model, x = Classifier().eval().to(device), torch.randn(8, 128, 768).to(device)
    handle = gpattention.attach(model)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: handle.predict(x, samples=0),
        "moments": lambda: handle.predict(x, method="moments"),
    }
    if device == "cpu":
        return {"encoder_plain_passes": passes(*calls.values(), repeats, device)}
    for name, call in calls.items() if kernels else ():
        print_kernels(name, call)
    facts: dict[str, Any] = {"encoder_peak_mib": {n: peak_memory(call, device) for n, call in calls.items()}}
    handle.settings = handle.settings.to(device)  # nothing is moved in a graph
    for name, mode in (("moments, every kernel", "on"), ("moments, no kernel", "off")):
        calls[name] = partial(in_mode, mode, calls["moments"])
    graphs = {
        "plain, graphed": graph_of(handle, x, samples=0),
        "moments, graphed": graph_of(handle, x, method="moments"),
        "moments, every kernel, graphed": graph_of(handle, x, "on", method="moments"),
    }
    times = least_times(calls, repeats, device) | graph_times(graphs, repeats, device)
    for name, seconds in times.items():
        print(f"  {name:32s} {1e3 * seconds:7.2f} ms  {seconds / times['plain']:6.2f} passes")
    ratios = {name: seconds / times["plain"] for name, seconds in times.items()}
    return {"encoder_plain_passes": ratios.pop("moments"), "encoder_ratios": ratios, **facts}


def in_mode(mode: Any, call: Callable[[], Any]) -> Any:
    """A call with fused kernels on or off."""
    with gpattention.gp.fused_kernels(mode):
        return call()


def graph_of(handle: Handle, x: Tensor, mode: str = "auto", **options: Any) -> tuple[Any, tuple[Tensor]]:
    """A prediction as a CUDA graph, and what it is called with."""

    def logits(x: Tensor) -> Tensor:
        found: Any = in_mode(mode, lambda: handle.predict(x, **options))
        return found.logits

    return gpattention.graphed(logits, x), (x,)


def main() -> None:
    """Train, compare, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", default=["direct"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--kernel-epochs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--items", type=int, default=300, help="of either set")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--encoder", action="store_true", help="also time PyTorch's encoder")
    parser.add_argument("--device", default="cpu", help="of PyTorch's encoder")
    parser.add_argument("--beside", type=Path, help="folder of an earlier record of PyTorch's encoder")
    parser.add_argument("--kernels", action="store_true", help="what takes the GPU's time")
    parser.add_argument("--write", type=Path, help="folder of the record")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in given.kinds:
        seen: dict[str, list[float]] = defaultdict(list)
        for seed in given.seeds:
            recipe = demo_recipe(kind, kernel_epochs=given.kernel_epochs, epochs=given.epochs, seed=seed)
            with tempfile.TemporaryDirectory() as folder:
                train_recipe(recipe, Path(folder) / "run")
                run = open_run(Path(folder) / "run")
                sets = run_sets(run, limit=given.items)
                for name, items in (
                    ("test", sets.test),
                    ("shifted", shifted_items(sets.validation.first(40)).spread(given.items)),
                ):
                    for what, number in compared(run.model, items).items():
                        seen[f"{name}: {what}"].append(number)
                model, x = run.model, sets.test.inputs(0, 256, CPU)
                plain, moments = (
                    lambda model=model, x=x: model.predict(x, samples=0),
                    lambda model=model, x=x: model.predict(x, method="moments"),
                )
                seen["plain passes"].append(passes(plain, moments, given.repeats))
            print(
                f"{kind}, seed {seed}", {name: round(each[-1], 3) for name, each in seen.items()}, flush=True
            )
        for name, each in seen.items():
            error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
            rows.append({"kind": kind, "what": name, "mean": statistics.fmean(each), "error": error})
            print(f"{kind:8s} {name:32s} {statistics.fmean(each):7.3f} ± {error or float('nan'):.3f}")
    facts: dict[str, Any] = {"seeds": given.seeds, "kernel_epochs": given.kernel_epochs}
    facts |= {"epochs": given.epochs, "items": given.items, "draws": DRAWS, "torch": torch.__version__}
    facts |= {"machine": platform.machine(), "threads": 1, "date": DATE}
    if given.encoder:
        facts |= {"device": given.device, **encoder_facts(given.repeats, given.device, given.kernels)}
        told = ", ".join(f"{name} {x:.0f} MiB" for name, x in facts.get("encoder_peak_mib", {}).items())
        ratio = facts["encoder_plain_passes"]
        if given.beside is not None:
            before = json.loads((given.beside / f"moments-encoder-{given.device}.json").read_text())
            told += f"; before: {before['encoder_plain_passes']:.2f} plain passes"
        print(f"nn.TransformerEncoder of BERT-base's size: {ratio:.2f} plain passes {told}")
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        name = "moments" if given.kinds else f"moments-encoder-{given.device}"
        (given.write / f"{name}.json").write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
