"""Write the page of a release: changes, installation, the benchmark tables, links to the evidence.

python tools/release_page.py [VERSION]        # of what is in the changelog and in docs/evidence/speed.md; "Unreleased" is a version too
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def page(version: str) -> str:
    """The text of the release, in Markdown."""
    return f"""# Colonnade {version}

Multi-dimensional parallel training for PyTorch, checked against a single-process run.

```sh
pip install colonnade{"" if version == "Unreleased" else f"=={version}"}
colonnade doctor     # what this machine can do
colonnade demo       # a small GPT on 4 ranks of it
```

## What changed

{changes(version)}

## Speed

Each ratio is the time of Colonnade divided by the time of the alternative; below 1.00, Colonnade is faster. [How it was measured](docs/evidence/speed.md).

{table()}

## Evidence

[Layouts compared with a single-process run](docs/evidence/grid.md) · [bugs of other systems that `verify` detects](docs/evidence/bugs.md) · [Hugging Face models](docs/evidence/models.md) · `make release-check`
"""


def changes(version: str) -> str:
    """The section of the changelog, with its headings one level down."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"(?ms)^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", text))
    if version not in sections:
        sys.exit(f"CHANGELOG.md has no {version}; it has {', '.join(sections)}")
    return sections[version].strip()


def table() -> str:
    """The tables of docs/evidence/speed.md, each with its heading one level down."""
    lines = (ROOT / "docs/evidence/speed.md").read_text(encoding="utf-8").splitlines()
    kept = [f"\n#{line}\n" if line.startswith("## ") else line for line in lines if line.startswith(("|", "## "))]
    return "\n".join(kept).strip()


if __name__ == "__main__":
    print(page(sys.argv[1] if len(sys.argv) > 1 else "Unreleased"))
