"""Uncertainty for an existing model: its attention is read as Gaussian-process posteriors.

`attach` returns a handle that predicts with uncertainty and can be fitted and detached.  While one of its
calls runs, hooks see every call of attention and decide with which output the model goes on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from gpattention.checks import check_choice, check_count, check_whole
from gpattention.gp import ItemNoise, attention_entropy
from gpattention.hosts import language
from gpattention.hosts.families.base import AttentionCall, AttentionHook, Context, Site
from gpattention.hosts.fitting import Data, Fit, FitOptions, collect_batches, fit_settings
from gpattention.hosts.generating import Sampling, generate
from gpattention.hosts.moments import host_moments
from gpattention.hosts.painting import pieces_of
from gpattention.hosts.predict import (
    Call,
    Reader,
    Result,
    Task,
    call_model,
    check_module,
    generates,
    make_result,
    uncompiled,
)
from gpattention.hosts.settings import Settings, describe, initial_settings, load_settings, save_settings
from gpattention.hosts.sharing import VARIANCES_FROM, Shared, Sharing, VarianceFrom
from gpattention.hosts.sites import FOUND_FORMS, Found, find_sites, hooked
from gpattention.hosts.tokens import AFTER, SCORES, Score, Span, TokenUncertainty, spans_of
from gpattention.hosts.usual import NOT_FITTED, Usual, fit_usual
from gpattention.hosts.variance import MAX_KEYS, log_stddev, process_mean, query_mask
from gpattention.models import Prediction, Signals, Watch, measure_signals
from gpattention.models.moments import METHODS, Method
from gpattention.models.predict import Inputs, Progress, Rows, evaluating, model_device, run_samples
from gpattention.strangeness import Explanation

MAX_LOG_AMPLITUDE = 3.0
_SITE_SEEDS = 0x9E3779B1  # difference between the seeds of two neighbouring sites


@dataclass(eq=False)
class Runner(Reader):
    """A host model, its attention sites, and how its output is read."""

    sites: tuple[Site, ...]
    max_keys: int = MAX_KEYS
    max_log_amplitude: float | None = None

    def answer(
        self, inputs: Inputs, hook: AttentionHook | None = None, shared: Shared | None = None
    ) -> Tensor:
        """The model's answer to a batch on its device, with or without a hook."""
        if hook is None:
            return self.read(self.model, inputs, nullcontext())
        host = uncompiled(self.model)
        context = hooked(host, self.sites, hook)
        return self.read(host, inputs, context if shared is None else shared.within(context))

    def draws(
        self, inputs: Inputs, settings: Settings, *, seed: int, variances: bool = False,
        variance_from: VarianceFrom = "draws", share: bool = True, **options: Any,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
        """Drawn answers [S, B, ...] of all items and, if asked for, variances of the sites."""

        def answer(rows: Rows, shared: Shared) -> tuple[Tensor, list[Tensor | None]]:
            return self.draw(rows, settings, seed=seed, keep_variances=variances, shared=shared)

        def mean(part: Inputs, shared: Shared) -> object:
            return self.measure(part, settings, keep=False, shared=shared)

        drawing = [self.sites[index].module for index in settings.drawing]
        first = mean if variance_from == "mean" else None
        sharing = Sharing(self.model, drawing, answer, self.known, first, share)
        return sharing.run(inputs, seed=seed, **options)

    def draw(
        self,
        rows: Rows,
        settings: Settings,
        *,
        seed: int,
        keep_variances: bool = False,
        shared: Shared | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One pass with a draw for every row: the answers, and variances if kept.

        If no site draws, it is the host's own pass with its fused operations.
        """
        if not settings.any_drawn:
            return self.answer(rows.inputs), [None] * len(self.sites)
        # a seed for each site, so that draws do not depend on other sites, nor on how batches are cut
        first, count = seed + _SITE_SEEDS, len(self.sites)
        noise = ItemNoise.in_steps(first, _SITE_SEEDS, count, rows.numbers, rows.samples)
        return self.measure(rows.inputs, settings, noise, keep=keep_variances, shared=shared)

    def measure(
        self,
        inputs: Inputs,
        settings: Settings,
        noise: Sequence[ItemNoise] | None = None,
        *,
        keep: bool = True,
        shared: Shared | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """One hooked pass: the answers and, if kept, variances of the sites, [B, H, N] each.

        Without noise, answers are the host's own, and sites that do not draw are measured too.  With noise, a
        draw is added to every mean, token by token.  With `shared` it is a pass of samples that share a part,
        and only sites that draw are looked at.
        """
        variances: list[Tensor | None] = [None] * len(self.sites)
        called: list[Site] = []

        def hook(site: Site, call: AttentionCall) -> Tensor:  # [B, H, Q, D]
            called.append(site)
            if (noise is not None or shared is not None) and not settings.drawn(site.index):
                return call.mean
            # gradients ignore how variances depend on earlier draws, as they would cross Cholesky factors
            still = call.map(Tensor.detach) if torch.is_grad_enabled() else call
            spread = partial(self.log_std, site, still, settings)
            log_std = spread() if shared is None else shared.spread(call.mean, spread)  # [B, H, Q]
            if keep:
                variances[site.index] = (2 * log_std.detach()).exp()
            if noise is None:
                return call.mean
            shape, device = (1, *call.mean.shape), call.mean.device
            normal = noise[site.index].normal(shape, log_std.dtype, device)[0]  # [B, H, Q, D]
            if torch.is_grad_enabled() or normal.dtype != call.mean.dtype:
                return call.mean + (log_std.exp()[..., None] * normal).to(call.mean.dtype)
            # in place, and token by token as the host goes on with it: not one new matrix
            return torch.addcmul(call.mean, normal, log_std.exp()[..., None], out=normal)

        answer = self.answer(inputs, hook, shared)
        if not called:
            expected = f"expected the model to call one of its {len(self.sites)} sites"
            raise ValueError(f"{expected}, got a forward pass that called none: attach before you compile")
        return answer, variances

    def log_std(self, site: Site, call: AttentionCall, settings: Settings) -> Tensor:
        """Log standard deviations of all tokens and heads at a site.  [B, H, Q]"""
        prior, frame = settings.prior(site.index, site.heads), settings.frame(site.index)
        caps: dict[str, Any] = {"max_keys": self.max_keys, "max_log_amplitude": self.max_log_amplitude}
        # a graph, of gradients or of an exported program, is of the whole call
        whole = torch.is_grad_enabled() or torch.compiler.is_compiling()
        parts = [call] if whole else call.in_cache()
        found = [log_stddev(part, prior, frame, **caps) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def signals(self, settings: Settings, inputs: Inputs | Iterable[Any], **options: Any) -> Signals:
        """Signals of plain passes, whose variances are in units of t^2.

        t is set to 1, as a fit that chose no draws has made it 0, which would say nothing about the inputs.
        """
        ones = replace(settings, scale=torch.ones_like(settings.scale))
        moved: dict[torch.device, Settings] = {}

        def answer(batch: Inputs, watch: Watch) -> tuple[Tensor, Tensor]:
            device = self.device(batch)
            own = moved.setdefault(device, ones.to(device))

            def hook(site: Site, call: AttentionCall) -> Tensor:
                log_variance = 2 * self.log_std(site, call, own) if watch.wants_variance else None
                if call.past is not None:
                    entropy = call.past.entropy(call)  # [B, H, Q]
                else:
                    dot = call.form in ("softmax", "exp_dot")
                    entropy = attention_entropy(call.q, call.k, dot=dot, mask=call.mask)
                watch.see(site.title, log_variance, entropy, call.mean[:, 0], query_mask(call))
                return call.mean

            return self.with_features(batch, hooked(uncompiled(self.model), self.sites, hook))

        return measure_signals(self.model, answer, inputs, **options)

    def counting(self, seen: list[int]) -> Context:
        """Within the block, every call of a site appends the number of its sequences."""

        def count(site: Site, call: AttentionCall) -> Tensor:
            seen.append(len(call.mean))
            return call.mean

        return hooked(uncompiled(self.model), self.sites, count)

    def device(self, inputs: Inputs) -> torch.device:
        """The device that the model computes on."""
        return model_device(self.model, inputs)


class Handle:
    """Uncertainty of one model; created by `gpattention.attach`.

    The model is changed only while a call of the handle runs: used directly, saved or copied, it is the model
    as before.

    Args:
        runner: the model and how it is run.
        found: its attention modules.
        tokenizer: of a language model.

    Attributes:
        model: the host.
        sites: the attention modules that the handle is attached to.
        tokenizer: as passed to `attach`.
    """

    def __init__(self, runner: Runner, found: Found, tokenizer: Any = None) -> None:
        self._runner, self.found, self.tokenizer = runner, found, tokenizer
        self.model, self.sites = runner.model, found.sites
        self._settings = initial_settings(found.sites)
        self._attached, self._usual = True, Usual()

    @property
    def task(self) -> Task | None:
        """What the model answers; None until an output has been seen."""
        return self._runner.task

    @property
    def sharing(self) -> str:
        """A sentence on what the samples of the last prediction shared."""
        return self._runner.known.note

    @property
    def settings(self) -> Settings:
        """Scales, noises and powers of the draws; assign to change them."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        shape = (len(self.sites), max(site.heads for site in self.sites))
        for name in ("scale", "noise", "power"):
            if (found := tuple(getattr(settings, name).shape)) != shape:
                raise ValueError(f"expected settings.{name} of shape {shape}, got {found}")
        if (count := len(settings.draws)) != shape[0]:
            raise ValueError(f"expected settings.draws for {shape[0]} sites, got {count}")
        if bool((settings.scale < 0).any()) or bool((settings.noise <= 0).any()):
            raise ValueError("expected settings with scale >= 0 and noise > 0, got others")
        self._settings, self._usual = settings, Usual()  # other settings make other signals

    def predict(
        self,
        inputs: Inputs | Mapping[str, Any],
        samples: int = 10,
        seed: int = 0,
        *,
        batch_size: int | None = None,
        variances: bool = False,
        first_item: int = 0,
        tokens: bool = False,
        variance_from: VarianceFrom = "draws",
        share: bool = True,
        method: Method = "draws",
        progress: Progress | None = None,
    ) -> Result:
        """Predict with uncertainty, in evaluation mode and without gradients.

        The draws of item i depend only on `seed` and `first_item` + i.  What the model computes before its
        first draw is computed once for all samples of an item (see `sharing`).

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first.
            samples: number of draws.  0 returns the model's own prediction, to the last bit; so do samples if
                no site draws, except for the temperature.
            seed: of the draws.
            batch_size: most rows (items times samples) that run at once.  If not given, as many as fit the
                cache of a CPU, or 2000 on a GPU, halved until they fit its memory.
            variances: add the variances of each site, [B, H, N] averaged over the samples, to a `Prediction`.
            first_item: number of the first item, if the inputs are a part of more.
            tokens: of a language model, predict after every token, only with samples=0; by default its answer
                is the `Prediction` of the token that follows the text.
            variance_from: "draws" computes the variances of a site from queries and keys of the same draw;
                "mean" takes those of one pass without draws for all samples, which is faster and ignores how
                draws of lower layers change the variances of higher ones.
            share: False runs every sample as a full pass, for models with internal state.
            method: "moments" propagates variances through one pass instead of drawing, in classifiers around
                one `nn.TransformerEncoder`; its logits are those of the mean-field prediction.
            progress: called with the number of rows done, and of all rows.

        Returns:
            A `Prediction` of classes, a `TokenPrediction` of a class per token, or `Values` with a variance.

        Raises:
            ValueError: an argument is wrong, the output cannot be read, or the handle was detached.

        >>> handle.predict(tokenizer(sentences, padding=True, return_tensors="pt")).confidence
        """
        self._check_attached()
        samples, seed = check_count("samples", samples, least=0), check_whole("seed", seed)
        check_choice("variance_from", variance_from, VARIANCES_FROM)
        check_choice("method", method, METHODS)
        if method == "moments":
            rest: dict[str, Any] = {"batch_size": batch_size, "variances": variances, "progress": progress}
            return self._moments(inputs, first_item=first_item, **rest)
        # read once, as another thread may change the settings
        adaptive, own, runner = self._usual.temperature, self._settings, self._runner
        if tokens:
            if samples > 0:
                raise ValueError(f"expected samples=0 for tokens=True, got {samples}: all draws are too many")
            runner = replace(runner, task="tokens")
        if variances:
            own.warn_unfitted(stacklevel=3)
        drawn = samples > 0 and own.any_drawn
        count = samples if drawn else 1  # without draws all samples are one
        settings = own.to(runner.device(inputs))

        def answer(rows: Rows) -> tuple[Tensor, Sequence[Tensor | None]]:
            if samples > 0:
                return runner.draw(rows, settings, seed=seed, keep_variances=variances)
            return runner.measure(rows.inputs, settings) if variances else (runner.answer(rows.inputs), ())

        rows: dict[str, Any] = {
            "samples": count, "seed": seed, "batch_size": batch_size, "first_item": first_item,
            "progress": progress,
        }  # fmt: skip
        if drawn:
            how: dict[str, Any] = {"variances": variances, "variance_from": variance_from, "share": share}
            answers, means = runner.draws(inputs, settings, **how, **rows)
        else:
            answers, means = run_samples(self.model, answer, inputs, **rows)
        answers = answers.expand(max(samples, 1), *answers.shape[1:]).contiguous()
        assert runner.task is not None
        acting: dict[str, Any] = {}
        if samples > 0:  # the model's own prediction has no temperature
            acting = {"temperature": own.temperature, "residual": own.residual}
            if adaptive is not None:
                seen = self._runner.signals(own, inputs, batch_size=batch_size)
                acting["temperature"] = adaptive.temperature(answers, seen)[:, None]  # [B, 1]
        return make_result(answers, runner.task, inputs, means if variances else None, drawn=drawn, **acting)

    def _moments(self, inputs: Inputs, **options: Any) -> Prediction:
        """A prediction by one pass, whose logits the constant temperature divides."""
        runner, own = self._runner, self._settings
        settings = own.to(runner.device(inputs))

        def spread(site: Site, call: AttentionCall) -> Tensor | None:
            return runner.log_std(site, call, settings) if settings.drawn(site.index) else None

        how: dict[str, Any] = {"sites": self.sites, "spread": spread, "temperature": own.temperature}
        return host_moments(uncompiled(runner.model), runner.class_logits, inputs, **how, **options)

    def variances(self, inputs: Inputs, *, batch_size: int | None = None) -> tuple[Tensor, ...]:
        """Variances of every token at every site, in one plain pass; also of sites that do not draw.

        Before a fit they may be unrelated to what the model does not know, or rank items the wrong way round:
        a warning says so.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first.
            batch_size: most items that run at once, as in `predict`.

        Returns:
            [B, H, N] for each site.

        Raises:
            ValueError: the output cannot be read, or the handle was detached.
        """
        self._check_attached()
        self._settings.warn_unfitted(stacklevel=3)
        settings = self._settings.to(self._runner.device(inputs))

        def answer(rows: Rows) -> tuple[Tensor, Sequence[Tensor | None]]:
            return self._runner.measure(rows.inputs, settings)

        # one sample, without noise
        _, means = run_samples(self.model, answer, inputs, samples=1, seed=0, batch_size=batch_size)
        return tuple(x for x in means if x is not None)

    def signals(self, inputs: Inputs | Iterable[Any], **options: Any) -> Signals:
        """Signals of every item from one plain pass; also of sites that do not draw.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first, or a loader: an iterable of those,
                or of pairs or mappings with labels, which are ignored.
            **options: `variance=False` leaves out the variances, which take most of the time;
                `per_token=True` keeps the numbers of every head and token; `batch_size` is the most items
                that run at once.

        Returns:
            Logits, features, and profiles of the log variance, in units of the scale of the draws, and of the
            attention entropy, on the device of the inputs; of a loader on the CPU.

        Raises:
            ValueError: the output cannot be read, or the handle was detached.

        >>> handle.signals(inputs).variance  # [B, sites x heads]
        """
        self._check_attached()
        return self._runner.signals(self._settings, inputs, **options)

    def process_mean(self, inputs: Inputs) -> Tensor:
        """Answer with the posterior mean of the Gaussian processes in place of all attention.

        The answers are those of the model up to rounding, which this lets you check on your own data.

        Args:
            inputs: a batch, which runs at once.

        Returns:
            Logits, values or embeddings, depending on the task.

        Raises:
            ValueError: the output cannot be read, or the handle was detached.
        """
        self._check_attached()
        settings = self._settings.to(self._runner.device(inputs))

        def hook(site: Site, call: AttentionCall) -> Tensor:
            return process_mean(call, settings.frame(site.index)).to(call.mean.dtype)

        with evaluating(self.model):
            return self._runner.answer(inputs, hook)

    def fit(
        self,
        data: Data,
        labels: Tensor | None = None,
        *,
        shifted: Mapping[str, Inputs | Iterable[Any]] | None = None,
        **options: Any,
    ) -> Fit:
        """Fit scales, noises, powers and which sites draw to held-out data, by negative log-likelihood.

        If draws do not help on the part of the data that was kept back, scales become 0 and predictions stay
        those of the model.  The fit also learns what is usual: of items for `strangeness` and `flag`, of the
        tokens of a language model for `token_uncertainty` and `flag_spans`.

        Args:
            data: a loader of (inputs, labels) or of mappings with "labels", one such pair, or the inputs; of
                a language model texts, or inputs whose own tokens are the labels.
            labels: of `data`, if that is inputs only.
            shifted: the same items in the same order, synthetically shifted: inputs or a loader for each of
                at least two shifts, by name.  The strangeness is then what separates them best.
            **options: those of `FitOptions`; `temperature="adaptive"` fits one that rises with strangeness to
                clean and shifted items of a classifier.

        Returns:
            All candidates and the choice among them, whose settings the handle now has.

        Raises:
            ValueError: options are wrong, labels do not fit the model's answers, or there are too few items.

        >>> handle.fit(validation_loader)
        """
        self._check_attached()
        adaptive = options.get("temperature") == "adaptive"
        chosen = FitOptions(**{**options, "temperature": True} if adaptive else options)
        if self.found.writes and self.task in (None, "causal") and generates(self.model):
            if shifted is not None or adaptive:
                got = "shifted items" if shifted is not None else "temperature='adaptive'"
                raise ValueError(f"expected held-out texts alone for a language model, got {got}")
            texts = language.text_batches(data, labels, self.tokenizer, chosen.items)
            fit, tokens = language.fit_language(self._runner, self._settings, texts, chosen, self.tokenizer)
            self._settings, self._usual = fit.settings, Usual(tokens=tokens, why_not=language.OF_TOKENS)
            return fit
        batches = collect_batches(data, labels, chosen.items)
        with torch.inference_mode(False):  # the fit needs gradients, even if they are off around it
            fit = fit_settings(self._runner, self._settings, batches, chosen)
            fitted = Handle(self._runner, self.found)  # other threads use the old settings meanwhile
            fitted._settings = fit.settings
            usual = fit_usual(
                fitted, batches, shifted, adaptive=adaptive, samples=chosen.samples, seed=chosen.seed
            )
        self._settings, self._usual = fit.settings, usual
        return fit

    def token_uncertainty(
        self,
        inputs: Inputs | Mapping[str, Any] | str | Sequence[str],
        *,
        heads: bool = False,
        batch_size: int | None = None,
    ) -> TokenUncertainty:
        """Scores of every token of a text by a language model, from one plain pass without draws.

        Args:
            inputs: one or several texts, if `attach` was given a tokenizer; a tensor of ids, or a mapping of
                tensors, with the batch first.
            heads: keep the log variance of every head, the `profile`.
            batch_size: texts that run at once, 8 if not given.

        Returns:
            Scores of every token; after a fit also how far they are from what is usual.

        Raises:
            ValueError: the model has no causal attention, or the handle was detached.

        >>> handle.token_uncertainty("The capital of France is Madrid.").show()
        """
        self._check_attached()
        self._settings.warn_about_origin(stacklevel=3)
        known: dict[str, Any] = {"usual": self._usual.tokens, "tokenizer": self.tokenizer}
        given = language.as_inputs(inputs, self.tokenizer)
        options: dict[str, Any] = {"heads": heads, "batch_size": batch_size, **known}
        return language.measure_tokens(self._runner, self._settings, given, **options)

    def generate(
        self,
        inputs: Inputs | Mapping[str, Any] | str | Sequence[str],
        max_new_tokens: int = 20,
        *,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[TokenUncertainty]:
        """Continue texts token by token, with the ids of the model's own `generate` without beams.

        Args:
            inputs: texts or ids, as in `token_uncertainty`; padding must come first.
            max_new_tokens: most tokens; texts that end earlier continue with padding, whose rows are not
                real.
            do_sample: choose at random instead of the likeliest token.
            temperature: divides the logits of random choices.
            top_p: choose among the likeliest tokens that have this probability together.
            seed: of random choices; the ids are those after `torch.manual_seed(seed)`.

        Returns:
            An iterator with one row for each token, whose id is `next_ids`; `TokenUncertainty.join` joins
            them.

        Raises:
            ValueError: the model is an encoder-decoder, its settings change ids in other ways, or the handle
                was detached.

        >>> steps = list(handle.generate("Once upon a time", max_new_tokens=30))
        >>> TokenUncertainty.join(steps).show()
        """
        self._check_attached()
        self._settings.warn_about_origin(stacklevel=3)
        given = language.as_inputs(inputs, self.tokenizer, left=True)
        given = {"input_ids": given} if isinstance(given, Tensor) else dict(given)
        how = Sampling(do_sample, temperature, top_p)
        known: dict[str, Any] = {"usual": self._usual.tokens, "tokenizer": self.tokenizer}
        most: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": how, "seed": seed}
        return generate(self._runner, self._settings, given, **most, **known)

    def flag_spans(
        self,
        inputs: Inputs | Mapping[str, Any] | str | Sequence[str] | TokenUncertainty,
        rate: float = 0.01,
        *,
        by: Score = AFTER,
        batch_size: int | None = None,
    ) -> list[Span]:
        """Spans of texts that are unlike the held-out texts of `fit`.

        A token is flagged if the mean score of the 8 tokens around it, in deviations from what is usual at
        their positions, is larger than for all but a share `rate` of the held-out tokens.

        Args:
            inputs: as in `token_uncertainty`, or its result.
            rate: share of usual tokens that are flagged nevertheless.
            by: the score.
            batch_size: as in `token_uncertainty`.

        Returns:
            Runs of flagged tokens, text by text.

        Raises:
            ValueError: the handle was not fitted, or was detached, or there are too few texts for the rate.

        >>> handle.flag_spans(text)
        """
        self._check_attached()
        if (usual := self._usual.tokens) is None:
            raise ValueError(f"{NOT_FITTED} for language models (held-out texts)")
        check_choice("by", by, SCORES)
        found = inputs
        if not isinstance(found, TokenUncertainty):
            found = self.token_uncertainty(found, batch_size=batch_size)
        means = language.window_means(found.score(by, standardised=True), found.real)
        flagged = found.real & (means >= usual.threshold(by, rate))
        return spans_of(flagged, means, [pieces_of(self.tokenizer, line) for line in found.ids.tolist()])

    def strangeness(self, inputs: Inputs | Iterable[Any], **options: Any) -> Explanation:
        """How strange inputs are compared with the held-out items of `fit`, and why.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first, or a loader.
            **options: `batch_size`, as in `signals`.

        Returns:
            A score, larger for stranger inputs, its p-value, and which part, site and head cause it.

        Raises:
            ValueError: the handle was not fitted, or its fit found no strangeness, for the reason given.

        >>> handle.strangeness(inputs).p_value  # [B]
        """
        return self._usual.fitted().explain(self.signals(inputs, **options))

    def flag(self, inputs: Inputs | Iterable[Any], rate: float = 0.01, **options: Any) -> Tensor:
        """Which inputs are unlike the held-out items of `fit`.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first, or a loader.
            rate: of false alarms among usual inputs; at least 1 / (n + 1), with n two fifths of the items.
            **options: `batch_size`, as in `signals`.

        Returns:
            [B] True for strange inputs.

        Raises:
            ValueError: there are too few items for the rate, and as in `strangeness`.

        >>> handle.flag(inputs, rate=0.01)
        """
        return self._usual.fitted().flag(self.signals(inputs, **options), rate)

    def save(self, folder: str | Path) -> None:
        """Write the settings to `attached.json` and `attached.safetensors`, each completely or not at all.

        What was fitted of the rest goes beside them: `strangeness`, `adaptive_temperature` or `tokens`, each
        as a JSON and a safetensors file.  The model is not written; save it as usual, also in this folder.

        Args:
            folder: created if it does not exist.

        >>> handle.save("attached")
        """
        save_settings(Path(folder), [site.name for site in self.sites], self._settings)
        self._usual.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, for the same model.

        Args:
            folder: that of `save`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: something is unexpected; nothing is loaded then.
        """
        sites, settings = load_settings(Path(folder))
        usual = Usual.load(Path(folder))
        self._take(sites, settings, str(folder))
        self._usual = usual

    def state_dict(self) -> dict[str, Any]:
        """The settings as a mapping, for example for your own checkpoints; `save` writes files.

        Returns:
            What `load_state_dict` takes.
        """
        return {"sites": [site.name for site in self.sites], **self._settings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the mapping of `state_dict`, for the same model.

        Args:
            state: that mapping.

        Raises:
            ValueError: it is something else; nothing is loaded then.
        """
        settings = Settings.from_state_dict({k: v for k, v in state.items() if k != "sites"})
        self._take(list(state.get("sites", [])), settings, "state")

    def detach(self) -> nn.Module:
        """Detach from the model; further calls of the handle fail.

        Returns:
            The model, as it was.
        """
        self._attached = False
        return self.model

    def __enter__(self) -> Self:
        self._check_attached()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        return describe(type(self.model).__name__, self.found, self._settings, attached=self._attached)

    def _take(self, sites: list[str], settings: Settings, source: str) -> None:
        """Take settings from elsewhere, if they are of the same sites."""
        own = [site.name for site in self.sites]
        if own != sites:
            raise ValueError(f"{source}: expected the settings of sites {own}, got those of {sites}")
        self.settings = settings

    def _check_attached(self) -> None:
        if not self._attached:
            raise ValueError("expected an attached handle, got one that was detached: call attach again")


def attach(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    task: Task | None = None,
    call: Call | None = None,
    max_keys: int = MAX_KEYS,
    max_log_amplitude: float | None = MAX_LOG_AMPLITUDE,
) -> Handle:
    """Give the softmax attention of `model` its Gaussian-process variance, without changing its predictions.

    It knows `nn.MultiheadAttention` (also inside `nn.TransformerEncoder`), encoders and decoders of Hugging
    Face transformers, timm's vision transformers, and our own softmax and kernel models.  Relative-position
    and ALiBi attention, and causal attention of other libraries, is left alone, with reasons; a model without
    any other attention is refused.

    Args:
        model: any module; it is not changed.
        tokenizer: of a language model, to pass texts and to show tokens as text.
        task: "classification", "tokens", "regression", "embedding", or "causal" for a language model, whose
            labels are its own tokens, shifted by one; inferred from the output if not given.
        call: how to run the model: `call(model, inputs)` returns its output with the batch first.
        max_keys: longer sequences condition on this many of their keys, evenly spaced (the sparse form).
        max_log_amplitude: cap of the tempered log amplitude above its mean.

    Returns:
        A handle, to predict with, fit, save and detach.

    Raises:
        ValueError: the model has no such attention, for the reasons given, or an argument is wrong.

    >>> handle = gpattention.attach(model)
    >>> handle.fit(validation_loader)
    >>> handle.predict(inputs, samples=10).confidence
    """
    check_module(model)
    if max_log_amplitude is not None and not max_log_amplitude >= 0:
        raise ValueError(f"expected max_log_amplitude >= 0 or None, got {max_log_amplitude}")
    max_keys = check_count("max_keys", max_keys, least=1)
    found = find_sites(model)
    if not found.sites:
        expected = f"expected a model with softmax attention, got {type(model).__name__} with none"
        raise ValueError(f"{expected}:\n{found}\nwhat would be found: {FOUND_FORMS}")
    runner = Runner(model, call or call_model, task, "attach", found.sites, max_keys, max_log_amplitude)
    return Handle(runner, found, tokenizer)
