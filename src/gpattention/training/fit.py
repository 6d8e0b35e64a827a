"""The paper's recipe: kernel attention first, then the Gaussian process from its weights, with draws.

A run is a folder: `recipe.json`, `metrics.csv`, `events.jsonl`, `checkpoints/`, and `model/` with the weights
chosen.  It can be killed at any time and goes on from its last checkpoint to the same numbers.

The kernel attention of phase 1 knows nothing of what phase 2 will be, so recipes that differ only there have
the same phase 1.  Every run keeps the state at its end in `first-phase/`: one run trains it, others go on
from there to the same bits.
"""

import math
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import torch
from torch.nn.functional import nll_loss

from gpattention.attention import Attention, attention_class
from gpattention.checks import check_keys
from gpattention.data import Batch
from gpattention.files import StrPath, make_folder
from gpattention.models import (
    AttentionConfig,
    TextConfig,
    TextTransformer,
    Transformer,
    VisionConfig,
    VisionTransformer,
    warm_start,
)
from gpattention.models.predict import count_items, take
from gpattention.runs import (
    Progress,
    Recipe,
    RegularizerRecipe,
    TrainingData,
    append_event,
    check_seed,
    prepare,
    read_recipe,
    save_preprocessing,
    write_metrics,
)
from gpattention.runs.recipe import flat
from gpattention.training.engine import (
    CaptureFailedError,
    EagerEngine,
    Engine,
    Feed,
    GraphEngine,
    Hardware,
    Objective,
    PhaseName,
    Schedule,
    StepFailedError,
    Sums,
    cast,
    is_leading,
    matmul_precision,
    repeat_step,
    start_fabric,
    why_no_graph,
)
from gpattention.training.folder import (
    FIRST_PHASE,
    TAKEN,
    CheckpointError,
    TrainingFailedError,
    TrainingStoppedError,
    check_new,
    check_resumed,
    disk_errors_explained,
    list_checkpoints,
    opened_folder,
    pack,
    put_state,
    random_states,
    read_checkpoint,
    unpack,
    write_checkpoint,
    write_run_recipe,
)

SAME_REQUEST = 2.0  # seconds: launchers pass a signal on to processes that the terminal has asked already
HEALTH_ITEMS = 64  # validation items the floor is watched on
LISTEN_EVERY = 20  # steps between two looks at the device, and at what other processes were asked


@dataclass(frozen=True)
class TrainingStep:
    """One step, for a progress bar; the loss of a captured step is known only from time to time.

    Attributes:
        step: how many are done.
        total: how many steps both phases have.
        epoch: counted from 0.
        phase: kernel or gp.
        loss: what was minimised.
        accuracy: accuracy of the last validation.
        alpha: weight of the regulariser.
        regularizer: its value, where there is one.
        examples_per_second: examples per second in this step.
    """

    step: int
    total: int
    epoch: int
    phase: PhaseName
    loss: float
    accuracy: float | None
    alpha: float
    regularizer: float | None
    examples_per_second: float


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Attributes:
        folder: folder of the run.
        model: with the weights chosen.
        rows: rows of metrics.csv.
    """

    folder: Path
    model: Transformer
    rows: tuple[dict[str, Any], ...]


class StopRequest:
    """While open, remembers the signal that asked to stop: SIGTERM or SIGINT; a second one stops at once.

    Attributes:
        asked: the signal's name; None if there was none.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._when = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for wanted in (signal.SIGTERM, signal.SIGINT):
                self._before[wanted] = signal.signal(wanted, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for wanted, handler in self._before.items():
            signal.signal(wanted, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.asked is None:
            self._when, self.asked = time.monotonic(), signal.Signals(number).name
        elif time.monotonic() - self._when > SAME_REQUEST:
            raise KeyboardInterrupt

    def asked_together(self, fabric: Any) -> bool:
        """Whether any process was asked to stop; all call it together, or one would wait for ever."""
        if fabric.world_size == 1:
            return self.asked is not None
        asked = torch.tensor(float(self.asked is not None), device=fabric.device)
        together = bool(fabric.all_reduce(asked, reduce_op="sum") > 0)
        if together and self.asked is None:
            self.asked = "another process"
        return together


@contextmanager
def tensorboard_rows(folder: Path, *, wanted: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that logs rows of `metrics.csv` to `RUN/tensorboard`, where that is wanted."""
    if not wanted:
        yield lambda row: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("TensorBoard logs need: pip install 'gpattention[train]'") from error
    writers: list[Any] = []

    def log(row: Mapping[str, Any]) -> None:
        if not writers:  # not before the folder is a run's; later points of an earlier try are dropped
            writers.append(SummaryWriter(str(folder / "tensorboard"), purge_step=row["step"]))
            closing.callback(writers[0].close)
        for name, value in row.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                writers[0].add_scalar(name, value, row["step"])
        writers[0].flush()

    with ExitStack() as closing:
        yield log


# Validation


@torch.no_grad()
def validate(fabric: Any, model: Transformer, data: TrainingData) -> tuple[float, float]:
    """Accuracy and NLL of the mean prediction, over all validation items.

    Every process predicts its share of the items; the sums are added, so that no share weighs more.
    """
    items = torch.arange(count_items(data.validation)).tensor_split(fabric.world_size)[fabric.global_rank]
    sums = torch.zeros(3, dtype=torch.float64)  # right, negative log-likelihood, items
    if len(items):  # a process may have no share of few items, and must add its zeros all the same
        device = next(model.parameters()).device
        prediction = model.predict(take(data.validation, items, device), samples=0)
        labels = data.validation_labels[items].to(prediction.label.device)
        right = (prediction.label == labels).double().sum()
        nll = nll_loss(prediction.log_probs.double(), labels, reduction="sum")
        sums = torch.stack([right, nll, torch.full_like(nll, len(items))]).cpu()
    if fabric.world_size > 1:
        sums = fabric.all_reduce(sums.to(fabric.device), reduce_op="sum").cpu()
    all_right, all_nll, count = sums.tolist()
    return all_right / count, all_nll / count


def floor_share(model: Transformer, data: TrainingData, step: int, limit: float) -> float | None:
    """How near the density of the layers' outputs is to its floor; warns of a collapse."""
    device = next(model.parameters()).device
    count = min(count_items(data.validation), HEALTH_ITEMS)
    health = model.health(take(data.validation, torch.arange(count), device))
    shares = [layer.floor_share for layer in health.layers if layer.floor_share is not None]
    if not shares:
        return None
    if max(shares) > limit:
        reached = f"a layer reaches {max(shares):.2f} of its noise floor at step {step}"
        advice = "the regulariser is collapsing the model, lower regularizer.end"
        warnings.warn(f"{reached}: {advice}", RuntimeWarning, stacklevel=2)
    return max(shares)


# Models of a recipe: the one it names, and the kernel-attention model it may start from


def build_model(recipe: Recipe, facts: Mapping[str, Any]) -> Transformer:
    """The model of phase 2.

    Args:
        recipe: names it.
        facts: what the data decides: classes, image_size, vocabulary, ...

    Returns:
        A new model, with weights from torch's random-number generator.

    Raises:
        ValueError: the recipe describes no model, or weights a regulariser that the model does not have.
    """
    attention = AttentionConfig(recipe.model.attention, recipe.model.options)
    model = _transformer(recipe, facts, attention)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if all(layer.regularizer == "none" for layer in layers):
        _refuse_weights(recipe)
    if recipe.data.group_by_length and any(layer.one_length for layer in layers):
        wanted = "data.group_by_length to be false, as this attention takes sequences of one length"
        raise ValueError(f"expected {wanted}, got true")
    return model


def build_kernel_model(recipe: Recipe, facts: Mapping[str, Any]) -> Transformer:
    """The model of phase 1: kernel attention that phase 2 can start from, tensor by tensor.

    Args:
        recipe: names the attention of phase 2.
        facts: what the data decides.

    Returns:
        A new model; of the recipe's own kind where it starts from no other.

    Raises:
        ValueError: the recipe describes no such model.
    """
    return _transformer(recipe, facts, kernel_config(recipe))


def kernel_config(recipe: Recipe) -> AttentionConfig:
    """Kernel attention that fits the recipe's kind; kinds without a warm start are their own phase 1."""
    kind, options = recipe.model.attention, recipe.model.options
    kernel = attention_class(kind).kernel_options(options)
    if kernel is not None:
        return AttentionConfig("kernel", {**kernel, **recipe.phases.kernel_options})
    if recipe.phases.kernel_options:
        wanted = f"phases.kernel_options to be empty for {kind!r} attention, which is its own first phase"
        raise ValueError(f"expected {wanted}, got {dict(recipe.phases.kernel_options)}")
    return AttentionConfig(kind, options)


def needs_warm_start(recipe: Recipe) -> bool:
    """Whether phase 2 has another model than phase 1.

    Args:
        recipe: recipe of a run.

    Returns:
        True for a kind of attention that starts from kernel attention.
    """
    return "kernel" in attention_class(recipe.model.attention).converts_from


def may_leave_unused(recipe: Recipe) -> bool:
    """Whether a step may use only some of the parameters, which DDP must then look for."""
    cls = attention_class(recipe.model.attention)
    ours = cls.__module__.startswith("gpattention.")
    alone = not needs_warm_start(recipe) and cls.draws  # its own phase 1, without draws
    short = recipe.model.options.get("exact_when_shorter")  # inducing inputs take no part in such a batch
    return recipe.phases.draw == "none" or alone or bool(short) or not ours


def _refuse_weights(recipe: Recipe) -> None:
    """A weight of nothing would look like a setting that was tried.  0 says that there is nothing, and the
    default stands in every recipe that does not speak of it.
    """
    given, usual = recipe.regularizer, RegularizerRecipe()
    allowed = {"start": (0.0, usual.start), "end": (0.0, usual.end), "normalised": (usual.normalised,)}
    for name, choices in allowed.items():
        if getattr(given, name) not in choices:
            words = " or ".join(f"{choice}" for choice in dict.fromkeys(choices))
            why = f"as {recipe.model.attention!r} attention has no regulariser"
            raise ValueError(f"expected regularizer.{name} to be {words}, {why}, got {getattr(given, name)}")


def _transformer(recipe: Recipe, facts: Mapping[str, Any], attention: AttentionConfig) -> Transformer:
    plain = {**facts, **recipe.model.config}
    below = _kind_below(recipe)
    config: Any = VisionConfig if recipe.model.type == "vision" else TextConfig
    names = set(config.__dataclass_fields__) - {"attention"}
    check_keys("model.config", plain, names)
    model: type[Any] = VisionTransformer if recipe.model.type == "vision" else TextTransformer
    shape = config(**plain, attention=attention)
    lower = attention if below is None else AttentionConfig(below)
    made: Transformer = model(replace(shape, attention=(lower,) * (shape.depth - 1) + (attention,)))
    return made


def _kind_below(recipe: Recipe) -> str | None:
    """The attention of all layers but the last, in both phases; None where it is that of the last."""
    kind = recipe.model.attention
    below = recipe.model.below or attention_class(kind).below
    return None if below == kind else below


def check_models(recipe: Recipe, facts: Mapping[str, Any]) -> None:
    """Refuse a recipe whose models cannot be built, before anything is written.

    On the meta device modules have no numbers: nothing is drawn and nothing takes memory.  Each model is
    built when its phase begins, from the random numbers of that moment.
    """
    with torch.device("meta"):
        for build in (build_kernel_model, build_model):
            try:
                build(recipe, facts)
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error):
                    raise  # else a third-party kind reads its own numbers: it will be built all the same


# A first phase that is taken over


def take_first_phase(recipe: Recipe, folder: StrPath, source: StrPath) -> None:
    """Make a run whose first phase is that of another run; resume it to train the second.

    Args:
        recipe: recipe of the new run.
        folder: folder of the new run.
        source: the other run.

    Raises:
        CheckpointError: the other run has not reached the end of its first phase.
        FileExistsError: the folder holds something already.
        FileNotFoundError: `source` is no run.
        ValueError: the two first phases would differ; the message says in what.
    """
    folder, source = Path(folder), Path(source)
    _check_same(recipe, read_recipe(source), source)
    kept = list_checkpoints(source / FIRST_PHASE)
    if not kept:
        raise CheckpointError(f"{source} has not reached the end of its first phase: no {FIRST_PHASE} in it")
    state = read_checkpoint(kept[-1])
    check_new(folder, taking=True)
    copies = ("checkpoints", FIRST_PHASE)
    for place in copies:  # of one that was killed here
        shutil.rmtree(folder / place, ignore_errors=True)
    make_folder(folder)
    (folder / "events.jsonl").unlink(missing_ok=True)
    # first: whoever is killed here leaves what is known for a copy
    append_event(folder, TAKEN, source=source.name, step=state.state["step"])
    for place in copies:
        write_checkpoint(folder / place, state.state["step"], state, keep=1)
    write_run_recipe(folder, recipe)


def first_phase(recipe: Recipe) -> dict[str, Any]:
    """Everything the first phase depends on.

    Args:
        recipe: recipe of a run.

    Returns:
        Values by the names of the recipe; equal for runs with the same first phase.
    """
    kernel, plain = kernel_config(recipe), recipe.to_dict()
    # the learning rate falls over both phases
    epochs = {} if recipe.optimizer.restart else {"phases.epochs": recipe.phases.epochs}
    return {
        "seed": recipe.seed,
        **flat({"data": plain["data"], "optimizer": plain["optimizer"]}),
        "model.type": recipe.model.type,
        **flat({"model.config": plain["model"]["config"], "options of phase 1": kernel.options}),
        "kind of phase 1": kernel.kind,
        "kind below": _kind_below(recipe),
        "phases.kernel_epochs": recipe.phases.kernel_epochs,
        **epochs,
    }


def _check_same(recipe: Recipe, other: Recipe, source: Path) -> None:
    if recipe.phases.kernel_epochs < 1:
        raise ValueError(f"no first phase: phases.kernel_epochs is {recipe.phases.kernel_epochs}")
    cold = [one.model.attention for one in (recipe, other) if not needs_warm_start(one)]
    if cold:
        raise ValueError(f"expected attention that starts from kernel attention, got {cold[0]!r}")
    own, theirs = first_phase(recipe), first_phase(other)
    for name in sorted(set(own) | set(theirs)):
        if own.get(name) != theirs.get(name):
            wanted = f"{name} to be {own.get(name)!r}, got {theirs.get(name)!r}"
            raise ValueError(f"the first phase of {source} is another one: expected {wanted}")


# Training


def fit(
    recipe: Recipe,
    data: TrainingData,
    folder: StrPath,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
    precision: str = "32-true",
    strategy: Any = "auto",
    graphs: bool = True,
    tensorboard: bool = False,
    progress: Callable[[TrainingStep], object] | None = None,
    on_validation: Callable[[Mapping[str, Any]], object] | None = None,
) -> TrainingResult:
    """Train a recipe on data to the end.

    Under `torchrun` or SLURM every process makes this call; together they train on the same batches as one
    process would.

    Args:
        recipe: what to train, and how.
        data: what to train on.
        folder: folder of the run.
        resume: go on from the last checkpoint.
        device: cpu, cuda, cuda:1, ... or auto.
        precision: one of `PRECISIONS`.
        strategy: one of Fabric's, for several processes.
        graphs: capture the step as a CUDA graph where that is possible.
        tensorboard: log beside `metrics.csv`.
        progress: called at every step, where rank 0 runs.
        on_validation: called with every row of `metrics.csv`, where rank 0 runs.

    Returns:
        The run's folder, the model chosen, and all rows.

    Raises:
        CheckpointError: there is nothing to resume, or it is of another recipe or damaged.
        FileExistsError: the folder holds something already, and `resume` is not set.
        RunInUseError: another process trains in the folder.
        TrainingFailedError: numbers broke, or the disk is full; the message says what is saved.
        TrainingStoppedError: SIGTERM or SIGINT asked for it; the state is saved.
        ValueError: the recipe does not fit the data.
    """
    check_models(recipe, data.facts)
    hardware = Hardware(device, precision, strategy, graphs)
    run = _Run(recipe, data, Path(folder), hardware, progress, on_validation)
    with (
        matmul_precision(hardware),
        tensorboard_rows(run.folder, wanted=tensorboard and run.leads) as log,
        opened_folder(run.folder, recipe, resume=resume, writes=run.leads),
    ):
        run.to_the_end(log, resume=resume)
    chosen = type(run.model).from_pretrained(run.folder / "model")
    return TrainingResult(run.folder, chosen, tuple(run.rows))


class _Run:
    """One run in progress, in one of its processes."""

    def __init__(
        self,
        recipe: Recipe,
        data: TrainingData,
        folder: Path,
        hardware: Hardware,
        progress: Callable[[TrainingStep], object] | None,
        on_validation: Callable[[Mapping[str, Any]], object] | None,
    ) -> None:
        self.recipe, self.folder, self.hardware = recipe, folder, hardware
        self.fabric = start_fabric(hardware, find_unused=may_leave_unused(recipe))
        rank, world_size = self.fabric.global_rank, self.fabric.world_size
        self.leads = rank == 0
        self.report, self.on_validation = (progress, on_validation) if self.leads else (None, None)
        self.dtype = torch.float64 if hardware.precision == "64-true" else torch.float32
        self.data = replace(data, validation=cast(data.validation, self.dtype))
        self.feed = Feed(recipe, data, self.fabric.device, self.dtype, rank, world_size)
        self.schedule = Schedule(recipe, self.feed.steps_per_epoch)
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.best = -math.inf
        self.sums = Sums()
        self.refusal: str | None = None  # why steps that could be captured are not

    def to_the_end(self, log: Callable[[Mapping[str, Any]], None], *, resume: bool) -> None:
        kept = list_checkpoints(self.folder / "checkpoints") if resume else []
        checkpoint = read_checkpoint(kept[-1]) if kept else None
        phase = self.schedule.phase(0) if checkpoint is None else self._restore(checkpoint.state)
        torch.manual_seed(
            self.recipe.seed
        )  # also when resumed: the model is built before its weights are put in
        self._enter(phase)
        if self.fabric.world_size > 1:  # dropout differs between processes, the first weights do not
            torch.manual_seed(self.recipe.seed * 1_000_003 + self.fabric.global_rank)
        if checkpoint is not None:
            unpack(checkpoint, self.model, self.engine.optimizer, self.fabric.global_rank)
            # without the rows after the checkpoint, which are computed once more
            self._write(write_metrics, self.folder, self.rows)
        if resume:
            self._event("resumed", step=self.step)
        try:
            with StopRequest() as stop:
                self._train(stop, log)
        except StepFailedError as failure:
            self._fail(failure)
        if self.recipe.checkpoint.select == "last":
            self._write(self.model.save_pretrained, self.folder / "model")
        self._event("finished", step=self.step)
        self.fabric.barrier()

    def _restore(self, state: Mapping[str, Any]) -> PhaseName:
        """Take over the counters of a checkpoint; returns its phase."""
        try:
            self.step, self.rows, self.sums = state["step"], state["rows"], Sums(**state["sums"])
            self.best = -math.inf if state["best"] is None else state["best"]
            phase: PhaseName = state["phase"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the last checkpoint of {self.folder} lacks {error}") from error
        return phase

    def _write(self, action: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call a function in the one process that writes."""
        if self.leads:
            with disk_errors_explained(self.folder):
                action(*arguments, **options)

    def _event(self, kind: str, **details: Any) -> None:
        self._write(append_event, self.folder, kind, **details)

    def _train(self, stop: StopRequest, log: Callable[[Mapping[str, Any]], None]) -> None:
        start, updates = time.perf_counter(), self.feed.updates(self.step)
        while self.step < self.schedule.total_steps:
            if self.step == self.schedule.kernel_steps and self.phase == "kernel":
                self._start_gp()
            self._update(next(updates))
            self._report(time.perf_counter() - start)
            start = time.perf_counter()
            epoch, within = divmod(self.step, self.schedule.steps_per_epoch)
            stopping = self._stopping(stop)
            if within == 0 and (epoch % self.recipe.checkpoint.every == 0 or epoch == self.recipe.epochs):
                self._validate(epoch, log)
                self._save()
            elif stopping:
                self._save()
            if stopping and self.step < self.schedule.total_steps:
                self._event("stopped", step=self.step, signal=stop.asked)
                raise TrainingStoppedError(f"stopped by {stop.asked} at step {self.step}; resume to go on")

    def _enter(self, phase: PhaseName) -> None:
        build = build_kernel_model if phase == "kernel" else build_model
        self.model = build(self.recipe, self.data.facts).to(self.fabric.device, self.dtype)
        self._set_up(phase)

    def _set_up(self, phase: PhaseName) -> None:
        """A fresh optimiser, and the engine that runs its steps."""
        self.phase: PhaseName = phase
        reason = self.refusal or why_no_graph(self.hardware, self.fabric)
        captured = reason is None
        optimizer = self.recipe.optimizer.build(self.model.parameters(), captured=captured)
        make = GraphEngine if captured else EagerEngine
        objective = Objective(self.model, self.recipe, phase)
        self.engine: Engine = make(self.fabric, objective, optimizer, self.recipe)
        self._event(
            "phase", phase=phase, step=self.step, device=str(self.fabric.device),
            processes=self.fabric.world_size, engine="graph" if captured else "eager", reason=reason,
            precision=self.hardware.precision,
        )  # fmt: skip

    def _start_gp(self) -> None:
        """Phase 2: the model of the recipe, from the weights of phase 1 where it is another one."""
        self._collect()
        self.sums = Sums()  # a row is of one phase: what phase 1 minimised has another scale
        if not needs_warm_start(self.recipe):
            self._keep_training("gp")
            return
        self._save(first_phase=True)  # before the model of phase 2 draws its weights: others go on from here
        kernel = self.model
        self._enter("gp")
        report = warm_start(self.model, kernel, inputs=self.feed.first(HEALTH_ITEMS))
        self._event(
            "warm start", copied=len(report.copied), initialised=list(report.initialised), gap=report.gap
        )

    def _keep_training(self, phase: PhaseName) -> None:
        """The same model goes on with its optimiser's state; only the engine or what it minimises changes."""
        before = self.engine.optimizer.state_dict()["state"]
        self._set_up(phase)
        put_state(self.engine.optimizer, before)

    def _update(self, batches: Sequence[Batch]) -> None:
        controls = self.schedule.controls(self.step)
        try:
            self.engine.step(batches, controls)
        except CaptureFailedError as refusal:
            self._collect()  # what the captured engine has added up is kept
            self.refusal = f"the step cannot be captured: {refusal}"
            self._keep_training(self.phase)
            self.engine.step(batches, controls)
        self.step += 1
        if self.step % LISTEN_EVERY == 0:
            self._collect()

    def _collect(self) -> None:
        self.sums = self.sums + self.engine.read()

    def _report(self, seconds: float) -> None:
        if self.report is None:
            return
        loss, regularizer = self.engine.last
        count = self.recipe.optimizer.batch_size * self.recipe.optimizer.accumulate
        accuracy = self.rows[-1]["validation_accuracy"] if self.rows else None
        epoch = (self.step - 1) // self.schedule.steps_per_epoch
        self.report(
            TrainingStep(
                self.step, self.schedule.total_steps, epoch, self.phase, loss, accuracy,
                self.schedule.alpha(self.step - 1), regularizer, count / max(seconds, 1e-9),
            )
        )  # fmt: skip

    def _stopping(self, stop: StopRequest) -> bool:
        """Whether to stop now; asking other processes waits for the device."""
        rarely = self.fabric.world_size > 1 and self.fabric.device.type == "cuda"
        if rarely and self.step % LISTEN_EVERY and self.step % self.schedule.steps_per_epoch:
            return False
        return stop.asked_together(self.fabric)

    def _reason(self, failure: StepFailedError) -> str:
        """A captured step cannot say what failed: run it once more, eagerly, from the same weights."""
        if isinstance(self.engine, EagerEngine):
            return failure.reason
        controls, batches = self.schedule.controls(failure.step), next(self.feed.updates(failure.step))
        objective = Objective(self.model, self.recipe, self.phase)
        again = repeat_step(self.fabric, objective, self.recipe, batches, controls)
        return again or f"{failure.reason} (not so when the step was repeated)"

    def _fail(self, failure: StepFailedError) -> NoReturn:
        reason = self._reason(failure)
        counters = {**self._counters(), "step": failure.step, "reason": reason}
        random = random_states(self.fabric.device, 1)  # the other processes may be gone
        state = pack(self.model, self.engine.optimizer, counters, random)
        path = write_checkpoint(self.folder / "post-mortem", failure.step, state, keep=1)
        self._event("failed", step=failure.step, reason=reason)
        raise TrainingFailedError(
            f"step {failure.step} ({self.phase} phase) of {self.folder}: {reason}. "
            f"The state is in {path}. Try a larger noise, a smaller learning rate, clipping, or float64."
        ) from failure

    def _validate(self, epoch: int, log: Callable[[Mapping[str, Any]], None]) -> None:
        self._collect()
        accuracy, nll = validate(self.fabric, self.model, self.data)
        # kernel attention has no density, whose floor could be watched
        limit = self.recipe.regularizer.floor_warning
        share = floor_share(self.model, self.data, self.step, limit) if self.phase == "gp" else None
        loss, regularizer = self.sums.means(self.fabric)
        row = {
            "epoch": epoch, "step": self.step, "phase": self.phase,
            "learning_rate": self.schedule.learning_rate(self.step - 1),
            "alpha": self.schedule.alpha(self.step - 1),
            "train_loss": loss, "train_regularizer": regularizer,
            "validation_accuracy": accuracy, "validation_nll": nll, "floor_share": share,
        }  # fmt: skip
        self.rows.append(row)
        self.sums = Sums()
        self._write(write_metrics, self.folder, self.rows)
        self._event("validated", **row)
        log(row)
        if self.on_validation is not None:
            self.on_validation(row)
        score = -nll if self.recipe.checkpoint.select == "best-nll" else accuracy
        # weights of phase 1 are those of another model, unless there is no phase 2
        if (self.phase == "gp" or self.recipe.phases.epochs == 0) and score > self.best:
            self.best = score
            if self.recipe.checkpoint.select != "last":
                self._write(self.model.save_pretrained, self.folder / "model")

    def _counters(self) -> dict[str, Any]:
        best = None if self.best == -math.inf else self.best  # JSON has no infinity
        sums = asdict(self.sums)
        return {"step": self.step, "phase": self.phase, "best": best, "rows": self.rows, "sums": sums}

    def _save(self, *, first_phase: bool = False) -> None:
        """Write a state to resume from; that of the end of the first phase is kept for other runs."""
        self._collect()
        self.sums = self.sums.over_processes(self.fabric)  # one checkpoint serves them all
        random = random_states(self.fabric.device, self.fabric.world_size)
        state = pack(self.model, self.engine.optimizer, self._counters(), random)
        place, keep = (FIRST_PHASE, 1) if first_phase else ("checkpoints", self.recipe.checkpoint.keep)
        self._write(write_checkpoint, self.folder / place, self.step, state, keep=keep)
        self.fabric.barrier()


def train_recipe(
    recipe: Recipe,
    folder: StrPath,
    *,
    root: StrPath | None = None,
    resume: bool = False,
    first_phase: StrPath | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[TrainingStep], object] | None = None,
    preparing: Progress | None = None,
    **options: Any,
) -> TrainingResult:
    """Load the recipe's data, write what prediction needs of it, and train.

    Args:
        recipe: recipe on images or texts.
        folder: folder of the run.
        root: folder of the datasets; the environment variable GPATTENTION_DATA if not given.
        resume: go on from the last checkpoint.
        first_phase: a run whose first phase is the same and is taken over, to the same bits; it is
            looked at only where there is nothing to resume.
        device: where to train.
        progress: called at every step.
        preparing: called with the sentences whose frozen vectors are computed first.
        options: further ones of `fit`.

    Returns:
        The run's folder, the model chosen, and all rows.

    Raises:
        CheckpointError: there is nothing to resume, or it is of another recipe or damaged.
        FileExistsError: the folder holds something already, and `resume` is not set.
        FileNotFoundError: the data are not there.
        TrainingFailedError: numbers broke, or the disk is full; the message says what is saved.
        TrainingStoppedError: SIGTERM or SIGINT asked for it; the state is saved.
        ValueError: the recipe does not fit its data.
    """
    check_seed("seed", recipe.seed)
    folder = Path(folder)
    begun = (folder / "recipe.json").exists()
    if resume and (begun or first_phase is None):  # before the data, whose split a changed seed would change
        check_resumed(recipe, folder)
    elif is_leading():  # before the data, and before anything in the folder changes
        check_new(folder, taking=first_phase is not None)
    prepared = prepare(recipe, root, progress=preparing)
    check_models(recipe, prepared.training.facts)  # before a folder is made
    if first_phase is not None and not (resume and begun):
        take_first_phase(recipe, folder, first_phase)
        resume = True
    save_preprocessing(folder, prepared)
    return fit(recipe, prepared.training, folder, resume=resume, device=device, progress=progress, **options)
