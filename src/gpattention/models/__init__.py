"""Transformers whose attention is a Gaussian process, and what they predict.

>>> from gpattention.models import VisionConfig, VisionTransformer
>>> model = VisionTransformer(VisionConfig(attention="cgp"))
>>> model.predict(images).mutual_information
"""

from gpattention.models.config import AttentionConfig, TextConfig, TransformerConfig, VisionConfig
from gpattention.models.encoder import Encoder, EncoderLayer
from gpattention.models.health import (
    AttentionHealth,
    HealthReport,
    Similarity,
    cosine_similarity,
    diagnose,
    measure_health,
    token_similarity,
)
from gpattention.models.moments import LogitGaussian
from gpattention.models.predict import Classifier, ClassifierAnswer, FeatureClassifier, LayerAnswer, predict
from gpattention.models.prediction import Prediction
from gpattention.models.signals import Signals, Watch, measure_signals, watched
from gpattention.models.transformer import (
    Block,
    LayerOutput,
    ModelOutput,
    TextTransformer,
    Transformer,
    VisionTransformer,
)
from gpattention.models.warm_start import WarmStart, output_gap, warm_start

__all__ = [
    "AttentionConfig", "AttentionHealth", "Block", "Classifier", "ClassifierAnswer", "Encoder",
    "EncoderLayer", "FeatureClassifier", "HealthReport", "LayerAnswer", "LayerOutput", "LogitGaussian",
    "ModelOutput", "Prediction", "Signals", "Similarity", "TextConfig", "TextTransformer", "Transformer",
    "TransformerConfig", "VisionConfig", "VisionTransformer", "WarmStart", "Watch", "cosine_similarity",
    "diagnose", "measure_health", "measure_signals", "output_gap", "predict", "token_similarity",
    "warm_start", "watched",
]  # fmt: skip
