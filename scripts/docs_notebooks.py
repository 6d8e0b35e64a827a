"""Notebooks as pages: `docs/notebooks/NAME.ipynb` is `notebooks/NAME.md` of the site, with its kept outputs.

A hook of mkdocs; `tests/test_docs.py` and `scripts/refresh_tutorials.py` read notebooks by the same words.
Lines of the notebook's own metadata under "tests" become comments `<!-- tests: ... -->`.
"""

import json
import re
from pathlib import Path
from typing import Any

STYLE = re.compile(r"<style scoped>.*?</style>", re.S)  # of pandas; the site has its own for tables
LINK = re.compile(r"(\]\((?:[\w./-]+/)?[\w-]+)\.ipynb(#[\w-]+)?\)")


def as_markdown(notebook: dict[str, Any]) -> str:
    """Text, code and what it printed; tables and coloured texts as HTML, pictures within the page.

    Args:
        notebook: what the file holds, as JSON.

    Returns:
        The page.
    """
    orders = notebook["metadata"].get("tests", [])
    parts = [f"<!-- tests: {order} -->" for order in orders]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts.extend(_shown(output) for output in cell["outputs"])
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """One output of a cell: what printing gave is words, what a display gave the richest form there is."""
    if output["output_type"] == "stream":
        return f"```output\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        plain = STYLE.sub("", "".join(data["text/html"])).replace(' border="1" class="dataframe"', "")
        lines = plain.splitlines()
        return "<div>" + "\n".join(line for line in lines if line.strip()) + "</div>"
    return f"```text\n{''.join(data.get('text/plain', '')).rstrip()}\n```"


def on_files(files: Any, config: Any, **kwargs: Any) -> Any:
    """Called by mkdocs with all files: every notebook becomes a page."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            page = as_markdown(json.loads(Path(file.abs_src_path).read_text()))
            files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=page))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Called by mkdocs with every page: links to notebooks, which GitHub shows, lead to their pages."""
    return LINK.sub(r"\1.md\2)", markdown)
