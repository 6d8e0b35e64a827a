"""Scores of a language model's uncertainty, token by token.

Every number belongs to a row, after the model has read the tokens up to there.  Entropy, top probability,
margin and surprise are of its prediction of the next token.  The variance of eq. 22, and how far its profile
over all heads is from what is usual at that position, are of its attention to the token just read.  The first
four are shown at the token that follows, the others, and the sum of strangeness and surprise, at the token
itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias, cast

import torch
from torch import Tensor

from gpattention.checks import check_choice
from gpattention.hosts.painting import Painted, html_of, levels_of, pieces_of, show_lines
from gpattention.models.prediction import make_frame

if TYPE_CHECKING:
    from pandas import DataFrame

Score: TypeAlias = Literal[
    "entropy", "top_probability", "margin", "surprise", "log_variance", "log_pivot", "strangeness", "combined"
]
OF_PREDICTION: tuple[Score, ...] = ("entropy", "top_probability", "margin", "surprise")
OF_ATTENTION: tuple[Score, ...] = ("log_variance", "log_pivot", "strangeness", "combined")
FITTED: tuple[Score, ...] = ("strangeness", "combined")  # only of a fitted handle
SCORES: tuple[Score, ...] = (*OF_PREDICTION, *OF_ATTENTION)
# defaults of `show` and of flags before a fit and after it, as measured in docs/tokens.md
BEFORE: Score = "surprise"
AFTER: Score = "combined"
_FALLING = ("top_probability", "margin")  # of which small values are strange


def check_score(field: str, name: str) -> Score:
    """The name of a score.

    Args:
        field: what it was given as.
        name: one of `SCORES`.

    Returns:
        The name.

    Raises:
        ValueError: for another.
    """
    check_choice(field, name, SCORES)
    return cast(Score, name)


@dataclass(frozen=True, eq=False)
class TokenUncertainty:
    """Scores of every row of a language model, [B, N] each.

    Attributes:
        ids: tokens that are read.
        next_ids: tokens that follow, -1 if unknown.
        real: False = padding.
        positions: of every row in its text, from 0.
        entropy: of the next token, in nats.
        top_probability: of the likeliest next token.
        margin: difference to the probability of the second likeliest.
        surprise: -log p of the token that follows, NaN if it is unknown.
        log_variance: log u of eq. 22, the mean over all heads.
        log_pivot: log of the row's own key's noisy variance given those before it, the mean over all heads:
            these sum to the log determinant that LLM-Check scores texts by.
        profile: log u of every head [B, N, P], if it was asked for.
        columns: names of the P heads.
        strangeness: distance of the profile from what is usual at its position, in deviations; None before a
            fit.
        p_value: share of held-out tokens that are as strange; None before a fit.
        standard: scores in deviations from what is usual at their position, by name; empty before a fit.
        tokenizer: to show tokens as text, None to show ids.
    """

    ids: Tensor
    next_ids: Tensor
    real: Tensor
    positions: Tensor
    entropy: Tensor
    top_probability: Tensor
    margin: Tensor
    surprise: Tensor
    log_variance: Tensor
    log_pivot: Tensor
    profile: Tensor | None = None
    columns: tuple[str, ...] = ()
    strangeness: Tensor | None = None
    p_value: Tensor | None = None
    standard: dict[str, Tensor] | None = None
    tokenizer: Any = None

    def __len__(self) -> int:
        return len(self.ids)

    def score(self, name: Score, *, standardised: bool = False) -> Tensor:
        """One score of every row, larger for stranger rows.

        Args:
            name: one of `SCORES`.
            standardised: in deviations from what is usual at its position on held-out text; the variance of
                attention falls with every further key, so that its raw number says mostly how long a text is.

        Returns:
            [B, N]; top probability and margin have their sign turned.

        Raises:
            ValueError: for other names, and for what only a fitted handle knows.
        """
        check_choice("score", name, SCORES)
        if name == "combined":
            return self._combined()
        if standardised and name != "strangeness":
            if not self.standard:
                raise ValueError(
                    f"expected a handle that was fitted for a standardised {name}: call handle.fit"
                )
            return self.standard[name]
        found: Tensor | None = getattr(self, name)
        if found is None:
            raise ValueError(f"expected a handle that was fitted for {name}: call handle.fit(held_out)")
        return -found if name in _FALLING else found

    def _combined(self) -> Tensor:
        """Strangeness plus the standardised surprise of the same token, which the row before tells."""
        if not self.standard or self.strangeness is None:
            raise ValueError("expected a handle that was fitted for combined: call handle.fit(held_out)")
        surprise = torch.zeros_like(self.strangeness)
        follows = self.next_ids[:, :-1] >= 0
        surprise[:, 1:] = torch.where(follows, self.standard["surprise"][:, :-1], 0.0)
        return self.strangeness + surprise

    def cpu(self) -> "TokenUncertainty":
        """A copy on the CPU."""
        return self._changed(lambda x: x.cpu())

    def __getitem__(self, items: slice | Tensor | tuple[slice, slice]) -> "TokenUncertainty":
        """Some of the texts, or of the rows of all: `found[:2]`, `found[:, 10:]`."""
        return self._changed(lambda x: x[items])

    def pieces(self) -> list[list[str]]:
        """The text of every token that is read; ids in brackets without a tokenizer.

        Returns:
            [B, N] of them.
        """
        return [pieces_of(self.tokenizer, line) for line in self.ids.tolist()]

    def next_pieces(self) -> list[list[str]]:
        """The text of the tokens that follow, empty if unknown.

        Returns:
            [B, N] of them.
        """
        found = []
        for read, follow in zip(self.ids.tolist(), self.next_ids.tolist(), strict=True):
            own = [*read[:1], *follow]
            found.append(pieces_of(self.tokenizer, own)[1:])
        return found

    def _changed(self, change: Any) -> "TokenUncertainty":
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: change(x) for name, x in own.items() if isinstance(x, Tensor)}
        standard = self.standard and {name: change(x) for name, x in self.standard.items()}
        return replace(self, **changed, standard=standard)

    @classmethod
    def join(
        cls, steps: Iterable["TokenUncertainty"], *, axis: Literal["rows", "texts"] = "rows"
    ) -> "TokenUncertainty":
        """Join several: the steps of `generate`, or further texts.

        Args:
            steps: of the same texts, or texts of one length.
            axis: "rows" joins rows of the same texts, "texts" joins texts.

        Returns:
            One object with all of them.

        Raises:
            ValueError: there are none.
        """
        parts = list(steps)
        if not parts:
            raise ValueError("expected at least one step to join, got none")
        dim = 1 if axis == "rows" else 0
        joined: dict[str, Any] = {}
        for field in fields(cls):
            if isinstance(getattr(parts[0], field.name), Tensor):
                joined[field.name] = torch.cat([getattr(part, field.name) for part in parts], dim)
        if parts[0].standard:
            joined["standard"] = {
                name: torch.cat([(part.standard or {})[name] for part in parts], dim)
                for name in parts[0].standard
            }
        return replace(parts[0], **joined)

    def show(self, by: Score | None = None, *, file: TextIO | None = None) -> None:
        """Print the texts in colours, deeper for stranger tokens.

        With a fitted handle colours are deviations from what is usual at the position, else ranks in the
        text.  Scores of predictions colour the token that was predicted.

        Args:
            by: one of `SCORES`; "combined" after a fit and "surprise" before it, if not given.
            file: to print to; standard output if not given.
        """
        by = by or self._default
        show_lines(self._title(by), self._painted(by), file=file)

    @property
    def _default(self) -> Score:
        return AFTER if self.standard else BEFORE

    def to_html(self, by: Score | None = None) -> str:
        """The same as HTML; a pointer over a token shows all its numbers.

        Args:
            by: as in `show`.

        Returns:
            One `div` that needs nothing else.
        """
        by = by or self._default
        return html_of(self._title(by), self._painted(by))

    def _repr_html_(self) -> str:
        return self.to_html()

    def __repr__(self) -> str:
        rows = int(self.real.sum())
        fitted = "fitted" if self.standard else "not fitted"
        means = ", ".join(
            f"{name} {float(x[self.real & x.isfinite()].mean()):.3g}"
            for name in ("entropy", "surprise", "log_variance")
            if bool((self.real & (x := getattr(self, name)).isfinite()).any())
        )
        return f"TokenUncertainty of {len(self)} texts, {rows} tokens ({fitted}): mean {means}"

    def to_frame(self) -> "DataFrame":
        """A table of pandas with a line for each real row.

        Returns:
            Columns item, position, token, next, and all available scores.

        Raises:
            ImportError: pandas is not installed.
        """
        item, row = self.real.nonzero().unbind(-1)
        made: dict[str, Any] = {"item": item.tolist(), "position": self.positions[item, row].tolist()}
        for name, pieces in (("token", self.pieces()), ("next", self.next_pieces())):
            made[name] = [pieces[b][n] for b, n in zip(item.tolist(), row.tolist(), strict=True)]
        for name, found in self.known().items():
            made[name] = found[item, row].tolist()
        for name, found in (self.standard or {}).items():
            made[f"{name} standardised"] = found[item, row].tolist()
        return make_frame(made)

    def known(self) -> dict[str, Tensor]:
        """All available scores, not standardised, and the p-value.

        Returns:
            [B, N] by name.
        """
        names = [name for name in (*SCORES, "p_value") if name != "combined"]
        found = {name: x for name in names if (x := getattr(self, name)) is not None}
        return {**found, "combined": self._combined()} if self.standard else found

    def _title(self, by: Score) -> str:
        shown = by.replace("_", " ")
        whose = "of the token that follows" if by in OF_PREDICTION else "of the token read"
        how = "deviations from what is usual there" if self.standard else "ranks within the text"
        shown = "strangeness and surprise together" if by == "combined" else shown
        return f"{shown} {whose}, in {how}"

    def _painted(self, by: Score) -> list[Painted]:
        check_choice("by", by, SCORES)
        values = self.score(by, standardised=bool(self.standard))
        return [self._line(by, values, item) for item in range(len(self))]

    def _line(self, by: Score, values: Tensor, item: int) -> Painted:
        """The first token, then those that follow."""
        rows = self.real[item].nonzero()[:, 0]
        ids, later = self.ids[item, rows].tolist(), self.next_ids[item, rows].tolist()
        levels = levels_of(values[item, rows].double().cpu(), standardised=bool(self.standard))
        notes = [self._note(item, int(row)) for row in rows]
        tail = [later[-1]] if later and later[-1] >= 0 else []
        pieces = pieces_of(self.tokenizer, [*ids, *tail])
        if by in OF_PREDICTION:
            levels, notes = [None, *levels[: len(pieces) - 1]], ["", *notes[: len(pieces) - 1]]
        else:
            levels, notes = [*levels, *[None for _ in tail]], [*notes, *["" for _ in tail]]
        return Painted(pieces, levels, notes)

    def _note(self, item: int, row: int) -> str:
        return ", ".join(f"{n.replace('_', ' ')} {float(x[item, row]):.3g}" for n, x in self.known().items())


@dataclass(frozen=True)
class Span:
    """Tokens of a text that are flagged together.

    Attributes:
        item: which text.
        start: its first row.
        stop: the row after its last one.
        score: the largest mean of the score over a window inside, in deviations.
        text: of the tokens, or ids without a tokenizer.
    """

    item: int
    start: int
    stop: int
    score: float
    text: str


def spans_of(flagged: Tensor, scores: Tensor, texts: Sequence[Sequence[str]]) -> list[Span]:
    """Runs of flagged rows.

    Args:
        flagged: [B, N] of bool.
        scores: [B, N], whose largest is the span's.
        texts: pieces of every text, [B, N] of them.

    Returns:
        All runs, text by text.
    """
    found = []
    for item, line in enumerate(flagged.tolist()):
        start = None
        for row, marked in enumerate([*line, False]):
            if marked and start is None:
                start = row
            elif not marked and start is not None:
                score = float(scores[item, start:row].max())
                found.append(Span(item, start, row, score, "".join(texts[item][start:row])))
                start = None
    return found
