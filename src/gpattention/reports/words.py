"""What the keys of recipes and evaluations are called on a page."""

METRICS = {
    "accuracy": "accuracy",
    "mcc": "MCC",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "mce": "MCE",
    "adaptive_ece": "adaptive ECE",
    "classwise_ece": "classwise ECE",
    "aurc": "AURC",
    "batch_ece": "ECE, mean over batches",
    "batch_mce": "MCE, mean over batches",
    "auroc": "AUROC",
    "aupr_in": "AUPR-in",
    "aupr_out": "AUPR-out",
    "fpr95": "FPR at 95 % TPR",
    "conformal_coverage": "conformal coverage",
    "conformal_size": "conformal set size",
}
OTHER_WEIGHTS = "computed with other weights than the run has now: evaluate it again"  # a suite's note
LARGER_IS_BETTER = {"accuracy", "mcc", "auroc", "aupr_in", "aupr_out"}
SCORES = {
    "entropy": "predictive entropy",
    "max_softmax": "maximum softmax",
    "energy": "energy",
    "kl_matching": "KL matching",
    "kl_matching_predicted": "KL matching, by predicted class",
    "mutual_information": "mutual information",
    "gp_variance": "GP variance",
}
PREDICTORS = {
    "model": "own prediction",
    "mean": "mean, without draws",
    "mc_dropout": "MC dropout",
    "dropout_draws": "draws and MC dropout",
    "laplace": "last-layer Laplace",
    "gp_layer": "GP last layer",
    "ensemble": "ensemble",
}


def metric_name(metric: str) -> str:
    """As a reader knows it."""
    return METRICS.get(metric, metric.replace("_", " "))


def score_name(score: str) -> str:
    """An out-of-distribution score."""
    return SCORES.get(score, score.replace("_", " "))


def predictor_name(predictor: str) -> str:
    """Whose prediction, and whether and where its temperature was fitted."""
    base, _, fitted = predictor.partition("+")
    name = PREDICTORS.get(base, base.replace("_", " "))
    where = {"temperature": ", temperature fitted", "shift_temperature": ", temperature fitted under shift"}
    return f"{name}{where.get(fitted, '')}"


def heading(text: str) -> str:
    """With a capital at its beginning, other letters as they are."""
    return text[:1].upper() + text[1:]


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
