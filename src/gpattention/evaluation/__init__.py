"""Competitors of GP attention behind one call, and decisions made from predictions.

Everything with `predict(inputs, samples=10, seed=0) -> Prediction` is a predictor: a model as it is, with
fitted temperature, with MC dropout, in an ensemble, or with a Bayesian last layer.
"""

from gpattention.evaluation.conformal import ConformalSets
from gpattention.evaluation.ensemble import DeepEnsemble
from gpattention.evaluation.gp_layer import GPLastLayer
from gpattention.evaluation.laplace import LaplaceLastLayer
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.evaluation.selective import RiskCoverageCurve, SelectivePredictor, risk_coverage_curve
from gpattention.evaluation.temperature import TemperatureScaling, fit_temperature

__all__ = [
    "ConformalSets",
    "DeepEnsemble",
    "GPLastLayer",
    "LaplaceLastLayer",
    "MCDropout",
    "ModelPredictor",
    "Predictor",
    "RiskCoverageCurve",
    "SelectivePredictor",
    "TemperatureScaling",
    "fit_temperature",
    "risk_coverage_curve",
]
