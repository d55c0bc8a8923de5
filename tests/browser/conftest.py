"""One headless Chromium for all tests of a session, and axe-core, fetched once by npm and not committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXE = "axe-core@4.10.3"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: make docs installs it")
    binary = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        pytest.skip("no Chromium here: apt-get install chromium, or CHROMIUM=path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which looks for what keeps people out of a page."""
    folder = ROOT / "build" / "axe"
    script = folder / "package" / "axe.min.js"
    if not script.exists():
        if shutil.which("npm") is None:
            pytest.skip("no npm here to fetch axe-core with: apt-get install npm")
        folder.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            ["npm", "pack", "--silent", AXE], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.split()[-1]
        with tarfile.open(folder / packed) as archive:
            archive.extract("package/axe.min.js", folder, filter="data")
    return script.read_text(encoding="utf-8")
