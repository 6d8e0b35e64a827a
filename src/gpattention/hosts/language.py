"""Language models under a handle: scores of every token, and which tokens are unusual.

The variance of attention falls with every further key, and so does the entropy of the next token, so that all
scores depend on length and position.  `TokenUsual` therefore has their mean and deviation at every position
of held-out text.  It also has a Gaussian of the profile of all heads, whose distance, standardised the same
way, is the strangeness.  The profile consists of log odds u / (1 - u): in most heads of real models hardly
any key is near a query, so that u is nearly 1 and log u nearly constant, while 1 - u, the share that keys
explain, spans many orders of magnitude.  Two of five held-out texts are kept back for the p-values.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpattention.checks import require
from gpattention.gp import check_health, deferred_checks
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.fitting import (
    CLEAR,
    IGNORED,
    SCALES,
    Batch,
    Candidate,
    Fit,
    FitOptions,
    first_items,
    frames_of,
    number_batches,
    split_batches,
)
from gpattention.hosts.predict import real_tokens
from gpattention.hosts.settings import Settings
from gpattention.hosts.tokens import FITTED, SCORES, Score, TokenUncertainty
from gpattention.hosts.variance import Placed, causal_variances, kernel_inputs, placed, unit_variances
from gpattention.models.predict import Inputs, count_items, evaluating, iterate_rows, take
from gpattention.strangeness.detectors import Gaussians, fit_gaussians, mahalanobis
from gpattention.strangeness.strangeness import load_fitted, save_fitted

if TYPE_CHECKING:
    from gpattention.hosts.attach import Runner

TOGETHER_ON = ("cuda",)  # devices on which the matrices of all layers are one batch
TEXTS = 8  # texts that run at once by default
ROWS = 256  # rows whose logits are converted to full precision at once
LEAST = -60.0  # the log variance of 0
WINDOW = 8  # rows that a flag averages over
ENOUGH = 50  # least rows of a range of positions for its own statistics
MOST = 20_000  # most rows to fit a Gaussian to
DRAWN_TEXTS = 16  # texts to compare scales of draws on
FORMAT, NAME = "gpattention-tokens-1", "tokens"
OF_TOKENS = (
    "expected a model that answers for whole items, got a language model, whose fit knows tokens: "
    "call token_uncertainty or flag_spans"
)
_PLAIN: tuple[Score, ...] = tuple(name for name in SCORES if name not in FITTED)
_ENDS = 1e-7  # from 0 and 1, where odds end


def load_language_model(
    path: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[torch.nn.Module, Any]:
    """Load a model of transformers and its tokenizer from files; nothing is downloaded.

    Args:
        path: a folder as `save_pretrained` writes it, or a GGUF file.
        device: to compute on.

    Returns:
        The model in evaluation mode, and the tokenizer, both for `attach`.

    Raises:
        FileNotFoundError: there is neither.
        ImportError: transformers is not installed, or gguf for a GGUF file.

    >>> model, tokenizer = load_language_model("smollm2/")
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no folder and no GGUF file {path}")
    transformers: Any = require("transformers", extra="hf", user="load_language_model")
    options: dict[str, Any] = {"local_files_only": True}
    folder = path
    if path.is_file():
        folder, options["gguf_file"] = path.parent, path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    made: torch.nn.Module = model
    return made.train(False).to(device), tokenizer


def encode(tokenizer: Any, texts: Sequence[str], *, left: bool = False) -> dict[str, Tensor]:
    """Ids and mask of texts, padded on one side.

    Args:
        tokenizer: that of `attach`.
        texts: at least one.
        left: whether padding comes first, as needed to continue texts.

    Returns:
        `input_ids` and `attention_mask`, [B, N] each.

    Raises:
        ValueError: there is no tokenizer, or a text has no token.
    """
    if tokenizer is None:
        raise ValueError("expected a tokenizer for texts, got none: gpattention.attach(model, tokenizer)")
    lines = [list(tokenizer(text)["input_ids"]) for text in texts]
    if not lines or not all(lines):
        raise ValueError(f"expected texts of at least one token each, got {[len(line) for line in lines]}")
    most = max(map(len, lines))
    ids = torch.zeros(len(lines), most, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, line in enumerate(lines):
        where = slice(most - len(line), most) if left else slice(len(line))
        ids[row, where], mask[row, where] = torch.tensor(line), 1
    return {"input_ids": ids, "attention_mask": mask}


def as_inputs(inputs: "Inputs | str | Sequence[str]", tokenizer: Any, *, left: bool = False) -> Inputs:
    """Encode texts, and leave tensors unchanged.

    Args:
        inputs: one or several texts, or inputs of the model.
        tokenizer: that of `attach`.
        left: as in `encode`.

    Returns:
        A tensor or a mapping of tensors.
    """
    if isinstance(inputs, str):
        return encode(tokenizer, [inputs], left=left)
    if isinstance(inputs, Sequence) and not isinstance(inputs, Tensor):
        return encode(tokenizer, list(inputs), left=left)
    return inputs


def ids_of(inputs: Inputs) -> Tensor:
    """The tokens whose followers the model predicts.  [B, N]

    Args:
        inputs: of the model.

    Returns:
        Ids of the decoder.

    Raises:
        ValueError: the inputs have no ids.
    """
    if isinstance(inputs, Tensor):
        return inputs
    for name in ("decoder_input_ids", "input_ids"):
        if name in inputs:
            return inputs[name]
    raise ValueError(f"expected inputs with input_ids or decoder_input_ids, got {', '.join(inputs)}")


def prediction_scores(logits: Tensor, next_ids: Tensor) -> dict[str, Tensor]:
    """Entropy, top probability, margin and surprise, computed for some rows at a time.

    Args:
        logits: [R, V].
        next_ids: [R], -1 if unknown.

    Returns:
        [R] each.
    """
    parts = []
    for some, own in zip(logits.split(ROWS), next_ids.split(ROWS), strict=True):
        z = some.float()  # [r, V]
        most, place = z.max(-1, keepdim=True)
        z = z - most
        weights = z.exp()
        total = weights.sum(-1)  # [r]
        log_total = total.log()
        # -inf has no weight
        entropy = log_total - torch.linalg.vecdot(weights, z.clamp_min(-1e4)) / total
        surprise = log_total - z.gather(-1, own.clamp_min(0)[:, None])[:, 0]
        surprise = torch.where(own >= 0, surprise, torch.nan)
        second = z.scatter_(-1, place, -torch.inf).amax(-1).exp()  # [r]
        parts.append(torch.stack([entropy, 1 / total, (1 - second) / total, surprise]))
    names = ("entropy", "top_probability", "margin", "surprise")
    return dict(zip(names, torch.cat(parts, -1), strict=True))


def as_rows(scores: dict[str, Tensor], shape: torch.Size) -> dict[str, Any]:
    """Scores of rows [R] in the shape of their texts.

    Args:
        scores: by name.
        shape: [B, N].

    Returns:
        The same by name.
    """
    return {name: x.view(shape) for name, x in scores.items()}


class Heads:
    """Log variances of one pass, head by head.

    Args:
        settings: with noise and frames; the noise may be on the CPU, where its values are read.
        max_keys: most earlier keys to condition on.
    """

    def __init__(self, settings: Settings, max_keys: int) -> None:
        self._settings, self._max_keys = settings, max_keys
        self._waiting: dict[int, tuple[Site, Placed]] = {}  # by the number of the call
        self.names: list[str] = []
        self.log_u: list[Tensor | None] = []  # [B, H, Q] each
        self.log_pivots: list[Tensor] = []  # [B, G, Q] each

    def see(self, site: Site, call: AttentionCall) -> None:
        """Note a call; on a GPU causal calls are computed later, with many small matrices as one batch."""
        noise = self._settings.prior(site.index, site.heads).noise
        frame = self._settings.frame(site.index)
        if call.past is not None and call.q.device.type in TOGETHER_ON:
            self._waiting[len(self.log_u)] = site, placed(call, kernel_inputs(call, frame), noise)
            self.names += _names(site, site.heads)
            self.log_u.append(None)
        else:
            self.add(site, *unit_variances(call, noise, frame, self._max_keys))

    def add(self, site: Site, unit: Tensor, of_keys: Tensor | None) -> None:
        """Add the variances of a call."""
        self.names += _names(site, unit.shape[1])
        self.log_u.append(unit.log().clamp_min(LEAST))
        if of_keys is not None:
            self.log_pivots.append(of_keys.log())

    def finish(self) -> None:
        """Compute the calls that were noted."""
        waiting, self._waiting = self._waiting, {}
        rows = causal_variances([own for _, own in waiting.values()], self._max_keys)
        for number, row in zip(waiting, rows, strict=True):
            self.log_u[number] = row.unit.log().clamp_min(LEAST)
            self.log_pivots.append(row.of_keys.log())

    def last(self) -> "Heads":
        """The heads with their last rows only."""
        self.finish()
        heads = Heads(self._settings, self._max_keys)
        heads.names = self.names
        heads.log_u = [None if x is None else x[..., -1:] for x in self.log_u]
        heads.log_pivots = [x[..., -1:] for x in self.log_pivots]
        return heads

    def profile(self) -> Tensor:
        """[B, Q, P]"""
        self.finish()
        return torch.cat([x for x in self.log_u if x is not None], 1).mT

    def log_pivot(self) -> Tensor:
        """[B, Q]"""
        self.finish()
        return torch.cat(self.log_pivots, 1).mean(1)


def _names(site: Site, heads: int) -> list[str]:
    return [f"{site.title} head {head}" for head in range(heads)]


def decoding_sites(sites: Sequence[Site]) -> list[Site]:
    """The sites whose rows are tokens of a decoder's text.

    Args:
        sites: all sites of a model.

    Returns:
        Causal ones and cross-attention.

    Raises:
        ValueError: the model has no causal attention.
    """
    if not any(site.attends == "causal" for site in sites):
        raise ValueError("expected a language model, got one without causal attention: predict is for it")
    return [site for site in sites if site.attends != "all"]


@torch.no_grad()
def measure_tokens(
    runner: "Runner",
    settings: Settings,
    inputs: Inputs,
    *,
    usual: "TokenUsual | None" = None,
    heads: bool = False,
    batch_size: int | None = None,
    tokenizer: Any = None,
) -> TokenUncertainty:
    """Measure the scores of every token in plain passes.

    Args:
        runner: the model and how it is run.
        settings: noise and frames of the variances.
        inputs: a tensor or a mapping of tensors.
        usual: what is usual, if it was fitted.
        heads: whether to keep the profile.
        batch_size: texts that run at once.
        tokenizer: to show tokens as text.

    Returns:
        All scores, on the device of the inputs.

    Raises:
        ValueError: the model has no causal attention, or does not answer with one row per token.
    """
    decoding_sites(runner.sites)
    ids, items = ids_of(inputs), count_items(inputs)
    home, device = ids.device, runner.device(inputs)
    settings, everywhere = on_device(settings, device), replace(runner, task="tokens")
    parts = []
    with evaluating(runner.model), deferred_checks() if device.type == "cuda" else nullcontext():
        for some in torch.arange(items).split(TEXTS if batch_size is None else batch_size):
            own = take(inputs, some, device)
            part = _measure(everywhere, settings, own, tokenizer)
            part = part if usual is None else usual.judge(part)
            part = part if heads else replace(part, profile=None)
            parts.append(part._changed(lambda x: x.to(home)))
    if device.type == "cuda":
        check_health()
    return TokenUncertainty.join(parts, axis="texts")


def on_device(settings: Settings, device: torch.device) -> Settings:
    """Move frames to the device of the model, and the rest to the CPU, where it is read without waiting.

    Args:
        settings: of a handle.
        device: of the model.

    Returns:
        The same settings.
    """
    return replace(settings.to("cpu"), frames=settings.to(device).frames)


def _measure(runner: "Runner", settings: Settings, inputs: Inputs, tokenizer: Any) -> TokenUncertainty:
    """Measure one batch on the model's device, with the profile of all heads."""
    ids, heads = ids_of(inputs), Heads(settings, runner.max_keys)

    def hook(site: Site, call: AttentionCall) -> Tensor:
        if site.attends != "all":
            heads.see(site, call)
        return call.mean

    logits = runner.answer(inputs, hook)  # [B, N, V]
    if logits.shape[:2] != ids.shape:
        expected = f"expected logits for every one of {tuple(ids.shape)} tokens"
        raise ValueError(f"{expected}, got shape {tuple(logits.shape)}")
    real = real_tokens(inputs, tuple(ids.shape)).to(ids.device)
    positions = (real.long().cumsum(-1) - 1).clamp_min(0)
    if isinstance(inputs, Mapping) and "position_ids" in inputs:
        positions = inputs["position_ids"].expand_as(ids)
    follows = torch.zeros_like(real)
    follows[:, :-1] = real[:, :-1] & real[:, 1:] & (positions[:, 1:] > positions[:, :-1])
    next_ids = torch.where(follows, ids.roll(-1, -1), -1)
    scores = prediction_scores(logits.flatten(0, 1), next_ids.flatten())
    profile = heads.profile()  # [B, N, P]
    return TokenUncertainty(
        ids, next_ids, real, positions, **as_rows(scores, ids.shape),
        log_variance=profile.mean(-1), log_pivot=heads.log_pivot(), profile=profile,
        columns=tuple(heads.names), tokenizer=tokenizer,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class TokenUsual:
    """What is usual for a language model at every position of a text.

    Attributes:
        columns: names of the P heads.
        starts: [R] first position of every range.
        mean: [R, S + P] of scores and heads.
        deviation: [R, S + P].
        gaussian: of the standardised profile.
        distance: [R, 2] mean and deviation of its log distance, on the texts kept back.
        strange: [n] strangeness of all rows kept back, sorted.
        windows: by score, its standardised means over windows of the texts kept back, sorted.
    """

    columns: tuple[str, ...]
    starts: Tensor
    mean: Tensor
    deviation: Tensor
    gaussian: Gaussians
    distance: Tensor
    strange: Tensor
    windows: dict[str, Tensor]

    @classmethod
    def fit(cls, fitted: Sequence[TokenUncertainty], kept_back: Sequence[TokenUncertainty]) -> "TokenUsual":
        """Fit to texts with their profiles, on the CPU.

        Args:
            fitted: to fit means, deviations and the Gaussian to.
            kept_back: for p-values.

        Returns:
            What is usual.

        Raises:
            ValueError: there are too few tokens.
        """
        rows, places = _rows_of(fitted)
        if len(rows) < ENOUGH:
            raise ValueError(f"expected at least {ENOUGH} tokens to fit to, got {len(rows)}")
        starts = _starts(int(places.max()))
        mean, deviation = _by_position(rows, places, starts)
        index = _range_of(places, starts)
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:MOST]
        profile = ((rows - mean[index]) / deviation[index])[chosen, len(_PLAIN) :]
        usual = cls(
            fitted[0].columns, starts, mean, deviation, fit_gaussians(profile),
            torch.tensor([[0.0, 1.0]], dtype=mean.dtype).expand(len(starts), -1), mean[:0, 0], {},
        )  # fmt: skip
        distances = [usual._log_distance(part) for part in kept_back]  # [b, N] each
        flat = torch.cat([x[part.real] for x, part in zip(distances, kept_back, strict=True)])
        where = torch.cat([part.positions[part.real] for part in kept_back])
        usual = replace(usual, distance=torch.cat(_by_position(flat[:, None], where, starts), -1))
        judged = [usual.judge(part) for part in kept_back]
        strange = torch.cat([part.score("strangeness")[part.real] for part in judged])
        windows: dict[str, Tensor] = {}
        for name in SCORES:
            means = [window_means(part.score(name, standardised=True), part.real) for part in judged]
            found = torch.cat([x[part.real] for x, part in zip(means, judged, strict=True)])
            windows[name] = found[found.isfinite()].sort().values
        return replace(usual, strange=strange.sort().values, windows=windows)

    def judge(self, found: TokenUncertainty) -> TokenUncertainty:
        """Add strangeness, p-values and standardised scores.

        Args:
            found: texts of the same model, with their profile.

        Returns:
            The same texts.
        """
        if found.columns != self.columns:
            heads = f"{len(self.columns)} heads"
            raise ValueError(
                f"expected tokens of the {heads} that were fitted, got {len(found.columns)} others"
            )
        index = _range_of(found.positions, self.starts.to(found.ids.device))  # [B, N]
        mean, deviation = (x.to(found.ids.device)[:, : len(_PLAIN)] for x in (self.mean, self.deviation))
        standard: dict[str, Tensor] = {
            name: ((found.score(name) - mean[index, n]) / deviation[index, n]).float()
            for n, name in enumerate(_PLAIN)
        }
        distance = self.distance.to(found.ids.device)
        strangeness = (self._log_distance(found) - distance[index, 0]) / distance[index, 1]
        p_value = None
        if len(self.strange):
            below = torch.searchsorted(self.strange.to(strangeness), strangeness.contiguous())
            p_value = ((len(self.strange) - below + 1) / (len(self.strange) + 1)).float()
        return replace(found, strangeness=strangeness.float(), p_value=p_value, standard=standard)

    def _log_distance(self, found: TokenUncertainty) -> Tensor:
        """1/2 log d^2 of the standardised profile.  [B, N]"""
        assert found.profile is not None
        device = found.ids.device
        mean, deviation = (x.to(device)[:, len(_PLAIN) :] for x in (self.mean, self.deviation))
        gaussian = Gaussians(self.gaussian.means.to(device), self.gaussian.root.to(device))
        parts = []
        for rows, places in zip(
            found.profile.flatten(0, 1).split(4096), found.positions.flatten().split(4096), strict=True
        ):
            index = _range_of(places, self.starts.to(device))
            x = (log_odds(rows).to(mean) - mean[index]) / deviation[index]
            parts.append(0.5 * mahalanobis(x, gaussian).clamp_min(1e-30).log())
        return torch.cat(parts).view(found.ids.shape)

    def threshold(self, by: Score, rate: float) -> float:
        """The standardised mean that this share of usual windows exceeds.

        Args:
            by: the score.
            rate: of false alarms.

        Returns:
            A number of deviations.

        Raises:
            ValueError: there are too few windows for the rate.
        """
        values = self.windows[by]
        if not 1 / (len(values) + 1) <= rate < 1:
            raise ValueError(f"expected rate from {1 / (len(values) + 1):.2g} to 1, got {rate}")
        return float(values[-max(1, int(rate * (len(values) + 1)))])

    def save(self, folder: Path) -> None:
        """Write `tokens.json` and `tokens.safetensors`.

        Args:
            folder: created if it does not exist.
        """
        tensors = {
            "starts": self.starts, "mean": self.mean, "deviation": self.deviation, "strange": self.strange,
            "gaussian.means": self.gaussian.means, "gaussian.root": self.gaussian.root,
            "distance": self.distance,
            **{f"windows.{name}": x for name, x in self.windows.items()},
        }  # fmt: skip
        save_fitted(folder, NAME, FORMAT, {"columns": list(self.columns)}, tensors)

    @classmethod
    def load(cls, folder: Path) -> "TokenUsual":
        """Read what `save` wrote.

        Args:
            folder: that of `save`.

        Returns:
            What is usual.

        Raises:
            ValueError: files are not complete.
        """
        record, tensors = load_fitted(folder, NAME, FORMAT, ("columns",))
        try:
            gaussian = Gaussians(tensors.pop("gaussian.means"), tensors.pop("gaussian.root"))
            windows: dict[str, Tensor] = {name: tensors.pop(f"windows.{name}") for name in SCORES}
            return cls(tuple(record["columns"]), gaussian=gaussian, windows=windows, **tensors)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / NAME}.safetensors does not hold what is usual: {error}") from error


def log_odds(log_u: Tensor) -> Tensor:
    """log u / (1 - u), with u at least 1e-7 from 0 and 1.

    Args:
        log_u: log variances of unit processes.

    Returns:
        The same shape.
    """
    u = log_u.exp()
    return u.clamp_min(_ENDS).log() - (-log_u.expm1()).clamp_min(_ENDS).log()


def window_means(scores: Tensor, real: Tensor) -> Tensor:
    """Means of the `WINDOW` rows around each; rows without a number do not count.  [B, N]

    Args:
        scores: [B, N].
        real: [B, N] False = padding.

    Returns:
        NaN if no row around has a number.
    """
    known = real & scores.isfinite()
    kernel = scores.new_ones(1, 1, WINDOW, dtype=torch.float64)
    sides = ((WINDOW - 1) // 2, WINDOW // 2)

    def total(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x.double()[:, None], sides)
        return torch.nn.functional.conv1d(padded, kernel)[:, 0]

    return total(torch.where(known, scores, 0.0)) / total(known)


def _rows_of(parts: Sequence[TokenUncertainty]) -> tuple[Tensor, Tensor]:
    """Scores and profiles of real rows, and their positions.  [n, S + P], [n]"""
    rows, places = [], []
    for part in parts:
        assert part.profile is not None
        scores = [part.score(name)[part.real] for name in _PLAIN]
        rows.append(torch.cat([torch.stack(scores, -1), log_odds(part.profile[part.real])], -1).double())
        places.append(part.positions[part.real])
    return torch.cat(rows), torch.cat(places)


def _starts(last: int) -> Tensor:
    """First positions of ranges, two per octave: 0, 1, 2, 3, 4, 6, 8, 12, ...  [R]"""
    found = {0, 1, 2, 3}
    power = 4
    while power <= last:
        found |= {power, power + power // 2}
        power *= 2
    return torch.tensor(sorted(x for x in found if x <= max(last, 0)))


def _range_of(positions: Tensor, starts: Tensor) -> Tensor:
    """Which range every position lies in."""
    return torch.searchsorted(starts, positions.contiguous(), right=True) - 1


def _by_position(rows: Tensor, places: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation in every range; ranges with few rows have those of a neighbour.  [R, F] each"""
    index = _range_of(places, starts)
    found: list[tuple[Tensor, Tensor] | None] = []
    for number in range(len(starts)):
        own = rows[index == number]
        known = own.isfinite()
        if len(own) and int(known.sum(0).min()) >= min(ENOUGH, len(rows) // 2):
            found.append(_moments(own, known))
        else:
            found.append(None)
    whole = _moments(rows, rows.isfinite())
    behind = next((x for x in found if x is not None), whole)
    filled = []
    for each in found:
        behind = each or behind
        filled.append(behind)
    return torch.stack([mean for mean, _ in filled]), torch.stack([d for _, d in filled])


def _moments(rows: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of known numbers.  [F] each"""
    count = known.sum(0).clamp_min(1)
    mean = torch.where(known, rows, 0.0).sum(0) / count
    square = torch.where(known, rows - mean, 0.0).square().sum(0) / count
    return mean, square.sqrt().clamp_min(1e-6)


# Fitting


def text_batches(data: Any, labels: Tensor | None, tokenizer: Any, most: int | None) -> list[Batch]:
    """Batches of held-out texts with labels, by default their own tokens.

    Args:
        data: texts, inputs, or a loader of inputs.
        labels: [B, N] as in transformers: not shifted, `IGNORED` for tokens that do not count.
        tokenizer: for texts.
        most: number of texts to take.

    Returns:
        Batches, whose items are numbered through.

    Raises:
        ValueError: there is no data.
    """
    if isinstance(data, str):
        raise ValueError("expected several texts to fit to, got one")
    given: list[Any] = [data] if isinstance(data, Mapping | Tensor) else list(data)
    if given and isinstance(given[0], str):
        given = [encode(tokenizer, given[n : n + TEXTS]) for n in range(0, len(given), TEXTS)]

    def labelled(part: Any) -> tuple[Inputs, Tensor]:
        inputs, own = (part[0], part[1]) if isinstance(part, tuple | list) else (part, None)
        own = own if labels is None else labels
        if isinstance(inputs, Mapping) and "labels" in inputs:
            own = inputs["labels"] if own is None else own
            inputs = {name: x for name, x in inputs.items() if name != "labels"}
        ids = ids_of(inputs)
        if own is None:
            own = torch.where(real_tokens(inputs, tuple(ids.shape)).to(ids.device), ids, IGNORED)
        if own.shape != ids.shape:
            got = f"got {tuple(own.shape)}"
            raise ValueError(f"expected labels of shape {tuple(ids.shape)}, as the ids, {got}")
        return inputs, own

    return number_batches(map(labelled, given), most)


@torch.no_grad()  # sums over all texts would otherwise keep all graphs
def fit_language(
    runner: "Runner", start: Settings, batches: list[Batch], options: FitOptions, tokenizer: Any
) -> tuple[Fit, TokenUsual]:
    """Fit frames of all sites, a scale of draws if one clearly helps, and what is usual.

    Args:
        runner: the model and how it is run.
        start: settings before the fit.
        batches: held-out texts.
        options: of the fit.
        tokenizer: to show tokens as text.

    Returns:
        The choice among scales, and what is usual.

    Raises:
        ValueError: there are too few texts.
    """
    numbers = sum(map(len, batches))
    if numbers < 5:
        raise ValueError(f"expected at least 5 texts to fit to, got {numbers}")
    frames = frames_of(runner, split_batches(batches)[0], options)
    device = runner.device(batches[0].inputs)
    start = start.to(device)
    settings = replace(start, frames=frames, draws=(True,) * len(runner.sites))
    silent = replace(settings, scale=torch.zeros_like(settings.scale))
    fit = _fit_scale(runner, silent, batches, options)
    found: tuple[list[TokenUncertainty], list[TokenUncertainty]] = ([], [])
    for batch in options.reported("tokens", batches):
        measured = measure_tokens(runner, silent, batch.inputs, heads=True, tokenizer=tokenizer).cpu()
        apart = batch.numbers % 5 >= 3
        for where, own in zip(found, (~apart, apart), strict=True):
            if bool(own.any()):
                where.append(measured[own])
    return fit, TokenUsual.fit(*found)


def _fit_scale(runner: "Runner", silent: Settings, batches: list[Batch], options: FitOptions) -> Fit:
    """No draws, or one scale for all heads if it gains more than two standard errors on texts kept back.

    The best scale on the first texts is compared with none on those kept back, both by the likelihood of next
    tokens, averaged over draws.
    """
    scales = (0.0, *(SCALES if "global" in options.levels else ()))
    candidates = [
        replace(silent, scale=torch.full_like(silent.scale, scale), noise=silent.noise) for scale in scales
    ]
    firsts = [list(first_items(part, DRAWN_TEXTS)) for part in split_batches(batches)]
    fitted = [
        _text_likelihoods(runner, own, firsts[0], options).mean()
        for own in options.reported("scales", candidates)
    ]
    best = max(range(1, len(scales)), key=lambda n: float(fitted[n])) if len(scales) > 1 else 0
    found = []
    for name, n in (("plain", 0), *((("global", best),) if best else ())):
        found.append((name, n, _text_likelihoods(runner, candidates[n], firsts[1], options)))
    gain = found[-1][2] - found[0][2]  # [texts]
    error = float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else float("inf")
    chosen = len(found) - 1 if float(gain.mean()) > CLEAR * error and len(found) > 1 else 0
    rows = tuple(
        Candidate(name, candidates[n], -float(fitted[n]), -float(scores.mean()), error if n else 0.0)
        for name, n, scores in found
    )
    drawn = "draws gain" if chosen else "draws do not gain"
    reason = f"{rows[chosen].name}: {drawn} more than {CLEAR:g} standard errors on the texts kept back."
    return Fit(rows, rows[chosen].name, rows[chosen].settings, reason)


def _text_likelihoods(
    runner: "Runner", settings: Settings, batches: list[Batch], options: FitOptions
) -> Tensor:
    """Mean log probability of every text's tokens, averaged over draws before the logarithm.  [texts]"""
    everywhere, found = replace(runner, task="tokens"), []
    samples = max(2, options.samples // 2) if settings.any_drawn else 1
    with evaluating(runner.model):
        for batch in batches:
            rows: dict[str, Any] = {"samples": samples, "seed": options.seed, "batch_size": TEXTS}
            device, parts = runner.device(batch.inputs), []
            for own in iterate_rows(batch.inputs, **rows, device=device, first_item=batch.first_item):
                labels = batch.labels.to(device)[own.items.to(device)]  # [R, N]
                logits, _ = everywhere.draw(own, settings, seed=options.seed)  # [R, N, V]
                later = torch.where(labels[:, 1:] == IGNORED, -1, labels[:, 1:])  # shifted by one
                scores = prediction_scores(logits[:, :-1].flatten(0, 1), later.flatten())
                parts.append(-scores["surprise"].view(later.shape))
            each = torch.cat(parts).unflatten(0, (-1, samples))  # [B, S, N - 1]
            mean = each.logsumexp(1) - torch.tensor(float(samples)).log()
            found.append(mean.nanmean(-1).cpu())
    of_texts = torch.cat(found)
    return of_texts[of_texts.isfinite()]
