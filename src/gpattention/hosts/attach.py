"""Uncertainty for a model that exists already: its attention read as Gaussian-process posteriors.

`attach` gives a handle: predict with uncertainty, fit it, take it off again.  While a call of the handle
runs, hooks at the model's attention sites see every call of attention and say what the model goes on with.
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
    check_task,
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
from gpattention.models.predict import (
    Inputs,
    Progress,
    Rows,
    Variances,
    evaluating,
    model_device,
    run_samples,
)
from gpattention.strangeness import Explanation

MAX_LOG_AMPLITUDE = 3.0
_SITE_SEEDS = 0x9E3779B1  # sites of one seed lie this far apart


@dataclass(eq=False)
class Runner(Reader):
    """A host model, where it attends, and how its output is read."""

    sites: tuple[Site, ...]
    max_keys: int = MAX_KEYS
    max_log_amplitude: float | None = None

    def answer(
        self, inputs: Inputs, hook: AttentionHook | None = None, shared: Shared | None = None
    ) -> Tensor:
        """What the model answers to one batch on its device, hooked or by itself."""
        if hook is None:
            return self.read(self.model, inputs, nullcontext())
        host = uncompiled(self.model)
        context = hooked(host, self.sites, hook)
        return self.read(host, inputs, context if shared is None else shared.within(context))

    def draws(
        self, inputs: Inputs, settings: Settings, *, seed: int, variances: bool = False,
        variance_from: VarianceFrom = "draws", share: bool = True, **options: Any,
    ) -> tuple[Tensor, Variances]:  # fmt: skip
        """Drawn answers [S, B, ...] of all items, and variances of the sites where they are wanted."""

        def answer(rows: Rows, shared: Shared) -> tuple[Tensor, list[Tensor | None]]:
            return self.draw(rows, settings, seed=seed, keep_variances=variances, shared=shared)

        def mean(part: Inputs, shared: Shared) -> object:
            return self.measure(part, settings, keep=False, shared=shared)

        drawing = [site.module for site in self.sites if settings.drawn(site.index)]
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
        """One pass in which every row draws for itself: the answers, and variances where kept.

        Where no site draws it is the host's own pass, fused operations and all.
        """
        if not settings.any_drawn:
            return self.answer(rows.inputs), [None] * len(self.sites)
        # of its own for every site: which others draw, and how items are cut into batches, changes nothing
        seeds = [seed + (index + 1) * _SITE_SEEDS for index in range(len(self.sites))]
        noise = [ItemNoise(own, rows.numbers, rows.samples) for own in seeds]
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
        """One hooked pass: the answers and, where kept, variances of the sites, [B, H, N] each.

        Without noise, answers are the host's own, and sites that do not draw are measured too.  With it, a
        draw of its deviation is added to every mean, token by token.  With `shared` it is a pass of samples
        that have a part in common, and only sites that draw are met.
        """
        variances: list[Tensor | None] = [None] * len(self.sites)
        called: list[Site] = []

        def hook(site: Site, call: AttentionCall) -> Tensor:  # [B, H, Q, D]
            called.append(site)
            if (noise is not None or shared is not None) and not settings.drawn(site.index):
                return call.mean
            # how it depends on earlier draws is left out of gradients: they would cross Cholesky factors
            still = call.map(Tensor.detach) if torch.is_grad_enabled() else call
            spread = partial(self.log_std, site, still, settings)
            log_std = spread() if shared is None else shared.spread(call.mean, spread)  # [B, H, Q]
            if keep:
                variances[site.index] = (2 * log_std.detach()).exp()
            if noise is None:
                return call.mean
            shape, device = (1, *call.mean.shape), call.mean.device
            normal = noise[site.index].normal(shape, log_std.dtype, device)[0]  # [B, H, Q, D]
            return call.mean + (log_std.exp()[..., None] * normal).to(call.mean.dtype)

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
        return torch.cat([log_stddev(part, prior, frame, **caps) for part in parts])

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
        """Inside, every call of a site adds the number of its sequences."""

        def count(site: Site, call: AttentionCall) -> Tensor:
            seen.append(len(call.mean))
            return call.mean

        return hooked(uncompiled(self.model), self.sites, count)

    def device(self, inputs: Inputs) -> torch.device:
        """Where the model computes."""
        return model_device(self.model, inputs)


class Handle:
    """Uncertainty of one model; made by `gpattention.attach`.

    The model is touched only while a call of the handle runs: used directly, saved or copied, it is what it
    was.

    Args:
        runner: the model and how it is run.
        found: where it attends.
        tokenizer: of a language model.

    Attributes:
        model: the host.
        sites: where it attends.
        tokenizer: as given to `attach`.
    """

    def __init__(self, runner: Runner, found: Found, tokenizer: Any = None) -> None:
        self._runner, self.found, self.tokenizer = runner, found, tokenizer
        self.model, self.sites = runner.model, found.sites
        self._settings = initial_settings(found.sites)
        self._attached, self._usual = True, Usual()

    @property
    def task(self) -> Task | None:
        """What the model answers; None until it has been seen to."""
        return self._runner.task

    @property
    def sharing(self) -> str:
        """What the samples of the last prediction had in common, in a sentence."""
        return self._runner.known.note

    @property
    def settings(self) -> Settings:
        """What it draws with; assign to change."""
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
        self._settings, self._usual = settings, Usual()  # by other settings signals are others

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

        The draws of item i depend on `seed` and `first_item` + i alone.  What the model computes before its
        first draw is computed once for all samples of an item (see `sharing`).

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first.
            samples: number of draws.  0 is the model itself, to the last bit; so are samples where no site
                draws, but for the temperature.
            seed: of the draws.
            batch_size: most rows (items times samples) that run at once: if not given as many as stay in the
                cache of a CPU, or 2000 on a GPU, halved until they fit its memory.
            variances: add each site's variances, [B, H, N] averaged over the samples, to a `Prediction`.
            first_item: number of the first item, where the inputs are a part of more.
            tokens: of a language model, what it says after every token, with samples=0 alone: otherwise its
                answer is the `Prediction` of the token that follows the text.
            variance_from: "draws" computes the variances of a site from what the draws before it made of its
                queries and keys; "mean" takes those of one pass without draws for all samples, which is
                faster and leaves out how the draws of lower layers change the variances of higher ones.
            share: False runs every sample as a full pass: for models with a state of their own.
            method: "moments" propagates variances through one pass instead of drawing, in classifiers around
                one `nn.TransformerEncoder`; its logits are those of the mean-field prediction.
            progress: called with how many rows are done, and how many there are.

        Returns:
            A `Prediction` of classes, a `TokenPrediction` of a class per token, or `Values` with a variance.

        Raises:
            ValueError: for wrong numbers, outputs that cannot be read, and a handle that was detached.

        >>> handle.predict(tokenizer(sentences, padding=True, return_tensors="pt")).confidence
        """
        self._check_attached()
        samples, seed = check_count("samples", samples, least=0), check_whole("seed", seed)
        check_choice("variance_from", variance_from, VARIANCES_FROM)
        check_choice("method", method, METHODS)
        if method == "moments":
            rest: dict[str, Any] = {"batch_size": batch_size, "variances": variances, "progress": progress}
            return self._moments(inputs, first_item=first_item, **rest)
        # once: a thread may change the settings meanwhile
        adaptive, own, runner = self._usual.temperature, self._settings, self._runner
        if tokens:
            if samples > 0:
                raise ValueError(
                    f"expected samples=0 for tokens=True, got {samples}: draws of all are too many"
                )
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
        if samples > 0:  # the mean is the model itself, which nothing divides
            acting = {"temperature": own.temperature, "residual": own.residual}
            if adaptive is not None:
                seen = self._runner.signals(own, inputs, batch_size=batch_size)
                acting["temperature"] = adaptive.temperature(answers, seen)[:, None]  # [B, 1]
        return make_result(answers, runner.task, inputs, means if variances else None, drawn=drawn, **acting)

    def _moments(self, inputs: Inputs, **options: Any) -> Prediction:
        """One pass, by the settings, whose constant temperature divides the logits."""
        runner, own = self._runner, self._settings
        settings = own.to(runner.device(inputs))

        def read(part: Inputs) -> Tensor:
            answer = runner.read(uncompiled(runner.model), part, nullcontext())
            check_task(runner.task)
            return answer

        def spread(site: Site, call: AttentionCall) -> Tensor | None:
            return runner.log_std(site, call, settings) if settings.drawn(site.index) else None

        how: dict[str, Any] = {"sites": self.sites, "spread": spread, "temperature": own.temperature}
        return host_moments(uncompiled(runner.model), read, inputs, **how, **options)

    def variances(self, inputs: Inputs, *, batch_size: int | None = None) -> tuple[Tensor, ...]:
        """Variances of every token at every site, in one plain pass; also of sites that do not draw.

        Before a fit nothing says how they go with what the model does not know, and as a score they may rank
        items the wrong way round: reading them then warns.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first.
            batch_size: most items that run at once, as in `predict`.

        Returns:
            [B, H, N] for each site.

        Raises:
            ValueError: for outputs that cannot be read, and a handle that was detached.
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
        """What one plain pass says about every item: also of sites that do not draw.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first, or a loader: an iterable of such,
                or of pairs or mappings with labels, which are left out.
            **options: `variance=False` leaves out the variances, which cost most; `per_token=True` keeps what
                every head said of every token; `batch_size` is the most items that run at once.

        Returns:
            Logits, features, and profiles of the log variance, in units of the scale of the draws, and of the
            attention entropy, where the inputs lie; of a loader on the CPU.

        Raises:
            ValueError: for outputs that cannot be read, and a handle that was detached.

        >>> handle.signals(inputs).variance  # [B, sites x heads]
        """
        self._check_attached()
        return self._runner.signals(self._settings, inputs, **options)

    def process_mean(self, inputs: Inputs) -> Tensor:
        """Answer with every attention replaced by its Gaussian process's own mean.

        The answers are those of the model, up to rounding: this is how to see it on data of your own.

        Args:
            inputs: a batch, which runs at once.

        Returns:
            Logits, values or embeddings, as the task has it.

        Raises:
            ValueError: for outputs that cannot be read, and a handle that was detached.
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
        """Fit scales, noise, powers and which sites draw on held-out data, by negative log-likelihood.

        Where drawing does not help on the part of the data kept back from the fit, the scales become 0 and
        the model stays as it is.  What is usual is fitted along, for `strangeness` and `flag`; of a language
        model it is what is usual for every token, for `token_uncertainty` and `flag_spans`.

        Args:
            data: a loader of (inputs, labels) or of mappings with "labels", a pair of them, or the inputs; of
                a language model texts, or inputs whose own tokens are the labels.
            labels: of `data`, where that is inputs alone.
            shifted: the same items in the same order, synthetically shifted, by the names of at least two
                shifts: inputs, or a loader each.  The strangeness is then what separates them best.
            **options: those of `FitOptions`; `temperature="adaptive"` fits one that rises with strangeness to
                clean and shifted items of a classifier.

        Returns:
            All candidates and the choice among them, whose settings the handle has now.

        Raises:
            ValueError: for wrong options, labels that do not fit the model's answers, and too few items.

        >>> handle.fit(validation_loader)
        """
        self._check_attached()
        adaptive = options.get("temperature") == "adaptive"
        chosen = FitOptions(**{**options, "temperature": True} if adaptive else options)
        if self.found.writes and self.task in (None, "causal") and generates(self.model):
            return self._fit_language(data, labels, chosen, unused={"shifted": shifted, "adaptive": adaptive})
        batches = collect_batches(data, labels, chosen.items)
        with torch.inference_mode(False):  # the fit differentiates, wherever it is called
            fit = fit_settings(self._runner, self._settings, batches, chosen)
            fitted = Handle(self._runner, self.found)  # other threads have the old one until all is fitted
            fitted._settings = fit.settings
            usual = fit_usual(
                fitted, batches, shifted, adaptive=adaptive, samples=chosen.samples, seed=chosen.seed
            )
        self._settings, self._usual = fit.settings, usual
        return fit

    def _fit_language(
        self, data: Data, labels: Tensor | None, options: FitOptions, unused: Mapping[str, Any]
    ) -> Fit:
        """Fit frames, a scale, and what is usual for every token."""
        if given := [name for name, value in unused.items() if value]:
            raise ValueError(f"expected held-out texts alone for a language model, got {', '.join(given)}")
        batches = language.text_batches(data, labels, self.tokenizer, options.items)
        fit, tokens = language.fit_language(self._runner, self._settings, batches, options, self.tokenizer)
        self._settings, self._usual = fit.settings, Usual(tokens=tokens, why_not=language.OF_TOKENS)
        return fit

    def token_uncertainty(
        self,
        inputs: Inputs | Mapping[str, Any] | str | Sequence[str],
        *,
        heads: bool = False,
        batch_size: int | None = None,
    ) -> TokenUncertainty:
        """What a language model says of every token: one plain pass, which draws nothing.

        Args:
            inputs: a text or several, where `attach` was given a tokenizer; a tensor of ids, or a mapping of
                tensors, with the batch first.
            heads: keep the log variance of every head, the `profile`.
            batch_size: texts that run at once, 8 if not given.

        Returns:
            Scores of every token; after a fit also how far they are from what is usual.

        Raises:
            ValueError: for a model without causal attention, and a handle that was detached.

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
        """Continue texts, token by token: the ids are those of the model's own `generate`, without beams.

        Args:
            inputs: texts or ids, as in `token_uncertainty`; padding comes first.
            max_new_tokens: most tokens; texts that end before go on with padding, whose rows are not real.
            do_sample: choose at random, else the likeliest.
            temperature: divides the logits of random choices.
            top_p: least probability of the likeliest tokens that are chosen among.
            seed: of random choices; the ids are those after `torch.manual_seed(seed)`.

        Returns:
            An iterator over rows, one a token, which is `next_ids`; `TokenUncertainty.join` makes one of
            them.

        Raises:
            ValueError: for encoder-decoders, for settings of the model that would change ids in other ways,
                and a handle that was detached.

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
        """Spans of texts that are not like the held-out texts of `fit`.

        A token is flagged where the mean of its score over the 8 tokens around it, in deviations from what is
        usual at their positions, is larger than it is for all but `rate` of held-out tokens.

        Args:
            inputs: as in `token_uncertainty`, or what that gave.
            rate: share of usual tokens that are flagged all the same.
            by: which score.
            batch_size: as in `token_uncertainty`.

        Returns:
            Runs of flagged tokens, text by text.

        Raises:
            ValueError: for a handle that was not fitted, or was detached, and rates that its texts cannot
                show.

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
        """How strange inputs are beside the held-out items of `fit`, and by what.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first, or a loader.
            **options: `batch_size`, as in `signals`.

        Returns:
            A score, larger for stranger inputs, its p-value, and which part, site and head makes it.

        Raises:
            ValueError: for a handle that was not fitted, or whose fit found no strangeness, with the reason.

        >>> handle.strangeness(inputs).p_value  # [B]
        """
        return self._usual.fitted().explain(self.signals(inputs, **options))

    def flag(self, inputs: Inputs | Iterable[Any], rate: float = 0.01, **options: Any) -> Tensor:
        """Which inputs are not like the held-out items of `fit`.

        Args:
            inputs: a tensor or a mapping of tensors, with the batch first, or a loader.
            rate: of false alarms among usual inputs; at least 1 / (n + 1), n being two fifths of the items.
            **options: `batch_size`, as in `signals`.

        Returns:
            [B] True for strange ones.

        Raises:
            ValueError: for a rate that the items cannot show, and as of `strangeness`.

        >>> handle.flag(inputs, rate=0.01)
        """
        return self._usual.fitted().flag(self.signals(inputs, **options), rate)

    def save(self, folder: str | Path) -> None:
        """Write the settings: `attached.json` and `attached.safetensors`, each in one piece or not at all.

        Beside them go what is usual, as `strangeness.json` and `strangeness.safetensors`, and an adaptive
        temperature, where they were fitted.

        The model is not among them; it is saved as ever, in the same folder if that is wanted.

        Args:
            folder: made if it is not there.

        >>> handle.save("attached")
        """
        save_settings(Path(folder), [site.name for site in self.sites], self._settings)
        self._usual.save(Path(folder))

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, for the same model.

        Args:
            folder: that of `save`.

        Raises:
            FileNotFoundError: where a file is missing.
            ValueError: for anything unexpected; nothing is loaded then.
        """
        sites, settings = load_settings(Path(folder))
        usual = Usual.load(Path(folder))
        self._take(sites, settings, str(folder))
        self._usual = usual

    def state_dict(self) -> dict[str, Any]:
        """Give the settings as a mapping, say for a checkpoint of one's own; `save` writes files.

        Returns:
            What `load_state_dict` takes.
        """
        return {"sites": [site.name for site in self.sites], **self._settings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, for the same model.

        Args:
            state: that mapping.

        Raises:
            ValueError: for anything else; nothing is loaded then.
        """
        settings = Settings.from_state_dict({k: v for k, v in state.items() if k != "sites"})
        self._take(list(state.get("sites", [])), settings, "state")

    def detach(self) -> nn.Module:
        """Let go of the model; the handle answers no more.

        Returns:
            The model, which is what it was.
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
        """Settings from elsewhere, if they are those of the same sites."""
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

    `nn.MultiheadAttention` (also inside `nn.TransformerEncoder`), encoders and decoders of Hugging Face
    transformers, timm's vision transformers, and our own softmax and kernel models.  Relative-position and
    ALiBi attention, and causal attention of other libraries, is left alone by name; a model with nothing else
    is refused.

    Args:
        model: any module; it stays what it is.
        tokenizer: of a language model, so that texts may be given and are shown as such.
        task: "classification", "tokens", "regression", "embedding", or "causal" for a language model, whose
            labels are its own tokens, shifted by one; seen from the output if not given.
        call: how to run the model: `call(model, inputs)` gives its output with the batch first.
        max_keys: longer sequences condition on this many of their keys, evenly spaced (the sparse form).
        max_log_amplitude: cap of the tempered log amplitude over its mean.

    Returns:
        The handle, which predicts, is fitted, saved and detached.

    Raises:
        ValueError: for a model without such attention, with the reasons, and for wrong arguments.

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
