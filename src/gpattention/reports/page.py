"""A whole report: one HTML file with everything in it."""

from base64 import b64encode
from collections.abc import Collection, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from gpattention.checks import did_you_mean
from gpattention.files import StrPath, make_folder, write_atomically
from gpattention.reports.comparison import compare, listed
from gpattention.reports.html import environment
from gpattention.reports.sections import SECTIONS
from gpattention.reports.sections.summary import summary_data
from gpattention.reports.style import theme_css
from gpattention.runs import RunData, read_runs


def build_report(runs: Sequence[RunData], title: str | None = None, *, without: Collection[str] = ()) -> str:
    """The page that shows these runs; the same runs give the same page.

    Runs that differ in nothing but name and seed are one model with a mean and a standard error; each
    data set is compared by itself.  There is no gallery where evaluations kept no items for it.

    Args:
        runs: in the order in which the models should appear.
        title: title of the page; made of the data sets if not given.
        without: names of sections to leave out, e.g. "gallery".

    Returns:
        The HTML text.

    Raises:
        ValueError: if there are no runs, or `without` names an unknown section.
    """
    if not runs:
        raise ValueError("expected runs to report on, got none")
    known = [section.name for section in SECTIONS]
    for name in without:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"expected without to name sections ({', '.join(known)}), got {name!r}{hint}")
    comparisons = compare(runs)
    sections = []
    for section in SECTIONS:
        filled = [(i, c) for i, c in enumerate(comparisons) if section.fills(c)]
        if filled and section.name not in without:
            sections.append((section, [(c.data, section.show(c, f"{section.name}-{i}")) for i, c in filled]))
    from markupsafe import Markup

    script, style = (_file(name) for name in ("page.js", "page.css"))
    # the policy names the one script by its hash, so that none that slips in with a run's text can run
    digest = b64encode(sha256(script.encode()).digest()).decode()
    models = sum(len(c.models) for c in comparisons)
    data = listed([c.data for c in comparisons])
    return environment().get_template("page.html").render(
        title=title or f"Report: {data}",
        # no address may be fetched; only the script of this page may run
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=Markup(theme_css() + style),
        script=Markup(script),
        counts=f"{_count(models, 'model')} in {_count(len(runs), 'run')} on {data}",
        sections=sections,
        several=len(comparisons) > 1,
        summary=[summary_data(comparison) for comparison in comparisons],
    )  # fmt: skip


def _file(name: str) -> str:
    return (files("gpattention.reports") / "templates" / name).read_text(encoding="utf-8")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def write_report(folders: Sequence[StrPath], output: StrPath, *, title: str | None = None) -> Path:
    """Read runs and write the page that compares them.

    A run needs no more than its `recipe.json`: what was not trained or evaluated yet is said on the page.

    Args:
        folders: folders of runs, or folders that hold runs; a run given twice counts once.
        output: the HTML file; its folder is made if need be.
        title: title of the page; made of the data sets if not given.

    Returns:
        The file.

    Raises:
        FileNotFoundError: a folder holds no run.
        IsADirectoryError: `output` is a folder.
        ValueError: a run's file is damaged.
    """
    output = Path(output)
    if output.is_dir():
        raise IsADirectoryError(f"expected output (-o) to be a file, got the folder {output}")
    page = build_report(read_runs(folders), title)
    make_folder(output.parent)
    # half a character of a broken text is no reason to fail
    write_atomically(output, page.encode(errors="replace"))
    return output
