"""The vision transformer of the paper, with any kind of attention in any layer."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gpattention.attention.projections import is_plain
from gpattention.gp.precision import autocast_is_on
from gpattention.models.config import TransformerConfig, VisionConfig
from gpattention.models.fused.residual_norm import Added
from gpattention.models.fused.stream import Stream
from gpattention.models.fused.switch import may_drop
from gpattention.models.rows import Inputs
from gpattention.models.seeded_dropout import EMBEDDING_SITE, drop, rate_of
from gpattention.models.transformer import Transformer


class VisionTransformer(Transformer):
    """Patches, learned positions, pre-LayerNorm blocks, sequence pooling, a linear classifier.

    >>> model = VisionTransformer(VisionConfig(attention="cgp"))
    >>> model(images).logits  # images [B, 3, 32, 32] -> [B, 10]
    """

    config_class: ClassVar[type[TransformerConfig]] = VisionConfig

    def __init__(self, config: VisionConfig | None = None) -> None:
        config = VisionConfig() if config is None else config
        super().__init__(config)
        self.vision = config
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.tokens, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.attend = nn.Linear(config.width, 1, bias=False)  # a softmax over tokens would not see a bias

    def embed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Images [B, channels, height, width] -> tokens [B, N, E]."""
        return self.dropout(self._tokens(inputs)), None

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Sequence pooling: a softmax over tokens of one learned score."""
        weights = self.attend(tokens).softmax(-2)  # [B, N, 1]
        if tokens.is_cuda:  # one product instead of three passes
            return (weights.mT @ tokens).squeeze(-2)
        return (weights * tokens).sum(-2)

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """All of them.  [B]"""
        tensor = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
        return torch.full((len(tensor),), self.vision.tokens, device=tensor.device)

    def _embed(self, inputs: Inputs, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if seed is None or type(self).embed is not VisionTransformer.embed:
            return self.embed(inputs)
        return drop(self.dropout, self._tokens(inputs), seed, EMBEDDING_SITE), None

    def _stream(self, inputs: Inputs, seed: Tensor | None) -> tuple[Stream, Tensor | None]:
        own = type(self).embed is VisionTransformer.embed and may_drop(self.dropout)
        if not own or not self._cuts():
            return super()._stream(inputs, seed)
        z = linear(self._cut(self._images(inputs)), self.patches.weight.flatten(1))  # [B, N, E]
        added = Added(z, self.patches.bias, rate_of(self.dropout), EMBEDDING_SITE, inside=True)
        return Stream(self.positions[0], added), None

    def _tokens(self, inputs: Inputs) -> Tensor:
        """Patches with their positions.  [B, N, E]"""
        images = self._images(inputs)
        if images.is_cuda and self._cuts():  # rows of tokens, as everything after wants
            weight = self.patches.weight.flatten(1)  # [E, pixels of a patch]
            return linear(self._cut(images), weight, self.patches.bias) + self.positions
        return self.patches(images).flatten(2).mT + self.positions

    def _cuts(self) -> bool:
        """Whether the convolution is a linear map of patches that do not overlap."""
        p, conv = (self.vision.patch, self.vision.patch), self.patches
        return is_plain(conv, nn.Conv2d) and conv.kernel_size == conv.stride == p and conv.padding == (0, 0)

    def _images(self, inputs: Inputs) -> Tensor:
        if not isinstance(inputs, Tensor):
            raise ValueError(f"expected a tensor of images, got {type(inputs).__name__}")
        expected = (self.vision.channels, *self.vision.sides)
        if inputs.ndim != 4 or inputs.shape[1:] != expected:
            raise ValueError(f"expected images of shape {['B', *expected]}, got {tuple(inputs.shape)}")
        if not inputs.is_floating_point():
            raise ValueError(
                f"expected floating-point images, got {inputs.dtype}: normalise pixels as in training"
            )
        # data are float32, a model may be float64 or half; autocast has a choice of its own
        return inputs if autocast_is_on(inputs.device) else inputs.to(self.positions.dtype)

    def _cut(self, images: Tensor) -> Tensor:
        """Patches as rows of pixels, ordered as the convolution's weights are.  [B, N, channels * patch^2]"""
        p = self.vision.patch
        cut = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [B, C, rows, p, columns, p]
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
