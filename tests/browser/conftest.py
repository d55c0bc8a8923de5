"""axe-core, fetched once by npm and not committed."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AXE = "axe-core@4.10.3"


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
