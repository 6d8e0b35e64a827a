"""Where a model attends: the modules whose softmax can be read as a Gaussian-process mean (section 10).

A module is a site when its attention is a softmax over dot products, masked by padding alone or, in decoders
of Hugging Face's transformers, by whatever hides keys.  Everything else that looks like attention is left
alone, with the reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import nn

from gpattention.hosts.families import FAMILIES
from gpattention.hosts.families.base import CAUSAL, CROSS, AttentionHook, Site, attribute_reasons, heads_of

FOUND_FORMS = ", ".join(family.forms for family in FAMILIES.values())
_CONVERTED = "it was converted: its attention is a Gaussian process already"
_UNKNOWN = f"it is none of {FOUND_FORMS}"
_NO_HEADS = "no attribute known here says its number of heads and their width"
_POSTERIOR = "has a posterior of its own"
# what helps instead, by a part of the reason
_INSTEAD = {
    "attach takes it": "",
    "causal": "build it with causal=True of cgp, direct, kernel or softmax-gp",
    _CONVERTED: "gpattention.predict and signals have its uncertainty",
    _POSTERIOR: "gpattention.predict and signals have its uncertainty",
}
_OTHERWISE = "Signals of its logits and features alone still find strange inputs (docs/models.md)"


@dataclass(frozen=True)
class LeftAlone:
    """An attention module that is no site.

    Attributes:
        name: its path in the model, "" for the model itself.
        kind: the class of the module.
        why: the reason.
    """

    name: str
    kind: str
    why: str


@dataclass(frozen=True, eq=False)
class Found:
    """What `find_sites` saw, in the model's order; print it for a table.

    Attributes:
        sites: attention that can be attached to or converted.
        left_alone: all other attention, with the reason.
    """

    sites: tuple[Site, ...]
    left_alone: tuple[LeftAlone, ...]

    @property
    def writes(self) -> bool:
        """Whether some attention is a decoder's."""
        return any(site.attends == "causal" for site in self.sites)

    def convertible(self) -> "Found":
        """The same with the attention of decoders left alone, which can be attached to and not converted."""
        sites = [site for site in self.sites if site.attends == "all"]
        why = {name: f"{of}; attach takes it as it is" for name, of in (("causal", CAUSAL), ("cross", CROSS))}
        decoders = [LeftAlone(s.name, s.kind, why[s.attends]) for s in self.sites if s.attends != "all"]
        numbered = (replace(site, index=index) for index, site in enumerate(sites))
        return Found(tuple(numbered), (*self.left_alone, *decoders))

    def __str__(self) -> str:
        rows = [(s.name, s.kind, s.family, f"{s.heads} heads of {s.head_dim}") for s in self.sites]
        rows += [(a.name, a.kind, "left alone", a.why) for a in by_reason(self.left_alone)]
        lines = in_columns([(name or "(the model)", *others) for name, *others in rows])
        return "\n".join([f"{len(self.sites)} sites, {len(self.left_alone)} left alone", *lines])


def by_reason(left_alone: Iterable[LeftAlone]) -> list[LeftAlone]:
    """One for all modules of a kind with the same reason, named by the first, with what helps instead."""
    groups: dict[tuple[str, str], list[str]] = {}
    for alone in left_alone:
        groups.setdefault((alone.kind, alone.why), []).append(alone.name or "(the model)")
    told = []
    for (kind, why), (first, *others) in groups.items():
        instead = next((helps for part, helps in _INSTEAD.items() if part in why), _OTHERWISE)
        name = f"{first} and {len(others)} more" if others else first
        told.append(LeftAlone(name, kind, f"{why}; instead: {instead}" if instead else why))
    return told


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def find_sites(model: nn.Module) -> Found:
    """Find all attention modules of a model.

    Args:
        model: any module.

    Returns:
        The modules that can be attached to or converted, and the rest with the reason.

    >>> print(find_sites(model))
    """
    sites: list[Site] = []
    left_alone: list[LeftAlone] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        family = next((family for family in FAMILIES.values() if family.matches(module)), None)
        if family is None:
            continue
        around = _around(modules, name)
        why = _CONVERTED if "gpattention" in module._modules else family.refusal(module, around)
        shape = heads_of(module)
        if why is not None or shape is None:
            left_alone.append(LeftAlone(name, type(module).__name__, why or _NO_HEADS))
        else:
            parent = around[0] if around else None
            attends = family.attends(module, around)
            sites.append(Site(name, module, family.name, *shape, parent, len(sites), attends))
    seen = [site.name for site in sites] + [alone.name for alone in left_alone]
    left_alone += _unknown_attention(modules, seen)
    order = {name: index for index, name in enumerate(modules)}
    return Found(tuple(sites), tuple(sorted(left_alone, key=lambda alone: order[alone.name])))


@contextmanager
def hooked(model: nn.Module, sites: Sequence[Site], hook: AttentionHook) -> Iterator[None]:
    """Inside, every call of a site passes what it attends with to `hook` and goes on with the answer.

    Nothing of the model is changed outside, whatever happens inside.
    """
    with ExitStack() as stack:
        for name, family in FAMILIES.items():
            if chosen := [site for site in sites if site.family == name]:
                stack.enter_context(family.hooked(model, chosen, hook))
        yield


def _around(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """The modules that hold it, from the inside out."""
    around = []
    while name:
        name = name.rpartition(".")[0]
        around.append(modules[name])
    return around


def _unknown_attention(modules: dict[str, nn.Module], seen: list[str]) -> list[LeftAlone]:
    """Modules called attention that belong to no family and hold no other attention."""
    named = [name for name, module in modules.items() if _is_called_attention(module)]
    found = []
    for name in named:
        inside = name + "." if name else ""
        above = any(name == s or name.startswith(f"{s}.") or not s for s in seen)
        below = any(other.startswith(inside) and other != name for other in (*seen, *named))
        if not above and not below:
            why = "; ".join(attribute_reasons(modules[name])) or _UNKNOWN
            found.append(LeftAlone(name, type(modules[name]).__name__, why))
    return found


def _is_called_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return name.endswith(("attention", "attn")) or "selfattention" in name
