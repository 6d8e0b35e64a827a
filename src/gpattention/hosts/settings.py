"""Settings of an attached model: scales, noises and powers of every head, and which sites draw.

A folder has the numbers as safetensors and the rest as JSON.  The names of the files differ from those of
models, so that they can be in the same folder.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpattention.hosts.families.base import Site
from gpattention.hosts.sites import Found, by_reason, in_columns
from gpattention.hosts.variance import Frame, Prior
from gpattention.models.config import check_finite
from gpattention.strangeness.strangeness import load_fitted, save_fitted

SCALE, NOISE, POWER = 0.1, 0.1, 0.0  # before a fit


@dataclass(frozen=True, eq=False)
class Settings:
    """The draws of every site: one row per site, one column per head; unused if a site has fewer heads.

    Attributes:
        scale: [sites, heads] t, in units of the values' root mean square.
        noise: [sites, heads] sigma^2.
        power: [sites, heads] gamma.
        draws: per site, whether it draws.
        temperature: divides the drawn logits.
        residual: variance of regression targets about the drawn mean.
        frames: per site, None before a fit.
    """

    scale: Tensor
    noise: Tensor
    power: Tensor
    draws: tuple[bool, ...]
    temperature: float = 1.0
    residual: float = 0.0
    frames: tuple[Frame | None, ...] = ()

    def prior(self, index: int, heads: int) -> Prior:
        """The settings of one site."""
        scale, noise, power = (x[index, :heads] for x in (self.scale, self.noise, self.power))
        # a power of 0, as before a fit, needs no amplitude; exported programs cannot look at it
        tempered = torch.compiler.is_compiling() or power.requires_grad or self._used()[1][index]
        return Prior(scale, noise, power, tempered)

    def frame(self, index: int) -> Frame | None:
        """The frame of one site, None before a fit."""
        return self.frames[index] if self.frames else None

    def drawn(self, index: int) -> bool:
        """Whether a site draws: it does not with a scale of 0."""
        return self.draws[index] and self._used()[0][index]

    @property
    def fitted(self) -> bool:
        """Whether they come from a fit, which measures frames."""
        return any(frame is not None for frame in self.frames)

    @property
    def drawing(self) -> list[int]:
        """The sites that draw."""
        scaled, _ = self._used()
        return [index for index, draws in enumerate(self.draws) if draws and scaled[index]]

    @property
    def any_drawn(self) -> bool:
        """Whether any site draws."""
        return bool(self.drawing)

    def warn_unfitted(self, stacklevel: int) -> None:
        """Warn that variances by these settings are no score yet, or none at all."""
        if not self.fitted:
            which, helps = "of a handle that was not fitted", "call handle.fit(held_out, labels)"
        elif not self.any_drawn:
            which, helps = "after a fit that chose no draws", "entropy and confidence are"
        else:
            return
        warnings.warn(f"variances {which} are no score: {helps}", stacklevel=stacklevel)

    def warn_about_origin(self, stacklevel: int) -> None:
        """Warn that nothing is known yet about where queries and keys of causal attention lie."""
        if not self.fitted:
            why = (
                "log variances of a handle that was not fitted are centred at the origin and say mostly how "
                "long a text is. handle.fit(held_out_texts) fits them; entropy and surprise need no fit"
            )
            warnings.warn(why, stacklevel=stacklevel)

    def to(self, device: torch.device | str) -> "Settings":
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("scale", "noise", "power")}
        found = replace(self, **moved, frames=tuple(f and f.to(device) for f in self.frames))
        if found.scale.device.type != "cpu":  # whoever looks at numbers there waits for all that runs
            vars(found)["_known"] = self._used()
        return found

    def _used(self) -> tuple[list[bool], list[bool]]:
        """Of every site, whether a head has a scale, and whether one has a power."""
        known: tuple[list[bool], list[bool]] | None = vars(self).get("_known")
        return known or ((self.scale > 0).any(-1).tolist(), (self.power != 0).any(-1).tolist())

    def state_dict(self) -> dict[str, Any]:
        """All settings as a mapping for `from_state_dict`."""
        frames = [None if frame is None else dict(vars(frame)) for frame in self.frames]
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "frames": frames}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Settings":
        """The settings of `state_dict`."""
        if missing := sorted(set(cls.__dataclass_fields__) ^ set(state)):
            raise ValueError(f"expected the state of settings, got one that differs in {', '.join(missing)}")
        frames = tuple(None if frame is None else Frame(**frame) for frame in state["frames"])
        return cls(**{**state, "draws": tuple(state["draws"]), "frames": frames})


def initial_settings(sites: tuple[Site, ...]) -> Settings:
    """Settings before a fit: all sites draw, with the same small scale."""
    shape = (len(sites), max(site.heads for site in sites))
    scale, noise, power = (torch.full(shape, start) for start in (SCALE, NOISE, POWER))
    return Settings(scale, noise, power, draws=(True,) * len(sites))


FORMAT = "gpattention-attached-1"
NAME = "attached"  # of the two files
_NUMBERS = ("scale", "noise", "power")  # the tensors of the settings
_LISTS = {"sites": str, "framed": bool, "draws": bool}


def save_settings(folder: Path, sites: Sequence[str], settings: Settings) -> None:
    """Write both files; the record is the last one, and has the checksum of the numbers."""
    tensors: dict[str, Tensor] = {name: getattr(settings, name) for name in _NUMBERS}
    for index, frame in enumerate(settings.frames):
        if frame is not None:
            tensors |= {f"frames.{index}.{name}": x for name, x in vars(frame).items()}
    framed = [frame is not None for frame in settings.frames]
    plain = {name: getattr(settings, name) for name in ("draws", "temperature", "residual")}
    save_fitted(folder, NAME, FORMAT, {"sites": list(sites), "framed": framed, **plain}, tensors)


def load_settings(folder: Path) -> tuple[list[str], Settings]:
    """The names of the sites, and the settings; errors name file and field."""
    record, tensors = load_fitted(folder, NAME, FORMAT, (*_LISTS, "temperature", "residual"))
    for name, kind in _LISTS.items():
        value = record[name]
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            where = folder / f"{NAME}.json"
            raise ValueError(f"{where}: expected {name} to be a list of {kind.__name__}, got {value!r:.80}")
    path, names = folder / f"{NAME}.safetensors", Frame.__dataclass_fields__
    try:
        frames = tuple(
            Frame(**{name: tensors[f"frames.{index}.{name}"] for name in names}) if framed else None
            for index, framed in enumerate(record["framed"])
        )
        scale, noise, power = (tensors[name] for name in _NUMBERS)
    except KeyError as error:
        raise ValueError(f"{path} does not hold the settings of an attached model: {error}") from error
    check_finite(path, tensors)
    plain = (tuple(record["draws"]), record["temperature"], record["residual"])
    return record["sites"], Settings(scale, noise, power, *plain, frames)


def describe(model: str, found: Found, settings: Settings, *, attached: bool) -> str:
    """A table with a line for each site, and lines for what was left alone."""
    head = f"{'attached to' if attached else 'detached from'} {model}: {len(found.sites)} sites"
    fitted = "fitted" if settings.fitted else "not fitted"
    head += f", {len(settings.drawing)} draw ({fitted})"
    rows = [("site", "kind", "heads", "scale", "noise", "power")]
    for index, site in enumerate(found.sites):
        numbers = (getattr(settings, name)[index, : site.heads].tolist() for name in _NUMBERS)
        shown = map(_range, numbers) if settings.drawn(index) else ("off", "", "")
        kind, heads = f"{site.kind} ({site.family})", f"{site.heads} x {site.head_dim}"
        rows.append((site.name or "(the model)", kind, heads, *shown))
    alone = [f"left alone: {a.name} ({a.kind}): {a.why}" for a in by_reason(found.left_alone)]
    return "\n".join([head, *in_columns(rows), *alone])


def _range(numbers: list[float]) -> str:
    least, most = f"{min(numbers):.3g}", f"{max(numbers):.3g}"
    return least if least == most else f"{least}..{most}"
