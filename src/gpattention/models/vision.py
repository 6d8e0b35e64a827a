"""The vision transformer of the paper, with any kind of attention in any layer."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from gpattention.models.config import TransformerConfig, VisionConfig
from gpattention.models.transformer import Inputs, Transformer


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
        if not isinstance(inputs, Tensor):
            raise ValueError(f"expected a tensor of images, got {type(inputs).__name__}")
        expected = (self.vision.channels, *self.vision.sides)
        if inputs.ndim != 4 or inputs.shape[1:] != expected:
            raise ValueError(f"expected images of shape {['B', *expected]}, got {tuple(inputs.shape)}")
        tokens = self.patches(inputs).flatten(2).mT  # [B, N, E]
        return self.dropout(tokens + self.positions), None

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Sequence pooling: a softmax over tokens of one learned score."""
        weights = self.attend(tokens).softmax(-2)  # [B, N, 1]
        return (weights * tokens).sum(-2)

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """All of them.  [B]"""
        tensor = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
        return torch.full((len(tensor),), self.vision.tokens, device=tensor.device)
