"""What an attached model draws with: scales, noise and powers of every head, and which sites draw."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpattention.adopt.frames import Frame
from gpattention.adopt.sites import Site
from gpattention.adopt.variance import Prior

SCALE, NOISE, POWER = 0.1, 0.1, 0.0  # before a fit


@dataclass(frozen=True, eq=False)
class Settings:
    """One row per site, one column per head; heads that a site has not are unused."""

    scale: Tensor  # [sites, heads] t, in units of the values' root mean square
    noise: Tensor  # [sites, heads] sigma^2
    power: Tensor  # [sites, heads] gamma
    draws: tuple[bool, ...]  # per site
    temperature: float = 1.0  # divides the drawn logits
    residual: float = 0.0  # variance of regression targets about the drawn mean
    frames: tuple[Frame | None, ...] = ()  # per site, None before a fit

    def prior(self, place: int, heads: int) -> Prior:
        """Of one site."""
        return Prior(self.scale[place, :heads], self.noise[place, :heads], self.power[place, :heads])

    def frame(self, place: int) -> Frame | None:
        """Of one site, None before a fit."""
        return self.frames[place] if self.frames else None

    def drawn(self, place: int) -> bool:
        """Whether that site draws: a scale of 0 draws nothing."""
        return self.draws[place] and bool((self.scale[place] > 0).any())

    @property
    def fitted(self) -> bool:
        """Whether a fit made them: it measures frames."""
        return any(frame is not None for frame in self.frames)

    @property
    def any_drawn(self) -> bool:
        """Whether any site draws; if none does, the host's own pass says it all."""
        return any(self.drawn(place) for place in range(len(self.draws)))

    def warn_unfitted(self, stacklevel: int) -> None:
        """Say that variances by these settings are no score yet, or none at all."""
        if not self.fitted:
            why = (
                "variances of a handle that was not fitted are no score: they may rank items the wrong way "
                "round. handle.fit(held_out, labels) fits them"
            )
        elif not self.any_drawn:
            why = "the fit chose no draws, so that variances are no score: entropy and confidence are"
        else:
            return
        warnings.warn(why, stacklevel=stacklevel)

    def to(self, device: torch.device | str) -> "Settings":
        """The same on another device."""
        frames = tuple(
            None if f is None else Frame(**{name: x.to(device) for name, x in vars(f).items()})
            for f in self.frames
        )
        moved = {name: getattr(self, name).to(device) for name in ("scale", "noise", "power")}
        return replace(self, **moved, frames=frames)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as a mapping that `from_state_dict` understands."""
        frames = [None if frame is None else dict(vars(frame)) for frame in self.frames]
        return {**vars(self), "frames": frames}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Settings":
        """What `state_dict` gave."""
        missing = sorted(set(cls.__dataclass_fields__) ^ set(state))
        if missing:
            raise ValueError(f"expected the state of settings, got one that differs in {', '.join(missing)}")
        frames = tuple(None if frame is None else Frame(**frame) for frame in state["frames"])
        return cls(**{**state, "draws": tuple(state["draws"]), "frames": frames})


def initial_settings(sites: tuple[Site, ...]) -> Settings:
    """All sites draw, with the same small scale."""
    shape = (len(sites), max(site.heads for site in sites))
    return Settings(
        scale=torch.full(shape, SCALE),
        noise=torch.full(shape, NOISE),
        power=torch.full(shape, POWER),
        draws=(True,) * len(sites),
    )
