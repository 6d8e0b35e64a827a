"""A headless Chromium, if there is one: `make browser` installs it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: `make browser` installs it")
    with api.sync_playwright() as playwright:
        found = (
            os.environ.get("GPATTENTION_BROWSER"),
            *map(shutil.which, NAMES),
            playwright.chromium.executable_path,
        )
        path = next((each for each in found if each and Path(each).is_file()), None)
        if path is None:
            pytest.skip("no Chromium on this machine: `make browser` installs it, or set GPATTENTION_BROWSER")
        # a container's root may not use the sandbox; the pages are our own
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def screenshots() -> Path | None:
    """Where to leave pictures; none are taken without GPATTENTION_SCREENSHOTS."""
    folder = os.environ.get("GPATTENTION_SCREENSHOTS")
    if not folder:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)
