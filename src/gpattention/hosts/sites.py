"""Find the attention modules of a model whose softmax is also the mean of a Gaussian process (section 10).

A module is a site if its attention is a softmax over dot products that is masked by padding only; decoders of
Hugging Face's transformers may have any mask.  Other attention is left alone, with a reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import nn

from gpattention.hosts.conversion import summary
from gpattention.hosts.families import FAMILIES
from gpattention.hosts.families.base import CAUSAL, CROSS, AttentionHook, Site, attribute_reasons, heads_of

FOUND_FORMS = ", ".join(family.forms for family in FAMILIES.values())
_CONVERTED = "it was converted: its attention is a Gaussian process already"
_UNKNOWN = f"it is none of {FOUND_FORMS}"
_NO_HEADS = "no attribute known here says its number of heads and their width"
_POSTERIOR = "has a posterior of its own"
# what to do instead, by a part of the reason
_INSTEAD = {
    "attach takes it": "",
    "causal": "build it with causal=True of cgp, direct, kernel or softmax-gp",
    _CONVERTED: "gpattention.predict and signals have its uncertainty",
    _POSTERIOR: "gpattention.predict and signals have its uncertainty",
}
_OTHERWISE = "build `Signals` from its logits and features; they still find strange inputs (docs/models.md)"


@dataclass(frozen=True)
class LeftAlone:
    """An attention module that is not a site.

    Attributes:
        name: its path in the model, "" for the model itself.
        kind: the name of its class.
        why: the reason.
    """

    name: str
    kind: str
    why: str


@dataclass(frozen=True, eq=False)
class Found:
    """The result of `find_sites`, in the order of the model; prints as a table.

    Attributes:
        sites: attention modules that can be attached to or converted.
        left_alone: all other attention modules, with reasons.
    """

    sites: tuple[Site, ...]
    left_alone: tuple[LeftAlone, ...]

    @property
    def writes(self) -> bool:
        """Whether the model has causal attention, as decoders do."""
        return any(site.attends == "causal" for site in self.sites)

    def convertible(self) -> "Found":
        """The same without the attention of decoders, which can be attached to but not converted."""
        sites = [site for site in self.sites if site.attends == "all"]
        why = {"causal": f"{CAUSAL}; attach takes it as it is", "cross": f"{CROSS}; attach takes it as it is"}
        decoders = [LeftAlone(s.name, s.kind, why[s.attends]) for s in self.sites if s.attends != "all"]
        numbered = (replace(site, index=index) for index, site in enumerate(sites))
        return Found(tuple(numbered), (*self.left_alone, *decoders))

    def __str__(self) -> str:
        rows = [(s.name, s.kind, s.family, f"{s.heads} heads of {s.head_dim}") for s in self.sites]
        rows += [(a.name, a.kind, "left alone", a.why) for a in by_reason(self.left_alone)]
        lines = in_columns([(name or "(the model)", *others) for name, *others in rows])
        return "\n".join([f"{len(self.sites)} sites, {len(self.left_alone)} left alone", *lines])


def by_reason(left_alone: Iterable[LeftAlone]) -> list[LeftAlone]:
    """One entry for all modules of one class and reason, which adds what to do instead."""
    groups: dict[tuple[str, str], list[str]] = {}
    for alone in left_alone:
        groups.setdefault((alone.kind, alone.why), []).append(alone.name)
    entries = []
    for (kind, why), names in groups.items():
        instead = next((helps for part, helps in _INSTEAD.items() if part in why), _OTHERWISE)
        entries.append(LeftAlone(summary(names), kind, f"{why}; instead: {instead}" if instead else why))
    return entries


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def find_sites(model: nn.Module) -> Found:
    """Find all attention modules of a model.

    Args:
        model: any module.

    Returns:
        The modules that can be attached to or converted, and the others with reasons.

    >>> print(find_sites(model))
    """
    sites: list[Site] = []
    left_alone: list[LeftAlone] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        family = next((family for family in FAMILIES.values() if family.matches(module)), None)
        if family is None:
            continue
        around = [modules[path] for path in _parents(name)]
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
    """Within the block, each call of a site goes on with what `hook` returns for it.

    Afterwards the model is as it was, even if the block fails.
    """
    with ExitStack() as stack:
        for name, family in FAMILIES.items():
            if chosen := [site for site in sites if site.family == name]:
                stack.enter_context(family.hooked(model, chosen, hook))
        yield


def _parents(name: str) -> Iterator[str]:
    """The paths of the modules that hold the module of this path, from the inside out."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _unknown_attention(modules: dict[str, nn.Module], seen: list[str]) -> list[LeftAlone]:
    """Modules whose class is called attention, that belong to no family and hold no other attention."""
    classes = {name: type(module).__name__.lower() for name, module in modules.items()}
    named = [n for n, c in classes.items() if c.endswith(("attention", "attn")) or "selfattention" in c]
    found = []
    for name in named:
        inside = name + "." if name else ""
        above = any(name == s or name.startswith(f"{s}.") or not s for s in seen)
        below = any(other.startswith(inside) and other != name for other in (*seen, *named))
        if not above and not below:
            why = "; ".join(attribute_reasons(modules[name])) or _UNKNOWN
            found.append(LeftAlone(name, type(modules[name]).__name__, why))
    return found
