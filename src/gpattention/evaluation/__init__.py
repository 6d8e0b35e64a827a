"""Evaluation of runs, competitors of GP attention behind one call, and decisions made from predictions.

>>> from gpattention.evaluation import EvaluationSettings, evaluate_run
>>> evaluate_run("runs/cgp", EvaluationSettings(suites=["clean", "ood"]))

Everything with `predict(inputs, samples=10, seed=0) -> Prediction` is a predictor: a model as it is, with
fitted temperature, with MC dropout, in an ensemble, or with a Bayesian last layer.  Three registries say what
an evaluation knows by name: `SUITES`, `PREDICTORS` and `SCORES`.
"""

from gpattention.evaluation.corrupted import SOURCES, corrupt_test_set
from gpattention.evaluation.last_layers import GPLastLayer, LaplaceLastLayer
from gpattention.evaluation.ood_scores import SCORES, OodScores, score_name
from gpattention.evaluation.predict import (
    InputPrediction,
    fitted_temperature,
    predict_inputs,
    read_sentences,
    sentences_of,
)
from gpattention.evaluation.predictions import ItemSet, Predicted, PredictionCache, Predictor, predict_items
from gpattention.evaluation.predictors import (
    FITTED,
    PREDICTOR_NAMES,
    PREDICTORS,
    DeepEnsemble,
    MCDropout,
    ModelPredictor,
    TemperatureScaling,
    build_predictor,
    fit_temperature,
    predictor_name,
    predictor_order,
    temperature_profile,
)
from gpattention.evaluation.run import (
    REDUCING,
    EvaluationSettings,
    check_as_much,
    evaluate_run,
    evaluate_runs,
    open_with_digest,
)
from gpattention.evaluation.sets import RunSets, content_digest, run_sets, shifted_items
from gpattention.evaluation.suites import SUITES
from gpattention.evaluation.suites.selective import (
    ConformalSets,
    RiskCoverageCurve,
    SelectivePredictor,
    risk_coverage_curve,
)
from gpattention.runs import Record, SuiteResult, read_suites, write_suite
from gpattention.strangeness import PARTS, AdaptiveTemperature, Explanation, Strangeness, available_parts

__all__ = [
    "FITTED", "PARTS", "PREDICTORS", "PREDICTOR_NAMES", "REDUCING", "SCORES", "SOURCES", "SUITES",
    "AdaptiveTemperature", "ConformalSets", "DeepEnsemble", "EvaluationSettings", "Explanation",
    "GPLastLayer", "InputPrediction", "ItemSet", "LaplaceLastLayer", "MCDropout", "ModelPredictor",
    "OodScores", "Predicted", "PredictionCache", "Predictor", "Record", "RiskCoverageCurve", "RunSets",
    "SelectivePredictor", "Strangeness", "SuiteResult", "TemperatureScaling", "available_parts",
    "build_predictor", "check_as_much", "content_digest", "corrupt_test_set", "evaluate_run",
    "evaluate_runs", "fit_temperature", "fitted_temperature", "open_with_digest", "predict_inputs",
    "predict_items", "predictor_name", "predictor_order", "read_sentences", "read_suites",
    "risk_coverage_curve", "run_sets", "score_name", "sentences_of", "shifted_items", "temperature_profile",
    "write_suite",
]  # fmt: skip
