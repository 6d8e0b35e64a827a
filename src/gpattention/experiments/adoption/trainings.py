"""The trainings of a comparison, and the rows that the weights of each serve."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from gpattention.checks import check_count
from gpattention.experiments.adoption.finetuning import Finetuning
from gpattention.experiments.adoption.methods import HOST_METHODS
from gpattention.metrics.checks import check_choice

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
