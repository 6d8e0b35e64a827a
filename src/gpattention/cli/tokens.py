"""`gpattention tokens`."""

import sys
from json import dumps
from math import isfinite
from pathlib import Path
from typing import Annotated, Any
from warnings import filterwarnings

import typer

from gpattention.cli.console import say
from gpattention.cli.main import App
from gpattention.cli.options import Device, Json
from gpattention.files import write_atomically
from gpattention.hosts import Handle, Span, TokenUncertainty, attach, load_language_model
from gpattention.hosts.tokens import AFTER, check_score
from gpattention.numerics import choose_device

app = App()


@app.command("tokens")
def tokens(
    model: str,
    text: str,
    by: str | None = None,
    held_out: str | None = None,
    fitted: str | None = None,
    rate: float = 0.01,
    more: Annotated[int, typer.Option("--continue", metavar="N")] = 0,
    seed: int | None = None,
    json: Json = False,
    html: str | None = None,
    device: Device = "auto",
) -> None:
    """Show what a language model knows of every token of a text.

    Options:
        model (MODEL): folder of a model and its tokenizer, or a GGUF file.
        text (TEXT): the text, or - for standard input.
        by (SCORE): what the colours say: entropy, top_probability, margin, surprise, log_variance, log_pivot,
            strangeness or combined; surprise if not given, combined where usual texts are known.
        held_out (FILE): usual texts, one a line, that the scores are compared with.
        fitted (FOLDER): what is usual, as handle.save wrote it; with --held-out it is written there.
        rate: share of usual tokens that are flagged all the same.
        more: tokens to continue the text with.
        seed: seed of tokens chosen at random; without one the likeliest is chosen.
        html (FILE): write a page instead.

    Examples:
      gpattention tokens smollm2/ "The capital of France is Madrid."    coloured in a terminal
      gpattention tokens model.gguf "Once upon a time" --continue 40    and of what the model writes
      gpattention tokens smollm2/ - --held-out reviews.txt --fitted usual/ --by strangeness
      gpattention tokens smollm2/ "Bonjour" --fitted usual/ --html strange.html
      gpattention tokens smollm2/ "The cat sat." --json                 all scores of all tokens

    entropy, top probability, margin and surprise colour the token that they predict, the others the one that
    is read.  Without --held-out or --fitted colours are ranks within the text, and nothing is flagged.
    """
    score = None if by is None else check_score("--by", by)
    whole = sys.stdin.read() if text == "-" else text
    host, tokenizer = load_language_model(model, device=choose_device(device))
    handle = attach(host, tokenizer)
    _know(handle, held_out, fitted)
    filterwarnings("ignore", "log variances of a handle that was not fitted")  # the help says it
    found = handle.token_uncertainty(whole)
    if more:
        options: dict[str, Any] = {} if seed is None else {"do_sample": True, "seed": seed}
        steps = TokenUncertainty.join(handle.generate(whole, more, **options))
        # the last row of the text is the first of what follows it
        found = TokenUncertainty.join([found[:, :-1], steps]) if found.ids.shape[1] > 1 else steps
    found = found.cpu()
    spans = handle.flag_spans(found, rate, by=score or AFTER) if found.standard else []
    if json:
        print(dumps(_document(model, found, spans), indent=2))
        return
    if html is not None:
        body = found.to_html(score)
        page = f'<!doctype html><meta charset="utf-8"><title>{score or "tokens"}</title><body>{body}</body>\n'
        write_atomically(Path(html), page.encode())
        say(f"wrote {html}", error=True)
        return
    found.show(score)
    for span in spans:
        say(f"flagged, {span.score:.1f} deviations: {span.text}")


def _know(handle: Handle, held_out: str | None, fitted: str | None) -> None:
    """Fit to usual texts, or load what an earlier call has fitted."""
    if held_out is not None:
        lines = Path(held_out).read_text(encoding="utf-8").splitlines()
        handle.fit([line for line in lines if line.strip()], levels=())
        if fitted is not None:
            handle.save(fitted)
    elif fitted is not None:
        handle.load(fitted)


def _document(model: str, found: TokenUncertainty, spans: list[Span]) -> dict[str, Any]:
    """The JSON document, with null for unknown values."""
    known, rows = found.known(), []
    (pieces,), (later,) = found.pieces(), found.next_pieces()
    for n in found.real[0].nonzero()[:, 0].tolist():
        numbers = {name: float(x[0, n]) for name, x in known.items()}
        shown = {name: x if isfinite(x) else None for name, x in numbers.items()}
        rows.append({"token": pieces[n], "next": later[n] or None, **shown})
    return {"model": model, "tokens": rows, "flagged": [vars(span) for span in spans]}
