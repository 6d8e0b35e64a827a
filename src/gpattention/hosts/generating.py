"""Continue texts token by token, with the scores of every new token.

The loop is that of transformers' `generate` without beams, with the same ids.  Beside the host's KV cache it
keeps the factors of eq. 22, which grow by one key with every token: those of all layers of one shape are one
batch of matrices, updated after each pass of the host.  Layers with windows compute new factors.
"""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpattention.checks import check_count, check_whole
from gpattention.gp import CausalVarianceState, check_health, deferred_checks
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.language import (
    Heads,
    TokenUsual,
    as_rows,
    decoding_sites,
    on_device,
    prediction_scores,
)
from gpattention.hosts.predict import uncompiled
from gpattention.hosts.settings import Settings
from gpattention.hosts.sites import hooked
from gpattention.hosts.tokens import TokenUncertainty
from gpattention.hosts.variance import kernel_inputs
from gpattention.models.predict import evaluating, model_device

if TYPE_CHECKING:
    from gpattention.hosts.attach import Runner

# settings of transformers that change ids and that this loop does not support
_UNKNOWN = (
    "assistant_early_exit", "bad_words_ids", "begin_suppress_tokens", "constraints", "diversity_penalty",
    "dola_layers", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff",
    "eta_cutoff", "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "guidance_scale", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size",
    "num_beams", "num_return_sequences", "penalty_alpha", "prompt_lookup_num_tokens", "repetition_penalty",
    "sequence_bias", "stop_strings", "suppress_tokens", "top_h", "typical_p", "watermarking_config",
)  # fmt: skip
_NEUTRAL = (None, False, 0, 1, 1.0, 0.0)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        do_sample: choose at random instead of the likeliest token.
        temperature: divides the logits of random choices.
        top_p: choose among the likeliest tokens that have this probability together.
        top_k: number of the likeliest tokens to choose among, None for all.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"expected temperature > 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected top_p in (0, 1], got {self.top_p}")
        if self.top_k is not None:
            check_count("top_k", self.top_k, least=1)

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The next token of every text [B], of logits [B, V] in single precision."""
        if not self.do_sample:
            return logits.argmax(-1)
        if self.temperature != 1:
            logits = logits / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=False)
            out = ordered.softmax(-1).cumsum(-1) <= 1 - self.top_p
            out[:, -1] = False
            logits = logits.masked_fill(torch.zeros_like(out).scatter(1, order, out), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def generate(
    runner: "Runner",
    settings: Settings,
    inputs: dict[str, Tensor],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    usual: TokenUsual | None,
    tokenizer: Any,
) -> Iterator[TokenUncertainty]:
    """One row for each new token.

    Args:
        runner: the model and how it is run.
        settings: whose noise and frames the variances have.
        inputs: ids and perhaps a mask, padding first.
        max_new_tokens: most tokens; texts that end earlier continue with padding, whose rows are not real.
        sampling: how tokens are chosen.
        seed: of random choices.
        usual: what is usual, if it was fitted.
        tokenizer: to show tokens as text.

    Returns:
        An iterator over rows; the new token is `next_ids`.

    Raises:
        ValueError: the loop does not support the model or its settings.
    """
    host: Any = uncompiled(runner.model)
    config = _check_model(runner.sites, host)
    max_new_tokens = check_count("max_new_tokens", max_new_tokens, least=1)
    seed = check_whole("seed", seed)
    if sampling.do_sample and sampling.top_k is None:
        sampling = replace(sampling, top_k=getattr(config, "top_k", None) or None)
    device = model_device(host, inputs)
    ids = inputs["input_ids"].to(device)
    mask = inputs.get("attention_mask", torch.ones_like(ids)).to(device)
    if bool((mask[:, -1] == 0).any()):
        raise ValueError("expected texts with padding before them, got padding behind: pad on the left")
    loop = _Loop(runner, on_device(settings, device), host, mask)
    return _tokens(loop, ids, _ends(config, device), config, max_new_tokens, sampling, seed, usual, tokenizer)


def _check_model(sites: tuple[Site, ...], host: Any) -> Any:
    """The settings of transformers for the model."""
    decoding_sites(sites)
    if getattr(host.config, "is_encoder_decoder", False):
        expected = "expected a model that decodes alone, got an encoder-decoder"
        raise ValueError(f"{expected}: call handle.token_uncertainty with its decoder_input_ids")
    config = getattr(host, "generation_config", None)
    set_ones = [f"{n}={x!r}" for n in _UNKNOWN if (x := getattr(config, n, None)) not in _NEUTRAL]
    if set_ones:
        raise ValueError(f"expected a generation_config of plain choices, got {', '.join(set_ones)}")
    return config


def _ends(config: Any, device: torch.device) -> Tensor:
    found = getattr(config, "eos_token_id", None)
    found = [] if found is None else found if isinstance(found, list) else [found]
    return torch.tensor(found, dtype=torch.int64, device=device)


def _tokens(
    loop: "_Loop", ids: Tensor, ends: Tensor, config: Any, most: int, sampling: Sampling, seed: int,
    usual: TokenUsual | None, tokenizer: Any,
) -> Iterator[TokenUncertainty]:  # fmt: skip
    device = ids.device
    generator = torch.Generator(device).manual_seed(seed)
    unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    padding = getattr(config, "pad_token_id", None)
    padding = (int(ends[0]) if len(ends) else 0) if padding is None else int(padding)
    last, given = ids[:, -1], ids
    for _ in range(most):
        logits, heads, positions = loop.step(given)
        real = unfinished
        chosen = sampling.choose(logits.float(), generator)
        if len(ends):
            chosen = torch.where(unfinished, chosen, padding)
            unfinished = unfinished & ~torch.isin(chosen, ends)
        scores = prediction_scores(logits, chosen)
        profile = heads.profile()  # [B, 1, P]
        row = TokenUncertainty(
            last[:, None], chosen[:, None], real[:, None], positions,
            **as_rows(scores, chosen[:, None].shape), log_variance=profile.mean(-1),
            log_pivot=heads.log_pivot(), profile=profile, columns=tuple(heads.names), tokenizer=tokenizer,
        )  # fmt: skip
        row = row if usual is None else usual.judge(row)
        yield replace(row, profile=None)
        if not bool(unfinished.any()):
            return
        last, given = chosen, chosen[:, None]


class _Loop:
    """The host's cache, and the factors beside it."""

    def __init__(self, runner: "Runner", settings: Settings, host: nn.Module, mask: Tensor) -> None:
        self._runner, self._settings, self._host, self._mask = runner, settings, host, mask
        self._cache: Any = None
        self._stacks: list[_Stack] | None = None
        self._takes_positions = "position_ids" in inspect.signature(host.forward).parameters

    @torch.no_grad()
    def step(self, ids: Tensor) -> tuple[Tensor, Heads, Tensor]:
        """One pass over new tokens: the last one's logits [B, V], its heads, and its position [B, 1]."""
        calls: dict[int, AttentionCall] = {}

        def hook(site: Site, call: AttentionCall) -> Tensor:
            if site.attends == "causal":
                calls[site.index] = call
            return call.mean

        if self._cache is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], -1)
        positions = (self._mask.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": self._mask, "use_cache": True}
        if self._takes_positions:
            given["position_ids"] = positions
        if self._cache is not None:
            given["past_key_values"] = self._cache
        deferred = deferred_checks() if ids.device.type == "cuda" else nullcontext()
        with evaluating(self._host), deferred:
            with hooked(self._host, self._runner.sites, hook):
                output = self._host(**given)
            # a view would keep those of all tokens of the prompt, for as long as the next pass takes
            self._cache, last = output.past_key_values, output.logits[:, -1].clone()
            del output
            heads = self._heads(calls)
        if ids.device.type == "cuda":
            check_health()
        return last, heads, positions[:, -1:]

    def _heads(self, calls: dict[int, AttentionCall]) -> Heads:
        """Of the last row of every site."""
        if self._stacks is None:
            self._stacks = self._stacked(calls)
            rows: dict[int, tuple[Tensor, Tensor]] = {}
        else:
            rows = {n: row for stack in self._stacks for n, row in stack.append(calls).items()}
        heads = Heads(self._settings, self._runner.max_keys)
        for site in self._runner.sites:
            if site.index in rows:
                heads.add(site, *rows[site.index])
            elif site.index in calls:  # by itself, as in a pass over the whole text
                heads.see(site, calls[site.index])
        return heads.last()

    def _stacked(self, calls: dict[int, AttentionCall]) -> "list[_Stack]":
        """Sites without a window, by the shape of their heads."""
        found: dict[tuple[int, ...], list[int]] = {}
        for index, call in calls.items():
            if call.window is None:
                shape = (call.q.shape[1], call.groups, call.q.shape[-1])
                found.setdefault(shape, []).append(index)
        most = self._runner.max_keys
        return [_Stack(calls, sites, self._settings, self._mask, most) for sites in found.values()]


class _Stack:
    """Sites whose heads have one shape: their factors are one batch of matrices [S B, G, M, M]."""

    def __init__(
        self,
        calls: dict[int, AttentionCall],
        sites: list[int],
        settings: Settings,
        mask: Tensor,  # [B, N]
        max_keys: int,
    ) -> None:
        self._sites, self._settings = sites, settings
        items = len(mask)
        noise = torch.stack([settings.noise[n, : calls[n].q.shape[1]] for n in sites])  # [S, H]
        groups = calls[sites[0]].groups
        shared = noise.unflatten(1, (-1, groups))  # [S, G, g]
        self._shared = bool((shared == shared[..., :1]).all())
        noise = noise[:, :: groups if self._shared else 1].repeat_interleave(items, 0)  # [S B, G]
        order = mask.argsort(dim=-1, descending=True, stable=True)  # [B, N] real keys first
        keys = []
        for n in sites:
            y = self._placed(n, calls[n])[1]
            keys.append(y.gather(2, order[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[-1])))
        count = mask.sum(-1).repeat(len(sites))
        self._state = CausalVarianceState(
            torch.cat(keys), noise=noise.to(keys[0]), count=count, max_keys=max_keys
        )

    def _placed(self, index: int, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Queries and keys where the kernel sees them.  [B, H, Q, C], [B, G, K, C]"""
        inputs = kernel_inputs(call, self._settings.frame(index))
        return inputs.x, inputs.y if self._shared else call.per_query_head(inputs.y)

    def append(self, calls: dict[int, AttentionCall]) -> dict[int, tuple[Tensor, Tensor]]:
        """The new row of every site: [B, H, 1] and [B, G, 1]."""
        placed = []
        for n in self._sites:
            call = calls[n]  # its last key is the row's own
            new = replace(call, k=call.k[:, :, -1:], mask=None if call.mask is None else call.mask[..., -1:])
            placed.append(self._placed(n, new))
        queries, keys = (torch.cat(x) for x in zip(*placed, strict=True))
        row = self._state.append(queries, keys)
        parts = zip(row.unit.chunk(len(self._sites)), row.of_keys.chunk(len(self._sites)), strict=True)
        return dict(zip(self._sites, parts, strict=True))
