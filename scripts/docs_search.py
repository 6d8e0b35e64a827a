"""A hook of mkdocs: the source code below an entry of the API reference is shown, and not searched."""

from typing import Any

SOURCE = '<details class="mkdocstrings-source">'


def on_page_content(content: str, **kwargs: Any) -> str:
    """Called by mkdocs with the HTML of every page."""
    return content.replace(SOURCE, SOURCE.replace(">", " data-search-exclude>"))
