"""Run a host, read its answers, and turn them into predictions; `predict` and `signals` of converted models.

A host of [tokens, batch, width] gives one answer per column.  If there are as many columns as rows were
passed, all shapes are as expected and every number is wrong; fewer rows show it: see `Reader`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, TypeAlias

import torch
from torch import Tensor, nn

from gpattention.attention import Attention
from gpattention.checks import check_choice, check_count, check_whole
from gpattention.concurrency import Handler, handling
from gpattention.hosts.families import FAMILIES
from gpattention.hosts.families.base import Context, Handlers
from gpattention.hosts.moments import host_moments
from gpattention.hosts.painting import Painted, html_of, levels_of, show_lines
from gpattention.hosts.sharing import Known, Shared, Sharing
from gpattention.models import EncoderLayer, Prediction, Signals, Transformer, Watch, measure_signals, watched
from gpattention.models import predict as predict_draws
from gpattention.models.converted import Request, converted_layers, layer_names
from gpattention.models.moments import METHODS, Method
from gpattention.models.predict import (
    Inputs,
    Progress,
    Rows,
    count_items,
    device_of,
    has_features,
    is_classifier,
    take,
)
from gpattention.models.prediction import differ, make_frame, warn_undrawn
from gpattention.models.signals import model_signals

if TYPE_CHECKING:
    from pandas import DataFrame

# "causal": logits of the token that follows each, of which the last one is the answer
Task: TypeAlias = Literal["classification", "tokens", "regression", "embedding", "causal"]
TASKS: tuple[Task, ...] = ("classification", "tokens", "regression", "embedding", "causal")
Call: TypeAlias = Callable[[Any, Inputs], Any]  # model and inputs to output
NOT_CONVERTED = (
    "expected a converted model, or one built of gpattention.models.EncoderLayer, got neither: "
    "gpattention.attach reads a model as it is, gpattention.convert changes its attention, and your own may "
    "implement gpattention.models.Classifier (for signals: FeatureClassifier)"
)


@dataclass(frozen=True, eq=False)
class Values:
    """Numbers with a variance: regression outputs, or the entries of an embedding.

    Attributes:
        draws: [S, B, D].
        mean: [B, D] over the draws; the model's own answer if nothing was drawn.
        spread: [B, D] variance of the draws.
        residual: fitted variance of regression targets that the draws do not explain.
        drawn: whether anything was drawn; if not, the draws are copies of one another.
    """

    draws: Tensor
    mean: Tensor
    spread: Tensor
    residual: float = 0.0
    drawn: bool = True

    @classmethod
    def from_draws(cls, draws: Tensor, residual: float = 0.0, *, drawn: bool | None = None) -> "Values":
        """Values of draws.

        Args:
            draws: [S, B, D]; with S = 1 there is no spread.
            residual: variance of regression targets that the draws do not explain.
            drawn: as in `Prediction.from_logits`.

        Returns:
            Mean and spread of the draws, in at least single precision.

        Raises:
            ValueError: draws have another shape.
        """
        if draws.ndim != 3 or not len(draws):
            raise ValueError(f"expected draws [samples, items, numbers], got shape {tuple(draws.shape)}")
        draws = draws.float() if draws.dtype in (torch.float16, torch.bfloat16) else draws
        drawn = differ(draws) if drawn is None else drawn
        spread = draws.var(0) if drawn and len(draws) > 1 else torch.zeros_like(draws[0])
        return cls(draws, draws.mean(0), spread, residual, drawn)

    @property
    def variance(self) -> Tensor:
        """Variance of the draws plus `residual`; a warning is given if it is 0 without draws.  [B, D]"""
        return self._variance(stacklevel=3)

    @property
    def stddev(self) -> Tensor:
        """[B, D]"""
        return self._variance(stacklevel=3).sqrt()

    @property
    def total_variance(self) -> Tensor:
        """The sum over the numbers of an item: one number for the uncertainty of an embedding.  [B]"""
        return self._variance(stacklevel=3).sum(-1)

    def _variance(self, stacklevel: int) -> Tensor:
        if self.residual == 0:
            warn_undrawn("variance", len(self.draws), self.drawn, stacklevel)
        return self.spread + self.residual

    def __len__(self) -> int:
        return self.draws.shape[1]


@dataclass(frozen=True, eq=False, repr=False)
class TokenPrediction:
    """A class for every token; prints as one line, and in a notebook as coloured texts.

    Attributes:
        tokens: the prediction of B * N tokens, item by item.
        real: [B, N] False = padding.
    """

    tokens: Prediction
    real: Tensor

    @property
    def probs(self) -> Tensor:
        """[B, N, C]"""
        return self.tokens.probs.unflatten(0, tuple(self.real.shape))

    @property
    def label(self) -> Tensor:
        """[B, N]"""
        return self.tokens.label.view(self.real.shape)

    @property
    def confidence(self) -> Tensor:
        """[B, N]"""
        return self.tokens.confidence.view(self.real.shape)

    @property
    def entropy(self) -> Tensor:
        """[B, N]"""
        return self.tokens.entropy.view(self.real.shape)

    @property
    def mutual_information(self) -> Tensor:
        """[B, N]; as in `Prediction`, a warning is given if nothing was drawn."""
        return self.tokens.disagreement(stacklevel=3).view(self.real.shape)

    @property
    def drawn(self) -> bool:
        """Whether the logits are draws."""
        return self.tokens.drawn

    def show(
        self,
        pieces: Sequence[Sequence[str]] | None = None,
        by: Literal["entropy", "confidence", "mutual_information"] = "entropy",
        *,
        file: TextIO | None = None,
    ) -> None:
        """Print the texts in colours, deeper for less certain tokens, by ranks within a text.

        Args:
            pieces: the text of every token, [B, N] of them; the number of its class if not given.
            by: "entropy", "confidence" (the least is deepest) or "mutual_information".
            file: to print to; standard output if not given.

        Raises:
            ValueError: another name, or another number of pieces.

        >>> prediction.show([[tokenizer.decode(i) + " " for i in ids] for ids in inputs["input_ids"]])
        """
        show_lines(*self._painted(pieces, by), file=file)

    def to_html(
        self,
        pieces: Sequence[Sequence[str]] | None = None,
        by: Literal["entropy", "confidence", "mutual_information"] = "entropy",
    ) -> str:
        """The same as HTML; a pointer over a token shows its number.

        Args:
            pieces: as in `show`.
            by: as in `show`.

        Returns:
            One `div` that needs nothing else.
        """
        return html_of(*self._painted(pieces, by))

    def to_frame(self, pieces: Sequence[Sequence[str]] | None = None) -> "DataFrame":
        """A table of pandas with a line for each real token.

        Args:
            pieces: the text of every token, as in `show`; the column token is left out without it.

        Returns:
            Columns item, position, token, and those of `Prediction.to_frame`.

        Raises:
            ImportError: pandas is not installed.
            ValueError: there is another number of pieces.
        """
        item, position = (x.tolist() for x in self.real.cpu().nonzero().unbind(-1))
        columns: dict[str, Any] = {"item": item, "position": position}
        if pieces is not None:
            self._check_pieces(pieces)
            columns["token"] = [pieces[i][n] for i, n in zip(item, position, strict=True)]
        return make_frame({**columns, **self.of_real_tokens._columns()})

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        real = self.of_real_tokens
        sure, entropy = (f"{float(x.mean()):.3g}" for x in (real.confidence, real.entropy))
        what = f"{len(self)} texts, {len(real)} tokens, {real.samples if self.drawn else 'no'} draws"
        return f"TokenPrediction of {what}: mean confidence {sure}, entropy {entropy} nats"

    def _check_pieces(self, pieces: Sequence[Sequence[str]]) -> None:
        if [len(line) for line in pieces] != [self.real.shape[1]] * len(self):
            expected = f"expected pieces for {len(self)} texts of {self.real.shape[1]} tokens"
            raise ValueError(f"{expected}, got {[len(line) for line in pieces]}")

    def _painted(self, pieces: Sequence[Sequence[str]] | None, by: str) -> tuple[str, list[Painted]]:
        check_choice("by", by, ("entropy", "confidence", "mutual_information"))
        if pieces is None:
            pieces = [[f"{label} " for label in line] for line in self.label.tolist()]
        self._check_pieces(pieces)
        values = -self.confidence if by == "confidence" else getattr(self, by)
        lines = []
        for own, numbers, real in zip(pieces, values, self.real, strict=True):
            shown = [piece for piece, kept in zip(own, real.tolist(), strict=True) if kept]
            found = numbers.detach().double().cpu()[real.cpu()]
            levels = levels_of(found, standardised=False)
            notes = [f"{by.replace('_', ' ')} {abs(x):.3g}" for x in found.tolist()]
            lines.append(Painted(shown, levels, notes))
        return f"{by.replace('_', ' ')} of each token's class, in ranks within the text", lines

    @property
    def of_real_tokens(self) -> Prediction:
        """The prediction of all tokens except padding, one after the other."""
        return self.tokens[self.real.flatten()]

    def __len__(self) -> int:
        return len(self.real)


Result: TypeAlias = Prediction | TokenPrediction | Values


def make_result(
    answers: Tensor,  # [S, B, ...]
    task: Task,
    inputs: Inputs,
    variances: tuple[Tensor | None, ...] | None,
    *,
    drawn: bool,
    temperature: float | Tensor = 1.0,  # one, or [B, 1] of classes
    residual: float = 0.0,
) -> Result:
    """The prediction of a task."""
    if task in ("classification", "causal"):
        return Prediction.from_logits(answers / temperature, variances, drawn=drawn)
    if task == "tokens":
        flat = Prediction.from_logits(answers.flatten(1, 2) / temperature, drawn=drawn)
        return TokenPrediction(flat, real_tokens(inputs, tuple(answers.shape[1:3])))
    return Values.from_draws(answers, residual if task == "regression" else 0.0, drawn=drawn)


def check_module(model: object, hint: str = "") -> None:
    """Refuse what is not a model, such as a handle."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected model to be an nn.Module, got {type(model).__name__}{hint}")


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model; a mapping becomes keyword arguments, except for our own models."""
    if isinstance(inputs, Tensor) or isinstance(model, Transformer):
        return model(inputs)
    return model(**inputs)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside the result of `torch.compile`: compilers cannot follow the handlers of a thread."""
    return model._modules.get("_orig_mod") or model


@dataclass(eq=False)
class Reader:
    """Calls a host and reads one answer per item.

    Attributes:
        model: the host.
        call: how to run it.
        task: what it answers; None until its first output has been seen.
        function: which of our functions was called, for errors.
        known: what its passes have shown.
        head: the linear map that it answers with; None until `with_features` has found it.
    """

    model: nn.Module
    call: Call
    task: Task | None
    function: str
    known: Known = field(default_factory=Known, init=False)
    head: nn.Linear | None = field(default=None, init=False)
    _batch_first: bool = field(default=False, init=False)  # once it has been seen

    def __post_init__(self) -> None:
        if self.task is not None:
            check_choice("task", self.task, TASKS)
        if not callable(self.call):
            raise ValueError(f"expected call to be a function of model and inputs, got {self.call!r}")

    def read(self, model: nn.Module, inputs: Inputs, context: Context) -> Tensor:
        """The model's answer to one batch on its device, within a context, read by the task."""
        with context:
            output = self.call(model, inputs)
        self.task = self.task or _find_task(self.model, output)
        answer, items = _read(output, self.task, inputs), count_items(inputs)
        if len(answer) != items:
            self._refuse(f"for each of {items} inputs", f"shape {tuple(answer.shape)}")
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs.values())
        if not self._batch_first and items > 1 and any(items in x.shape[1:] for x in tensors):
            self._check_batch_first(inputs)
            self._batch_first = True  # checked once, as it takes two passes
        return answer

    def with_features(self, inputs: Inputs, watching: Context) -> tuple[Tensor, Tensor]:
        """One pass within a context: the answer, and what the head read; embeddings are read by no head.

        The head is the linear map that is called last.
        """
        host = uncompiled(self.model)
        seen: list[tuple[nn.Linear, Tensor, Tensor]] = []  # the last call alone

        def see(module: nn.Linear, own: Handler, x: Tensor) -> Tensor:
            seen[:] = [(module, x, own(x))]
            return seen[0][2]

        linears = [self.head] if self.head else [m for m in host.modules() if isinstance(m, nn.Linear)]

        @contextmanager
        def both() -> Iterator[None]:  # around this pass alone, as `read` may run others to look at shapes
            with watching, handling({(linear, "forward"): partial(see, linear) for linear in linears}):
                yield

        answer = self.read(host, inputs, both())
        if self.task == "embedding":
            return answer[:, :0], answer
        outputs, wanted = [y.shape[-1] for _, _, y in seen], answer.shape[-1]
        if outputs != [wanted]:
            expected = f"expected the head, the last linear map, to have {wanted} outputs, got {outputs}"
            raise ValueError(f"{expected}: pass task='embedding' and a call= that gives the features")
        self.head = seen[0][0]
        return answer, seen[0][1]

    def class_logits(self, inputs: Inputs) -> Tensor:
        """Logits of a plain pass, for moments, which other tasks than classification do not have.  [B, C]"""
        answer = self.read(uncompiled(self.model), inputs, nullcontext())
        if self.task != "classification":
            expected = f"expected task 'classification' with method='moments', got {self.task!r}"
            raise ValueError(f"{expected}: draw instead")
        return answer

    def _refuse(self, wanted: str, found: str) -> NoReturn:
        helps = f"where batches are not the first axis, pass call= to {self.function}"
        raise ValueError(f"expected one answer {wanted}, got {found}: {helps}")

    def counting(self, seen: list[int]) -> Context:
        """Within the block, every call of converted attention appends the number of its sequences."""

        def count(own: Handler, q: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(len(q))
            return own(q, *args, **kwargs)

        return handling({(layer, "forward"): count for layer in converted_layers(self.model)})

    @torch.no_grad()
    def _check_batch_first(self, inputs: Inputs) -> None:
        """Run one row, then two: the numbers of answers, and of sequences in attention, must double."""
        assert self.task is not None
        answers = list[int]()
        sequences: list[list[int]] = [[], []]
        for count, seen in zip((1, 2), sequences, strict=True):
            rows = take(inputs, slice(count), device_of(inputs))
            with self.counting(seen):
                answers.append(len(_read(self.call(uncompiled(self.model), rows), self.task, rows)))
        one, two = sequences
        if answers != [1, 2] or [2 * count for count in one] != two:
            found = f"{answers[0]} and {answers[1]}, from attention over {one} and {two} sequences"
            self._refuse("for each of 1 and 2 inputs", found)


def _find_task(model: nn.Module, output: Any) -> Task:
    """The task by the model's config, else by the shape of its output."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if (logits := _logits(output)) is None:
        return "embedding"
    if problem == "multi_label_classification":
        raise ValueError(f"expected one class per item, got problem_type={problem!r}: pass task= and call=")
    if problem == "regression" or logits.ndim == 1 or (logits.shape[-1] == 1 and logits.ndim == 2):
        return "regression"
    if logits.ndim == 2:
        return "classification"
    return "causal" if generates(model) else "tokens"


def generates(model: nn.Module) -> bool:
    """Whether the model's library can continue texts with it."""
    asked = getattr(model, "can_generate", None)
    return callable(asked) and bool(asked())


def _read(output: Any, task: Task, inputs: Inputs) -> Tensor:
    """Logits [B, C] or [B, N, C], values [B, D], or pooled embeddings [B, E]."""
    if task == "embedding":
        return _pooled(output, inputs)
    if (logits := _logits(output)) is None:
        raise _unread(output, f"logits for task={task!r}")
    if task == "regression" and logits.ndim == 1:
        logits = logits[:, None]
    if task == "causal" and logits.ndim == 3:
        real = real_tokens(inputs, tuple(logits.shape[:2])).to(logits.device)
        last = real.long().cumsum(-1).argmax(-1)  # [B]
        return logits[torch.arange(len(logits), device=logits.device), last]
    wanted = 3 if task == "tokens" else 2
    if logits.ndim != wanted:
        raise ValueError(f"expected logits of {wanted} axes for task={task!r}, got {tuple(logits.shape)}")
    return logits


def _unread(output: Any, part: str) -> ValueError:
    found = type(output).__name__
    return ValueError(f"expected an output with {part}, got {found}: pass call=, which gives a tensor")


def real_tokens(inputs: Inputs, shape: tuple[int, ...]) -> Tensor:
    """Tokens that are not padding by the attention mask of the inputs.  [B, N]"""
    of_decoder = not isinstance(inputs, Tensor) and "decoder_input_ids" in inputs
    name = "decoder_attention_mask" if of_decoder else "attention_mask"
    mask = None if isinstance(inputs, Tensor) else inputs.get(name)
    if mask is None or tuple(mask.shape) != shape:
        return torch.ones(shape, dtype=torch.bool)
    return mask.bool()


def _logits(output: Any) -> Tensor | None:
    named = isinstance(output, Mapping) and "logits" in output
    found = output["logits"] if named else getattr(output, "logits", output)
    return found if isinstance(found, Tensor) else None


def _pooled(output: Any, inputs: Inputs) -> Tensor:
    """The mean of the last states of real tokens, or states that are [B, E] already.  [B, E]"""
    states = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor):
        raise _unread(output, "last_hidden_state")
    if states.ndim == 2:
        return states
    real = real_tokens(inputs, tuple(states.shape[:2])).to(states.device)[..., None]  # [B, N, 1]
    return torch.where(real, states, 0.0).sum(1) / real.sum(1).clamp_min(1)


def _requested(model: nn.Module, request: Request) -> Context:
    """Within the block, and in this thread, converted layers follow the request instead of their mode."""

    def forward(own: Handler, *args: Any, **kwargs: Any) -> Any:
        return own(*args, request=request, **kwargs)

    handlers: Handlers = {(layer, "forward"): forward for layer in converted_layers(model)}
    for family in FAMILIES.values():
        handlers |= family.requested(model, request)
    return handling(handlers)


def predict(
    model: nn.Module,
    inputs: Inputs,
    samples: int = 10,
    seed: int = 0,
    *,
    task: Task | None = None,
    call: Call | None = None,
    batch_size: int | None = None,
    variances: bool = False,
    first_item: int = 0,
    share: bool = True,
    method: Method = "draws",
    progress: Progress | None = None,
) -> Result:
    """Predict with uncertainty by a converted model, as with the handle of `attach`.

    The model runs in evaluation mode and without gradients.  The draws of item i depend only on `seed` and
    `first_item` + i.  What comes before the first draw is computed once for all samples of an item.

    Args:
        model: the result of `convert`, a model with `gpattention.models.EncoderLayer`, one of our own
            transformers, or a `gpattention.models.Classifier` of your own.
        inputs: a tensor or a mapping of tensors, with the batch first.
        samples: number of draws; 0 is the mean.
        seed: of the draws.
        task: "classification", "tokens", "regression", "embedding" or "causal"; inferred from the output if
            not given.
        call: how to run the model: `call(model, inputs)` returns its output with the batch first.
        batch_size: most rows (items times samples) that run at once, as in `Handle.predict`.
        variances: add the variances of the layers, averaged over the samples, to a `Prediction`.
        first_item: number of the first item, if the inputs are a part of more.
        share: False runs every sample as a full pass, for models with internal state.
        method: "moments" propagates variances through one pass instead of drawing, as in `Handle.predict`.
        progress: called with the number of rows done, and of all rows.

    Returns:
        A `Prediction` of classes, a `TokenPrediction` of a class per token, or `Values` with a variance.

    Raises:
        ValueError: the model is not converted, an argument is wrong, or the output cannot be read.

    >>> gpattention.predict(model, tokenizer(sentences, padding=True, return_tensors="pt"), samples=10)
    """
    check_module(model, ": call its own predict" if hasattr(model, "predict") else "")
    rows: dict[str, Any] = {"batch_size": batch_size, "first_item": first_item, "progress": progress}
    if isinstance(model, Transformer):
        return model.predict(inputs, samples, seed, variances=variances, method=method, **rows)
    check_choice("method", method, METHODS)
    host = uncompiled(model)
    layers = converted_layers(host)
    if not layers and method == "draws" and task is None and call is None and is_classifier(host):
        return predict_draws(host, inputs, samples=samples, seed=seed, variances=variances, **rows)
    if not layers and not any(isinstance(module, EncoderLayer) for module in host.modules()):
        raise ValueError(NOT_CONVERTED)
    samples = check_count("samples", samples, least=0)
    seed = check_whole("seed", seed)
    drawing = samples > 0 and any(layer.attention.draws for layer in layers)
    reader = Reader(host, call or call_model, task, "predict")

    if method == "moments":
        return host_moments(host, reader.class_logits, inputs, variances=variances, **rows)

    def answer(rows: Rows, shared: Shared) -> tuple[Tensor, Sequence[Tensor | None]]:
        request = Request("independent" if drawing else "none", rows.noise, variances, shared.draws)
        part = reader.read(host, rows.inputs, shared.within(_requested(host, request)))
        return part, [request.layer_variances.get(id(layer)) for layer in layers]

    count = samples if drawing else 1
    sharing = Sharing(
        host, [layer for layer in layers if layer.attention.draws], answer, reader.known, share=share
    )
    answers, means = sharing.run(inputs, samples=count, seed=seed, **rows)
    assert reader.task is not None
    return make_result(answers, reader.task, inputs, means if variances else None, drawn=drawing)


def signals(
    model: nn.Module,
    inputs: Inputs | Iterable[Any],
    *,
    task: Task | None = None,
    call: Call | None = None,
    **options: Any,
) -> Signals:
    """Signals of every item by one pass of a converted model without draws, as with the handle of `attach`.

    Args:
        model: the result of `convert`, a model with `gpattention.models.EncoderLayer`, one of our own
            transformers, or a `gpattention.models.FeatureClassifier` of your own.
        inputs: a tensor or a mapping of tensors, with the batch first, or a loader of those.
        task: "classification", "tokens", "regression", "embedding" or "causal"; inferred from the output if
            not given.
        call: how to run the model: `call(model, inputs)` returns its output with the batch first.
        **options: `variance`, `per_token` and `batch_size`, as in `Handle.signals`.

    Returns:
        Logits, features, and profiles of variance and attention entropy, on the device of the inputs; of a
        loader on the CPU.

    Raises:
        ValueError: the model is not converted, or the output cannot be read.

    >>> gpattention.signals(model, validation_loader).variance  # [B, sites x heads]
    """
    if isinstance(model, Transformer):
        return model.signals(inputs, **options)
    sites: dict[Attention, str] = {
        layer.attention: name for layer, name in layer_names(uncompiled(model)).items()
    }
    if not sites and task is None and call is None and has_features(model):
        return model_signals(model, inputs, **options)
    if not sites:
        raise ValueError(NOT_CONVERTED)
    reader = Reader(uncompiled(model), call or call_model, task, "signals")

    def answer(batch: Inputs, watch: Watch) -> tuple[Tensor, Tensor]:
        return reader.with_features(batch, watched(sites, watch))

    return measure_signals(reader.model, answer, inputs, **options)
