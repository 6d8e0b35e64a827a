"""Ways to get probabilities from a trained model, and the trainings that they need."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from gpattention.adopt.handle import Handle
from gpattention.checks import check_count
from gpattention.evaluation.predicted import Predicted
from gpattention.evaluation.predictor import Predictor
from gpattention.evaluation.temperature import fit_temperature
from gpattention.gp import NumericalError
from gpattention.metrics.checks import check_choice
from gpattention.studies.adoption.encoder import AttachedPredictor, Finetuning

# Ways to get probabilities from a trained model, each fitted on validation items alone.
#
# Several methods may share their draws: plain and temperature, MC dropout with and without.  What they share
# is a `Source`, predicted once for every set.

PLAIN, TEMPERATURE = "plain", "temperature"
MC_DROPOUT, MC_DROPOUT_TEMPERATURE = "mc_dropout", "mc_dropout+temperature"
ATTACHED, ATTACHED_GLOBAL = "attached", "attached-global"
HOST_METHODS = (PLAIN, TEMPERATURE, MC_DROPOUT, MC_DROPOUT_TEMPERATURE, ATTACHED, ATTACHED_GLOBAL)
BASELINE = TEMPERATURE  # what all others are compared with: one number, fitted in a second

TITLES = {
    PLAIN: "plain",
    TEMPERATURE: "temperature",
    MC_DROPOUT: "MC dropout",
    MC_DROPOUT_TEMPERATURE: "MC dropout, temperature",
    ATTACHED: "attached, as `fit` chose",
    ATTACHED_GLOBAL: "attached, made to draw (`global`), temperature",
}

# a predictor and a number of samples to the logits [S, n, C] of the validation items
OnValidation = Callable[[Predictor, int], Tensor]


@dataclass(frozen=True)
class Variant:
    """One method of a source: what its logits are divided by."""

    method: str
    temperature: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)

    def predicted(self, logits: Tensor, labels: Tensor | None) -> Predicted:
        """Of the source's logits [S, n, C]."""
        return Predicted.from_logits(logits, labels, temperature=self.temperature)


@dataclass(frozen=True)
class Source:
    """A predictor, how often it draws, and the methods that its draws serve."""

    predictor: Predictor
    samples: int
    variants: tuple[Variant, ...]


class Fitting:
    """Everything of one model that is fitted to its validation items."""

    def __init__(self, on_validation: OnValidation, labels: Tensor, samples: int) -> None:
        self._on_validation, self._labels, self._samples = on_validation, labels, samples
        self.notes: list[str] = []

    def with_and_without(
        self,
        predictor: Predictor,
        names: tuple[str, str],
        wanted: Sequence[str],
        *,
        samples: int | None = None,
    ) -> list[Source]:
        """A predictor as it is and with temperature, as far as they are wanted."""
        count = self._samples if samples is None else samples
        variants = []
        if names[0] in wanted:
            variants.append(Variant(names[0]))
        if names[1] in wanted:
            variants += self._tempered(predictor, names[1], count)
        return [Source(predictor, count, tuple(variants))] if variants else []

    def attached(
        self, handle: Handle, data: Iterable[Any], wanted: Sequence[str], **options: Any
    ) -> list[Source]:
        """What `fit` chose, and one scale, noise and power for all whether it chose them or not.

        `fit` keeps two fifths of the items back to choose by.  The temperature of the forced draws is fitted
        on all items, as that of the row `temperature` is, so that these two differ by the draws alone.
        """
        fit = handle.fit(list(data), **options)
        names = {c.name: c.settings for c in fit.candidates}
        told = {
            "chosen": fit.chosen,
            "candidates": {c.name: {"nll": c.nll, "fitted_nll": c.fitted_nll} for c in fit.candidates},
        }
        sources = []
        if ATTACHED in wanted:
            chosen = AttachedPredictor(handle, fit.settings)
            detail = {**told, "temperature": fit.settings.temperature, "draws": chosen.draws}
            variant = Variant(ATTACHED, detail=detail)
            sources.append(Source(chosen, self._samples if chosen.draws else 1, (variant,)))
        if ATTACHED_GLOBAL in wanted:
            forced = AttachedPredictor(handle, replace(names["global"], temperature=1.0))
            mine = forced.settings
            detail = {
                "scale": float(mine.scale[0, 0]), "noise": float(mine.noise[0, 0]),
                "power": float(mine.power[0, 0]),
            }  # fmt: skip
            variants = self._tempered(forced, ATTACHED_GLOBAL, self._samples, detail)
            sources.append(Source(forced, self._samples, tuple(variants)))
        return sources

    def _tempered(
        self, predictor: Predictor, name: str, samples: int, detail: dict[str, Any] | None = None
    ) -> list[Variant]:
        """None where every validation item is right, with a note."""
        try:
            heat = fit_temperature(self._on_validation(predictor, samples), self._labels)
        except NumericalError as error:
            self.notes.append(f"{name} is left out: {error}")
            return []
        return [Variant(name, heat, {**(detail or {}), "temperature": heat})]


# The trainings of a comparison, and the rows that the weights of each serve.

CONVERSIONS = ("direct", "cgp", "scgp")
Start: TypeAlias = Literal["host", "pretrained"]
STARTS: tuple[Start, ...] = ("host", "pretrained")
TUNED_ON, TUNED_ON_TEMPERATURE = "tuned-on", "tuned-on+temperature"


@dataclass(frozen=True)
class Training:
    """One set of weights for every seed."""

    name: str  # of its files, and of the row without a temperature
    methods: tuple[str, ...]  # the rows it serves
    kind: str | None = None  # what attention is converted to
    further: bool = False  # whether it goes on where the seed's fine-tuned host ended

    @property
    def with_mean(self) -> str:
        """As the row is called in which a converted model does not draw."""
        return f"{self.name}-mean"


HOST = Training("host", HOST_METHODS)
CONTROL = Training(TUNED_ON, (TUNED_ON, TUNED_ON_TEMPERATURE), further=True)


@dataclass(frozen=True)
class Further:
    """How a fine-tuned host is tuned on, as it is or converted; all else is as in its fine-tuning.

    Args:
        epochs: passes over the training part.
        learning_rate: the highest, after the warm-up; lower than that of fine-tuning.
        regularizer: weight of the regulariser of a converted model.
        prior_scale: at which a converted model starts; the standard deviation of its draws is in proportion.
            It is learned, but a short training hardly moves it.  None, for images: that one of a few whose
            draws are best on validation before any tuning.
    """

    epochs: int = 1
    learning_rate: float = 5e-5
    regularizer: float = 0.01
    prior_scale: float | None = 0.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", check_count("further epochs", self.epochs, least=1))
        for name in ("learning_rate", "prior_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"expected further {name} > 0, got {value}")
        if not self.regularizer >= 0:
            raise ValueError(f"expected further regularizer >= 0, got {self.regularizer}")

    def after(self, first: Finetuning) -> Finetuning:
        """The schedule, given that of the host."""
        return replace(
            first, epochs=self.epochs, learning_rate=self.learning_rate, regularizer=self.regularizer
        )

    def described(self, training: Training) -> dict[str, Any]:
        """What the weights of a training depend on: the control knows no process."""
        found = asdict(self)
        if training.kind is None:
            del found["regularizer"], found["prior_scale"]
        return {"further": found} if training.further else {}


def converted(kind: str, start: Start = "host") -> Training:
    """Of a kind, from the seed's fine-tuned host or from the pretrained weights."""
    check_choice("start", start, STARTS)
    name = f"converted-{kind}" if start == "host" else f"pretrained-{kind}"
    rows = (name, f"{name}+temperature", f"{name}-mean+temperature")
    return Training(name, rows, kind, further=start == "host")


def all_trainings() -> tuple[Training, ...]:
    """In the order of the table."""
    return (HOST, CONTROL, *(converted(kind, start) for start in STARTS for kind in CONVERSIONS))


def methods_of(kinds: Sequence[str], start: Start = "host") -> tuple[str, ...]:
    """Rows of the host, of the control where kinds start at it, then those of every converted kind."""
    control = CONTROL.methods if kinds and start == "host" else ()
    return (*HOST_METHODS, *control, *(name for kind in kinds for name in converted(kind, start).methods))
