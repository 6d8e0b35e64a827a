"""The text transformer of the paper, with any kind of attention in any layer."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.attention.projections import is_plain
from gpattention.gp.precision import checks_are_deferred
from gpattention.models.block import masked_mean
from gpattention.models.config import TextConfig, TransformerConfig
from gpattention.models.fused.residual_norm import Added
from gpattention.models.fused.stream import Stream
from gpattention.models.fused.switch import may_drop
from gpattention.models.rows import Inputs
from gpattention.models.seeded_dropout import EMBEDDING_SITE, drop, rate_of
from gpattention.models.transformer import Transformer


class TextTransformer(Transformer):
    """Word embeddings beside contextual ones, projected, learned positions, blocks, mean over real words.

    Inputs are word indices [B, N], or a mapping with "tokens" [B, N], optionally "padding_mask" [B, N]
    (True = ignore; index 0 is padding when it is left out) and "contextual" [B, N, contextual_width].

    >>> model = TextTransformer(TextConfig(vocabulary=5000, attention="scgp"))
    >>> model({"tokens": tokens, "padding_mask": padding}).logits  # [B, 2]
    """

    config_class: ClassVar[type[TransformerConfig]] = TextConfig

    def __init__(self, config: TextConfig | None = None) -> None:
        config = TextConfig() if config is None else config
        super().__init__(config)
        self.text = config
        self.words = nn.Embedding(config.vocabulary, config.embedding_width, padding_idx=0)
        self.project = nn.Linear(config.embedding_width + config.contextual_width, config.width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.max_length, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Word indices, and contextual embeddings where the model has them -> tokens [B, N, E]."""
        words, padding = self._words(inputs)
        return self.dropout(self._placed(words)), padding

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Mean over real words."""
        return masked_mean(tokens, padding)

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """Words that are not padding.  [B]"""
        return (~_padding({"tokens": inputs} if isinstance(inputs, Tensor) else inputs)).sum(-1)

    def _embed(self, inputs: Inputs, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if seed is None or type(self).embed is not TextTransformer.embed:
            return self.embed(inputs)
        words, padding = self._words(inputs)
        return drop(self.dropout, self._placed(words), seed, EMBEDDING_SITE), padding

    def _stream(self, inputs: Inputs, seed: Tensor | None) -> tuple[Stream, Tensor | None]:
        own = type(self).embed is TextTransformer.embed and may_drop(self.dropout)
        if not own or not is_plain(self.project, nn.Linear):
            return super()._stream(inputs, seed)
        words, padding = self._words(inputs)
        z = linear(words, self.project.weight)
        added = Added(z, self.project.bias, rate_of(self.dropout), EMBEDDING_SITE, inside=True)
        return Stream(self.positions[0, : words.shape[1]], added), padding

    def _placed(self, words: Tensor) -> Tensor:
        """Projected, with their positions.  [B, N, E]"""
        return self.project(words) + self.positions[:, : words.shape[1]]

    def _words(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Embedded words beside contextual embeddings [B, N, W], and where there are none [B, N]."""
        given = {"tokens": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        unknown = sorted(set(given) - {"tokens", "padding_mask", "contextual"})
        if unknown or "tokens" not in given:
            raise ValueError(
                f"expected inputs with 'tokens', 'padding_mask' and 'contextual', got {sorted(given)}"
            )
        tokens = given["tokens"]
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"expected tokens [B, N] of whole numbers, got {tuple(tokens.shape)} {tokens.dtype}"
            )
        if tokens.shape[1] > self.text.max_length:
            raise ValueError(
                f"expected at most max_length={self.text.max_length} words, got {tokens.shape[1]}"
            )
        self._check_known(tokens)
        padding = _padding(given)
        if padding.dtype != torch.bool or padding.shape != tokens.shape:
            raise ValueError(
                f"expected padding_mask to be bool (True = ignore) of shape {list(tokens.shape)}, "
                f"got shape {tuple(padding.shape)} and {padding.dtype}"
            )
        words = self.words(tokens)  # [B, N, embedding_width]
        return self._beside_contextual(words, given.get("contextual"), padding), padding

    def _check_known(self, tokens: Tensor) -> None:
        """Words of another vocabulary; on a GPU reading them would make every pass wait for it."""
        if tokens.device.type != "cpu" or tokens.numel() == 0 or checks_are_deferred(tokens):
            return
        least, most = (int(x) for x in tokens.aminmax())
        if least < 0 or most >= self.text.vocabulary:
            raise ValueError(
                f"expected tokens from 0 to {self.text.vocabulary - 1}, the model's vocabulary, "
                f"got {least if least < 0 else most}"
            )

    def _beside_contextual(self, words: Tensor, contextual: Tensor | None, padding: Tensor) -> Tensor:
        width = self.text.contextual_width
        if width == 0 and contextual is None:
            return words
        expected = (*words.shape[:2], width)
        if contextual is None or contextual.shape != expected:
            got = None if contextual is None else tuple(contextual.shape)
            raise ValueError(f"expected contextual embeddings of shape {expected}, got {got}")
        # overwritten, not multiplied: NaN at padded words is harmless forward and backward
        contextual = torch.where(padding[..., None], 0.0, contextual.to(words.dtype))
        return torch.cat([words, contextual], -1)


def _padding(given: Mapping[str, Tensor]) -> Tensor:
    """The mask as given, or where the words are index 0.  [B, N]"""
    padding = given.get("padding_mask")
    return given["tokens"] == 0 if padding is None else padding
