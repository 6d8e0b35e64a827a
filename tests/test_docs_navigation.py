"""The site's navigation: every page is in it once, and it names no page that is not there."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_navigation_has_every_page_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    navigation = settings[settings.index("\nnav:") : settings.index("\nmarkdown_extensions:")]
    named = Counter(re.findall(r"([\w/-]+\.md)$", navigation, re.M))
    docs = ROOT / "docs"
    notebooks = [page.with_suffix(".md") for page in docs.rglob("*.ipynb")]  # made by a hook
    pages = {page.relative_to(docs).as_posix() for page in [*docs.rglob("*.md"), *notebooks]}
    assert sorted(pages - set(named)) == []
    assert sorted(set(named) - pages) == []
    assert [page for page, count in named.items() if count > 1] == []


def test_the_site_fetches_nothing_from_elsewhere() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert not re.search(r"https?://", settings)
