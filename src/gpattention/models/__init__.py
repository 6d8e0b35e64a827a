"""Transformers whose attention is a Gaussian process, and what they predict.

>>> from gpattention.models import VisionConfig, VisionTransformer
>>> model = VisionTransformer(VisionConfig(attention="cgp"))
>>> model.predict(images).mutual_information
"""

from gpattention.models.block import Block
from gpattention.models.config import AttentionConfig, TextConfig, TransformerConfig, VisionConfig
from gpattention.models.health import HealthReport, measure_health
from gpattention.models.prediction import Prediction, predict
from gpattention.models.smoothing import Similarity, cosine_similarity, token_similarity
from gpattention.models.text import TextTransformer
from gpattention.models.transformer import LayerOutput, ModelOutput, Transformer
from gpattention.models.vision import VisionTransformer
from gpattention.models.warm_start import WarmStart, output_gap, warm_start

__all__ = [
    "AttentionConfig",
    "Block",
    "HealthReport",
    "LayerOutput",
    "ModelOutput",
    "Prediction",
    "Similarity",
    "TextConfig",
    "TextTransformer",
    "Transformer",
    "TransformerConfig",
    "VisionConfig",
    "VisionTransformer",
    "WarmStart",
    "cosine_similarity",
    "measure_health",
    "output_gap",
    "predict",
    "token_similarity",
    "warm_start",
]
