"""Competitors of GP attention behind one call, and decisions made from predictions.

Everything with `predict(inputs, samples=10, seed=0) -> Prediction` is a predictor: a model as it is, with
fitted temperature, with MC dropout, in an ensemble, or with a Bayesian last layer.
`gpattention.evaluation.suites` judges what they predict; `gpattention.experiments.evaluate_run` does so for a
finished run.
"""

from gpattention.evaluation.conformal import ConformalSets
from gpattention.evaluation.ensemble import DeepEnsemble
from gpattention.evaluation.gp_layer import GPLastLayer
from gpattention.evaluation.items import ItemSet
from gpattention.evaluation.laplace import LaplaceLastLayer
from gpattention.evaluation.mc_dropout import MCDropout
from gpattention.evaluation.ood_scores import OodScores
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.prediction_cache import PredictionCache
from gpattention.evaluation.predictor import ModelPredictor, Predictor
from gpattention.evaluation.records import Record, SuiteResult, read_suites, write_suite
from gpattention.evaluation.selective import RiskCoverageCurve, SelectivePredictor, risk_coverage_curve
from gpattention.evaluation.temperature import TemperatureScaling, fit_temperature, temperature_profile

__all__ = [
    "ConformalSets",
    "DeepEnsemble",
    "GPLastLayer",
    "ItemSet",
    "LaplaceLastLayer",
    "MCDropout",
    "ModelPredictor",
    "OodScores",
    "Predicted",
    "PredictionCache",
    "Predictor",
    "Record",
    "RiskCoverageCurve",
    "SelectivePredictor",
    "SuiteResult",
    "TemperatureScaling",
    "fit_temperature",
    "read_suites",
    "risk_coverage_curve",
    "temperature_profile",
    "write_suite",
]
