"""The listeners: what is made of every call of attention while a model runs."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpattention.adopt.attended import Attended
from gpattention.adopt.frames import Alignment, Frame, Sums, aligning_maps
from gpattention.adopt.settings import Settings
from gpattention.adopt.sites import Site
from gpattention.adopt.variance import log_amplitude, log_stddev, process_mean
from gpattention.adopt.variance import place as place_tokens
from gpattention.gp import ItemNoise


class Drawing:
    """Adds to every mean a draw of its deviation, token by token.

    Every site has noise of its own, made from the seed, the item and the sample: which other sites draw,
    and how items are cut into batches, changes nothing.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        settings: Settings,
        *,
        max_keys: int,
        max_log_amplitude: float | None,
        noise: Sequence[ItemNoise] | None,  # per site; None passes the means on
        keep_variances: bool = False,
        variances_of_all: bool = False,
    ) -> None:
        self._places = {id(site.module): place for place, site in enumerate(sites)}
        self._settings, self._noise = settings, noise
        self._max_keys, self._max_log_amplitude = max_keys, max_log_amplitude
        self._keep, self._all = keep_variances, variances_of_all
        self.called = False
        self.variances: list[Tensor | None] = [None] * len(sites)  # [B, H, N] each

    def __call__(self, site: Site, told: Attended) -> Tensor:
        """A draw, or the mean where this site does not draw.  [B, H, Q, D]"""
        self.called = True
        place = self._places[id(site.module)]
        drawn = self._settings.drawn(place)
        if not drawn and not (self._keep and self._all):
            return told.mean
        log_std = log_stddev(
            # how it depends on earlier draws is left out of gradients: they would cross Cholesky factors
            _detached(told),
            self._settings.prior(place, site.heads),
            self._settings.frame(place),
            max_keys=self._max_keys,
            max_log_amplitude=self._max_log_amplitude,
        )  # [B, H, Q]
        if self._keep:
            self.variances[place] = (2 * log_std.detach()).exp()
        if self._noise is None or not drawn:
            return told.mean
        shape = (1, *told.mean.shape)
        normal = self._noise[place].normal(shape, log_std.dtype, told.mean.device)[0]  # [B, H, Q, D]
        return told.mean + (log_std.exp()[..., None] * normal).to(told.mean.dtype)


def _detached(told: Attended) -> Attended:
    if not torch.is_grad_enabled():
        return told
    return Attended(
        told.mean.detach(), told.q.detach(), told.k.detach(), told.v.detach(), told.mask, told.form,
        told.amplitude,
    )  # fmt: skip


class GaussianProcessMean:
    """Passes on the mean of the Gaussian process, computed from its kernel: what equals the host's."""

    def __init__(self, sites: Sequence[Site], settings: Settings) -> None:
        self._places = {id(site.module): place for place, site in enumerate(sites)}
        self._settings = settings

    def __call__(self, site: Site, told: Attended) -> Tensor:
        """[B, H, Q, D]"""
        return process_mean(told, self._settings.frame(self._places[id(site.module)])).to(told.mean.dtype)


class Measuring:
    """Sums up what frames are made of; the means pass unchanged."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._places = {id(site.module): place for place, site in enumerate(sites)}
        self._sums = [Sums() for _ in sites]
        self._frames: list[Frame | None] = [None] * len(sites)

    def __call__(self, site: Site, told: Attended) -> Tensor:
        """The host's mean, unchanged.  [B, H, Q, D]"""
        place = self._places[id(site.module)]
        sums, frame = self._sums[place], self._frames[place]
        real = torch.ones_like(told.k[:, :1, :, :1], dtype=torch.bool)  # [B, 1, K, 1]
        real = real if told.mask is None else real & told.mask[..., None]
        own = real if told.q.shape[-2] == told.k.shape[-2] else real.any(-2, keepdim=True)  # of queries
        if frame is None:
            sums.add_tokens("q", told.q, own.expand(-1, -1, told.q.shape[-2], -1))
            sums.add_tokens("k", told.k, real)
            sums.add("v square", torch.where(real, told.v, 0.0).double().square().mean(-1).sum((0, 2)))
        elif told.form != "rbf":
            amplitude = log_amplitude(told, place_tokens(told, frame))  # [B, H, Q]
            sums.add("amplitude", torch.where(own[..., 0], amplitude, 0.0).sum((0, 2)))
        return told.mean

    def frames(self, alignment: Alignment) -> tuple[Frame, ...]:
        """Origins, maps and units; a second run over the same data then tells the mean amplitudes."""
        for place, sums in enumerate(self._sums):
            (q0, covariance_q), (k0, covariance_k) = sums.moments("q"), sums.moments("k")
            maps = aligning_maps(covariance_q, covariance_k, alignment)
            unit = sums.ratio("v square", "k count").clamp_min(1e-12).sqrt()
            made = (q0, k0, *maps, unit, torch.zeros_like(unit))
            self._frames[place] = Frame(*(x.float() for x in made))
        return tuple(frame for frame in self._frames if frame is not None)

    def finished(self) -> tuple[Frame, ...]:
        """The frames with their mean amplitudes."""
        done = []
        for sums, frame in zip(self._sums, self._frames, strict=True):
            assert frame is not None
            known = sums.has("amplitude")
            done.append(
                replace(frame, log_amplitude=sums.ratio("amplitude", "q count").float()) if known else frame
            )
        return tuple(done)
