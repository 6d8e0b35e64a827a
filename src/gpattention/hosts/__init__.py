"""Gaussian-process uncertainty for models that exist already: attach to them, convert them, export them.

>>> handle = attach(model)  # the same predictions, and their uncertainty
>>> model = convert(model, kind="cgp")  # Gaussian-process attention, to be fine-tuned
"""

from gpattention.hosts.attach import Handle, attach
from gpattention.hosts.conversion import Conversion
from gpattention.hosts.convert import conversion_of, convert, from_pretrained, regularizer
from gpattention.hosts.export import export_onnx, export_program
from gpattention.hosts.families.base import Site
from gpattention.hosts.fitting import Candidate, Fit, FitOptions
from gpattention.hosts.language import load_language_model
from gpattention.hosts.painting import painted_html
from gpattention.hosts.predict import TokenPrediction, Values, predict, signals
from gpattention.hosts.settings import Settings
from gpattention.hosts.sites import Found, LeftAlone, find_sites
from gpattention.hosts.tokens import Span, TokenUncertainty

__all__ = [
    "Candidate", "Conversion", "Fit", "FitOptions", "Found", "Handle", "LeftAlone", "Settings", "Site",
    "Span", "TokenPrediction", "TokenUncertainty", "Values", "attach", "conversion_of", "convert",
    "export_onnx", "export_program", "find_sites", "from_pretrained", "load_language_model",
    "painted_html", "predict", "regularizer", "signals",
]  # fmt: skip
