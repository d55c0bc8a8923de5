"""`python -m colonnade.cli` runs the `colonnade` command where its script is not on the path."""

from __future__ import annotations

from colonnade.cli import main

if __name__ == "__main__":
    main()
