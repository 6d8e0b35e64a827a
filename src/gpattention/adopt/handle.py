"""The handle of an attached model: predict with uncertainty, fit it, take it off again."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gpattention.adopt.batches import Data
from gpattention.adopt.fitting import Fit, FitOptions, fit_settings
from gpattention.adopt.listening import GaussianProcessMean
from gpattention.adopt.reading import Task, real_tokens
from gpattention.adopt.results import TokenPrediction, Values
from gpattention.adopt.running import Runner
from gpattention.adopt.settings import Settings, initial_settings
from gpattention.adopt.settings_folder import load_settings, save_settings
from gpattention.adopt.sites import Found, Site
from gpattention.adopt.tables import describe
from gpattention.checks import check_count, check_whole
from gpattention.models.prediction import Prediction
from gpattention.models.rows import (
    Inputs,
    Progress,
    count_items,
    device_of,
    evaluating,
    iterate_rows,
)
from gpattention.models.rows_at_once import run_rows
from gpattention.models.variance_means import VarianceMeans


class Handle:
    """Made by `gpattention.attach`.

    The model is touched only while a call of the handle runs: used directly, saved or copied, it is what it
    was.
    """

    def __init__(self, runner: Runner, found: Found) -> None:
        self._runner, self.found = runner, found
        self._settings = initial_settings(found.sites)
        self._attached = True

    @property
    def model(self) -> nn.Module:
        """The host."""
        return self._runner.model

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where it attends."""
        return self.found.sites

    @property
    def task(self) -> Task | None:
        """What the model answers; None until it has been seen to."""
        return self._runner.task

    @property
    def settings(self) -> Settings:
        """What it draws with; assign to change."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        shape = (len(self.sites), max(site.heads for site in self.sites))
        for name in ("scale", "noise", "power"):
            found = tuple(getattr(settings, name).shape)
            if found != shape:
                raise ValueError(f"expected settings.{name} of shape {shape}, got {found}")
        if len(settings.draws) != len(self.sites):
            raise ValueError(
                f"expected settings.draws for {len(self.sites)} sites, got {len(settings.draws)}"
            )
        if bool((settings.scale < 0).any()) or bool((settings.noise <= 0).any()):
            raise ValueError("expected settings with scale >= 0 and noise > 0, got others")
        self._settings = settings

    def predict(
        self,
        inputs: Inputs | Mapping[str, Any],
        samples: int = 10,
        seed: int = 0,
        *,
        batch_size: int | None = None,
        variances: bool = False,
        first_item: int = 0,
        progress: Progress | None = None,
    ) -> Prediction | TokenPrediction | Values:
        """A `Prediction` of classes, a `TokenPrediction` of a class per token, or `Values` with a variance.

        The model runs in evaluation mode and without gradients.  `samples=0` is the model itself, to the last
        bit; so are samples where no site draws, but for the temperature.  The draws of item i depend on
        `seed` and `first_item` + i alone.  `variances=True` adds each site's variances, [B, H, N] averaged
        over the samples, to a `Prediction`.  `batch_size` bounds the rows (items times samples) that run at
        once: if not given 256, or 2000 on a GPU whose memory suffices.

        >>> handle.predict(tokenizer(sentences, padding=True, return_tensors="pt")).confidence
        """
        self._check_attached()
        samples = check_count("samples", samples, least=0)
        first_item = check_count("first_item", first_item, least=0)
        seed = check_whole("seed", seed)
        device, own = self._runner.device(inputs), self._settings
        if variances:
            own.warn_unfitted(stacklevel=3)
        count = samples if samples > 0 and own.any_drawn else 1  # without draws all samples are one
        settings = own.to(device)

        def run(rows_at_once: int) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
            parts: list[Tensor] = []
            told = VarianceMeans(count_items(inputs), count, device_of(inputs)) if variances else None
            for rows in iterate_rows(
                inputs, samples=count, seed=seed, batch_size=rows_at_once, device=device,
                first_item=first_item, progress=progress,
            ):  # fmt: skip
                if samples == 0:
                    drawing = self._runner.drawing(settings, None, keep_variances=True) if told else None
                    answer = self._runner.output(rows.inputs, drawing)
                    kept = drawing.variances if drawing else []
                else:
                    answer, kept = self._runner.draw(
                        rows, settings, seed=seed, keep_variances=told is not None
                    )  # fmt: skip
                parts.append(answer.to(device_of(inputs)))
                if told is not None:
                    told.add(rows.items, kept)
            return torch.cat(parts), None if told is None else told.means()

        with evaluating(self.model):
            parts, means = run_rows(run, batch_size, device)
        answers = parts.unflatten(0, (-1, count)).transpose(0, 1)  # [S, B, ...]
        answers = answers.expand(max(samples, 1), *answers.shape[1:]).contiguous()
        return self._result(answers, inputs, own if samples > 0 else None, variances=means)

    def variances(self, inputs: Inputs, *, batch_size: int | None = None) -> tuple[Tensor, ...]:
        """Of every token at every site, [B, H, N] each, in one plain pass; also of sites that do not draw.

        Before a fit nothing says how they go with what the model does not know, and as a score they may rank
        items the wrong way round: reading them then warns.
        """
        self._check_attached()
        self._settings.warn_unfitted(stacklevel=3)
        device = self._runner.device(inputs)
        settings = self._settings.to(device)

        def run(rows_at_once: int) -> tuple[Tensor | None, ...]:
            told = VarianceMeans(count_items(inputs), 1, device_of(inputs))
            for rows in iterate_rows(inputs, samples=1, seed=0, batch_size=rows_at_once, device=device):
                drawing = self._runner.drawing(settings, None, keep_variances=True)
                self._runner.output(rows.inputs, drawing)
                told.add(rows.items, drawing.variances)
            return told.means()

        with evaluating(self.model):
            return tuple(x for x in run_rows(run, batch_size, device) if x is not None)

    def process_mean(self, inputs: Inputs) -> Tensor:
        """The model's answers with every attention replaced by its Gaussian process's own mean.

        They are those of the model, up to rounding: this is how to see it on data of your own.
        """
        self._check_attached()
        with evaluating(self.model):
            listener = GaussianProcessMean(self.sites, self._settings.to(self._runner.device(inputs)))
            return self._runner.output(inputs, listener)

    def fit(self, data: Data, labels: Tensor | None = None, **options: Any) -> Fit:
        """Fit scales, noise, powers and which sites draw on held-out data, by negative log-likelihood.

        `data` is a loader of (inputs, labels) or of mappings with "labels", a pair of them, or the inputs
        with `labels` beside; `options` are those of `FitOptions`.  Where drawing does not help on the part of
        the data kept back from the fit, the scales become 0 and the model stays as it is.

        >>> handle.fit(validation_loader)
        """
        self._check_attached()
        with torch.inference_mode(False):  # the fit differentiates, wherever it is called
            fit = fit_settings(self._runner, self._settings, data, labels, FitOptions(**options))
        self._settings = fit.settings
        return fit

    def save(self, folder: str | Path) -> None:
        """Write the settings: `attached.json` and `attached.safetensors`, each in one piece or not at all.

        The model is not among them; it is saved as ever, in the same folder if that is wanted.

        >>> handle.save("attached")
        """
        save_settings(Path(folder), [site.name for site in self.sites], self._settings)

    def load(self, folder: str | Path) -> None:
        """What `save` wrote, for the same model; anything unexpected is an error and nothing is loaded."""
        sites, settings = load_settings(Path(folder))
        self._take(sites, settings, str(folder))

    def state_dict(self) -> dict[str, Any]:
        """The settings as a mapping, say for a checkpoint of one's own; `save` writes files."""
        return {"sites": [site.name for site in self.sites], **self._settings.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, for the same model."""
        settings = Settings.from_state_dict({k: v for k, v in state.items() if k != "sites"})
        self._take(list(state.get("sites", [])), settings, "state")

    def detach(self) -> nn.Module:
        """Let go of the model, which is what it was; the handle answers no more."""
        self._attached = False
        return self.model

    def __enter__(self) -> Self:
        self._check_attached()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        return describe(type(self.model).__name__, self.found, self._settings, attached=self._attached)

    def _result(
        self,
        answers: Tensor,  # [S, B, ...]
        inputs: Inputs,
        settings: Settings | None,  # that it was drawn with: a thread may have changed them meanwhile
        *,
        variances: tuple[Tensor | None, ...] | None,
    ) -> Prediction | TokenPrediction | Values:
        temperature = 1.0 if settings is None else settings.temperature
        drawn = settings is not None and settings.any_drawn
        if self.task == "classification":
            return Prediction.from_logits(answers / temperature, variances, drawn=drawn)
        if self.task == "tokens":
            shape = tuple(answers.shape[1:3])
            flat = Prediction.from_logits(answers.flatten(1, 2) / temperature, drawn=drawn)
            return TokenPrediction(flat, real_tokens(inputs, shape))
        residual = settings.residual if self.task == "regression" and settings is not None else 0.0
        return Values.from_draws(answers, residual, drawn=drawn)

    def _take(self, sites: list[str], settings: Settings, source: str) -> None:
        """Settings from elsewhere, if they are those of the same sites."""
        own = [site.name for site in self.sites]
        if own != sites:
            raise ValueError(f"{source}: expected the settings of sites {own}, got those of {sites}")
        self.settings = settings

    def _check_attached(self) -> None:
        if not self._attached:
            raise ValueError("expected an attached handle, got one that was detached: call attach again")
