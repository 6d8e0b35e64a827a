"""Does adoption help trained vision transformers?  Clean, corrupted and out-of-distribution images.

Runs that differ only in their seed are one model; the host is a run's model.  Converted models start from it
and are tuned on for a short while, and so is the host itself, as their control.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

import gpattention
from gpattention import evaluation
from gpattention.checks import check_choice
from gpattention.data.corruptions import CATEGORIES
from gpattention.evaluation import ItemSet, OodScores, Predicted, RunSets, open_with_digest, run_sets
from gpattention.evaluation.suites import corruption_means
from gpattention.files import StrPath
from gpattention.gp import NumericalError
from gpattention.hosts import attach, conversion_of, convert
from gpattention.metrics import auroc
from gpattention.models import Transformer
from gpattention.runs import Column, Record, Run, name_without_seed, prepare
from gpattention.studies import adoption, runs_below
from gpattention.studies.adoption import Progress, Row, Study, Training, Values
from gpattention.studies.adoption_tables import SUITE, columns_of
from gpattention.training import Schedule
from gpattention.training.engine import Feed, Objective

PARTS = ("clean", "corrupted", "ood")
METRICS = ("accuracy", "nll", "ece", "mce", "aurc")
SCORES = {"entropy": "entropy", "mutual_information": "mutual inf.", "max_softmax": "max-prob"}
COLUMNS = (
    *columns_of("test", "test", "clean", METRICS),
    *columns_of("corrupted/mean", "test corr.", "corrupted", METRICS),
    *(  # the figure shows the entropy only
        Column(SUITE, "ood/*", "auroc", score, f"test AUROC {head}", "entropy" if score == "entropy" else "")
        for score, head in SCORES.items()
    ),
)
FOLDER = "adoption"  # inside a run's folder
PRIOR_SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)  # candidates of the initial prior scale
CHOOSE_BY = 500  # validation images by which one of them is chosen
FIT_ROWS = {"cuda": 2000}  # items times samples that `fit` runs at once where the default would idle
SEED = 0  # seed of the draws


@dataclass(frozen=True, kw_only=True)
class ImageSettings(adoption.StudySettings):
    """Settings of a study on images; see `StudySettings` for the others.

    Args:
        parts: parts to measure: clean, corrupted, ood.
        limit: largest number of images of each set.
        types: corruptions; all if not given.
        severities: severities of corruptions, 1 to 5; all if not given.
    """

    parts: tuple[str, ...] = PARTS
    limit: int | None = None
    types: tuple[str, ...] | None = None
    severities: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("convert_from of images", self.convert_from, ("host",))
        for part in self.parts:
            check_choice("part", part, PARTS)


def adopt_images(
    folders: Sequence[StrPath], settings: ImageSettings, progress: Progress | None = None
) -> adoption.AdoptionResult:
    """Compare methods on every run on images that `attach` supports.

    Args:
        folders: run folders, or folders of runs.
        settings: settings of the study.
        progress: called with the work, how much of it is done, and how much there is.

    Returns:
        All cells of these settings; those that are finished for the same weights and data are read from
        RUN/adoption.

    Raises:
        FileNotFoundError: there is no run, or no data.
        ValueError: no run can be attached to, two runs have the same seed, or nothing is finished and
            `finished` allows no computing.
    """
    runs, notes = _attachable(folders)
    return adoption.run_studies((ImageStudy(*pair, settings, progress) for pair in runs), notes)


def _attachable(folders: Sequence[StrPath]) -> tuple[list[tuple[Run, str]], list[str]]:
    """Runs with the SHA-256 of their weights, and notes on runs that are left out.

    All runs are opened before any work, so that a bad folder costs nothing.
    """
    found, notes = dict[tuple[str, int], tuple[Run, str]](), list[str]()
    for folder in runs_below(folders):
        run, weights = open_with_digest(folder)
        try:
            if run.recipe.model.type != "vision":
                raise ValueError("it reads no images")
            attach(run.model)
        except ValueError as error:
            notes.append(f"{folder} is left out: {str(error).splitlines()[0]}")
            continue
        key = name_without_seed(run.recipe.name), run.recipe.seed
        if key in found:
            both = f"{found[key][0].folder} and {run.folder}"
            raise ValueError(f"expected one run for each seed of {key[0]}, got {both}")
        found[key] = run, weights
    if not found:
        wanted = "at least one run of softmax or kernel attention on images"
        raise ValueError(f"expected {wanted}, got none: {'; '.join(notes)}")
    return list(found.values()), notes


class ImageStudy(Study):
    """The study of a run; `weights` is the SHA-256 of its model, whatever the run's file holds by now."""

    settings: ImageSettings
    draw_seed = SEED

    def __init__(
        self, run: Run, weights: str, settings: ImageSettings, progress: Progress | None = None
    ) -> None:
        super().__init__(settings, progress)
        self.seed, self.label, self.parts = run.recipe.seed, run.folder.name, settings.parts
        self.folder, self.group = run.folder / FOLDER, name_without_seed(run.recipe.name)
        self._run, self._digest, self._contents = run, weights, dict[str, dict[str, Any]]()

    @cached_property
    def sets(self) -> RunSets:
        """The sets of items, loaded once; finished figures are compared with them too."""
        given = self.settings
        return run_sets(
            self._run, given.root, limit=given.limit, types=given.types, severities=given.severities
        )

    @property
    def validation(self) -> ItemSet:
        """The validation images."""
        return self.sets.validation

    def described(self, training: Training, part: str) -> dict[str, Any]:
        """The weights and settings, with corruptions for the part `corrupted`."""
        given = self.settings
        own = {
            "gpattention": gpattention.__version__, "host": self._digest, "samples": given.samples,
            "seed": SEED, "limit": given.limit, "fit": given.fit, **given.further(training),
        }  # fmt: skip
        corruptions = {"types": given.types, "severities": given.severities}
        return own | (corruptions if part == "corrupted" else {})

    def data(self, training: Training, part: str) -> dict[str, Any]:
        """Digests of the sets that are measured, and of those that weights were trained and chosen on."""
        if part not in self._contents:  # digests of whole folders are slow
            self._contents[part] = self.sets.described(part)
        if training is adoption.HOST:
            return self._contents[part]
        tuned_on = {"train": self.sets.train.digest, "chosen_on": self.sets.chose_weights.digest}
        return {**self._contents[part], **tuned_on}

    @cached_property
    def host(self) -> tuple[nn.Module, dict[str, Any]]:
        """The run's model."""
        return deepcopy(self._run.model).to(self.device).eval(), {}

    def start(self, training: Training) -> tuple[nn.Module, dict[str, Any]]:
        """The host, converted at the given prior scale or at the one whose draws are best before tuning."""
        given, kind = self.settings.further_prior_scale, training.kind
        if kind is None:
            return deepcopy(self.host[0]), {}
        models = {scale: convert(deepcopy(self.host[0]), kind, seed=self.seed, prior_scale=scale)
                  for scale in (PRIOR_SCALES if given is None else (given,))}  # fmt: skip
        if given is not None:
            return models[given], {"prior_scale": given}
        nll = {scale: self._drawn_nll(model) for scale, model in models.items()}
        best = min(nll, key=nll.__getitem__)
        return models[best], {"prior_scale": best, "nll_before": {str(s): x for s, x in nll.items()}}

    def _drawn_nll(self, model: nn.Module) -> float:
        """The NLL of a converted model's draws at their best temperature."""
        predictor, items = adoption.converted_predictor(model), self.sets.chose_weights.first(CHOOSE_BY)
        samples, seed = self.settings.samples, self.draw_seed
        raw = evaluation.predict_items(predictor, items, samples=samples, seed=seed, device=self.device)
        assert raw.labels is not None
        try:
            temperature = evaluation.fit_temperature(raw.logits, raw.labels)
        except NumericalError as error:
            error.add_note("no prior scale can be chosen by these draws: name it (--further-prior-scale)")
            raise
        predicted = Predicted.from_logits(raw.logits, raw.labels, temperature=temperature)
        return adoption.label_scores(predicted, ("nll",))["nll"]

    def tune(self, model: nn.Module, training: Training) -> list[dict[str, float]]:
        """Train as the run did, with the orders and crops of the epochs after its last."""
        given, recipe = self.settings, self._run.recipe
        recipe = replace(
            recipe,
            optimizer=replace(recipe.optimizer, accumulate=1),
            phases=replace(recipe.phases, draw="independent"),
            regularizer=replace(recipe.regularizer, normalised=True),
        )
        feed = Feed(recipe, prepare(recipe, self.settings.root).training, self.device, torch.float32)
        plain = conversion_of(model) is None
        objective = Objective(cast(Transformer, model), recipe, "kernel" if plain else "gp")
        steps = Schedule(recipe, feed.steps_per_epoch)
        alpha = torch.tensor(given.further_regularizer, device=self.device)

        def loss(numbered: tuple[int, list[Any]]) -> Tensor:
            step, (batch,) = numbered
            seed = torch.tensor(steps.controls(step).seed, device=self.device)
            return objective(batch.inputs, batch.labels, batch.items, seed, alpha)[0]

        first = steps.total_steps
        return self.fine_tune(
            objective, given.further_epochs, given.further_learning_rate,
            enumerate(feed.updates(first), first), loss, training, steps=feed.steps_per_epoch,
            epochs_before=recipe.epochs,
        )  # fmt: skip

    def fit_data(self) -> tuple[list[Any], dict[str, Any]]:
        """The validation images that a temperature is fitted on, as one batch, and options."""
        options = {"rows": FIT_ROWS[self.device.type]} if self.device.type in FIT_ROWS else {}
        options |= {"items": len(self.validation)} | self.settings.fit
        some = self.validation.first(options["items"])
        assert some.labels is not None
        return [(some.inputs(0, len(some), self.device), some.labels.to(self.device))], options

    def measured(self, part: str, rows: Sequence[Row]) -> tuple[Values, Sequence[str]]:
        """Metrics of clean and corrupted images; AUROC of scores for out-of-distribution images."""
        sets, values = self.sets, Values({row.method: {} for row in rows})
        if part == "ood":
            outside, notes = sets.load_outside()
            chosen, total = iter(outside), len(outside)
            scores = OodScores.fit(None)
            inside = {method: scores(predicted) for method, predicted in self.predictions(rows, sets.test)}
        elif part == "clean":
            chosen, total, notes = iter((sets.validation, sets.test)), 2, ()
        else:
            assert sets.corruptions is not None  # images have corruptions
            source = sets.corruptions.open(self.device)
            places = list(product(source.types, source.severities))
            chosen, total = (sets.corrupted_items(source, *place) for place in places), len(places)
            notes = source.notes
        for done, items in enumerate(chosen, 1):
            for method, predicted in self.predictions(rows, items):
                if part == "ood":
                    own = {name: x for name, x in scores(predicted).items() if name in SCORES}
                    figures = {f"auroc_{name}": auroc(inside[method][name], x) for name, x in own.items()}
                else:
                    figures = adoption.label_scores(predicted, METRICS)
                values[method][items.name] = figures
            self.report(f"{self.label} {part}", done, total)
        if part == "corrupted":
            records = [
                Record(name, method, metric, value)
                for method, sets_of_method in values.items()
                for name, figures in sets_of_method.items()
                for metric, value in figures.items()
            ]
            for mean in corruption_means(records, CATEGORIES):
                values[mean.predictor].setdefault(mean.set, {})[mean.metric] = mean.value
        return values, notes
