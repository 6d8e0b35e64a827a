"""Where a model attends: the modules whose softmax can be read as a Gaussian-process mean (section 10).

A module is a site when its attention is a softmax over dot products of as many query as key heads, masked
by padding alone.  Everything else that looks like attention is left alone, with the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import nn

from gpattention.adopt.refusals import (
    CAUSAL,
    masks_causally,
    why_not_huggingface,
    why_not_own,
    why_not_timm,
    why_not_torch,
)
from gpattention.adopt.shapes import goes_through_interface, heads_of, looks_like_timm
from gpattention.attention import Attention

Family: TypeAlias = Literal["torch", "huggingface", "timm", "gpattention"]
CONVERTED = "it was converted: its attention is a Gaussian process already"
FAMILIES: tuple[Family, ...] = ("torch", "huggingface", "timm", "gpattention")


@dataclass(frozen=True, eq=False)
class Site:
    """One attention module."""

    name: str  # its path in the model, "" for the model itself
    module: nn.Module
    family: Family
    heads: int
    head_dim: int
    embed_dim: int  # width of the tokens it reads
    parent: nn.Module | None  # the module that holds it, None for the model itself
    parent_name: str  # "" for the model itself

    @property
    def attribute(self) -> str:
        """Its name in the parent."""
        return self.name.rpartition(".")[2]

    @property
    def kind(self) -> str:
        """The class of the module."""
        return type(self.module).__name__


@dataclass(frozen=True)
class LeftAlone:
    """An attention module that is no site."""

    name: str
    kind: str
    why: str


@dataclass(frozen=True, eq=False)
class Found:
    """What `find_sites` saw, in the model's order."""

    sites: tuple[Site, ...]
    left_alone: tuple[LeftAlone, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, str, str, str]] = [
            (s.name or "(the model)", s.kind, s.family, f"{s.heads} heads of {s.head_dim}")
            for s in self.sites
        ]
        rows += [(a.name or "(the model)", a.kind, "left alone", a.why) for a in self.left_alone]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows]
        return "\n".join([f"{len(self.sites)} sites, {len(self.left_alone)} left alone", *lines])


def find_sites(model: nn.Module) -> Found:
    """All attention modules of the model: those that can be adopted, and the rest with the reason.

    >>> print(find_sites(model))
    """
    sites: list[Site] = []
    left_alone: list[LeftAlone] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        family = _family(module)
        if family is None:
            continue
        parent_name = name.rpartition(".")[0]
        parent = modules[parent_name] if name else None
        why = CONVERTED if "gpattention" in module._modules else _REFUSALS[family](module, parent)
        if why is None and family == "huggingface" and masks_causally(_around(modules, name)):
            why = CAUSAL
        shape = heads_of(module)
        if why is None and shape is None:
            why = "its number of heads and their width are not told by any attribute known here"
        if why is not None or shape is None:
            left_alone.append(LeftAlone(name, type(module).__name__, str(why)))
        else:
            sites.append(Site(name, module, family, *shape, parent, parent_name))
    seen = [site.name for site in sites] + [alone.name for alone in left_alone]
    unknown = [LeftAlone(name, type(modules[name]).__name__, why) for name, why in _strangers(modules, seen)]
    order = {name: place for place, name in enumerate(modules)}
    left_alone = sorted([*left_alone, *unknown], key=lambda alone: order[alone.name])
    return Found(tuple(sites), tuple(left_alone))


def _family(module: nn.Module) -> Family | None:
    if isinstance(module, Attention):
        return "gpattention"
    if isinstance(module, nn.MultiheadAttention):
        return "torch"
    if goes_through_interface(module):
        return "huggingface"
    if looks_like_timm(module):
        return "timm"
    return None


def _around(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """The modules that hold it, from the inside out."""
    around = []
    while name:
        name = name.rpartition(".")[0]
        around.append(modules[name])
    return around


_REFUSALS: dict[Family, Callable[[nn.Module, nn.Module | None], str | None]] = {
    "torch": why_not_torch,
    "huggingface": why_not_huggingface,
    "timm": why_not_timm,
    "gpattention": why_not_own,
}


def _strangers(modules: dict[str, nn.Module], seen: list[str]) -> list[tuple[str, str]]:
    """Modules called attention that belong to no family and hold no other attention."""
    named = [name for name, module in modules.items() if _is_called_attention(module)]
    found = []
    for name in named:
        inside = name + "." if name else ""
        above = any(name == s or name.startswith(f"{s}.") or not s for s in seen)
        below = any(other.startswith(inside) and other != name for other in (*seen, *named))
        if not above and not below:
            found.append((name, why_not_huggingface(modules[name], None) or _FOREIGN))
    return found


_FOREIGN = "it is none of nn.MultiheadAttention, transformers' AttentionInterface, timm's or our own"


def _is_called_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return name.endswith(("attention", "attn")) or "selfattention" in name
