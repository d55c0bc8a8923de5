"""Pages for the codes at the end of error messages, read from `errors.toml` in this folder.

`colonnade explain C040` prints a page; `python -m colonnade.error_pages docs/reference/errors.md` writes all of them.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import did_you_mean


@dataclass(frozen=True)
class ErrorPage:
    """The page of one error code."""

    title: str
    means: str
    do: str
    more: str = ""
    """A page below docs/, without its suffix."""

    def text(self, code: str, width: int = 0) -> str:
        """The text of the page as `colonnade explain` prints it, wrapped at `width` columns; with width 0 not wrapped."""
        more = [f"More: docs/{self.more}.md in the source tree"] if self.more else []
        parts = [f"{code}: {self.title}", self.means, f"What to do: {self.do}", *more]
        return "\n\n".join(textwrap.fill(part, width, break_on_hyphens=False) if width else part for part in parts)


def _read() -> dict[str, ErrorPage]:
    """The pages by code. A line break inside a text of the file counts as a space."""
    entries = tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))
    return {
        code: ErrorPage(**{name: text.replace("\n", " ") for name, text in entry.items()})
        for code, entry in entries.items()
    }


PAGES = _read()


def find(code: str) -> ErrorPage | None:
    """The page of a code, in upper or lower case; None if the code does not exist."""
    return PAGES.get(code.upper())


def unknown(code: str) -> str:
    """The error message for a code that does not exist."""
    first, last = min(PAGES), max(PAGES)
    return (
        f"there is no error code {code!r}.{did_you_mean(code, PAGES)} The {len(PAGES)} codes are between {first} and {last}; "
        f"docs/reference/errors.md lists them"
    )


def codes_in(text: str) -> list[str]:
    """The known codes in a message, including those of messages that are quoted inside it."""
    return [code for code in re.findall(r"\[(C\d{3})\]", text) if code in PAGES]


def document() -> str:
    """Generate the text of docs/reference/errors.md."""
    head = (
        "# Error codes\n\n"
        "Error messages end in a code, such as `[C040]`. `colonnade explain C040` prints the entry of this page. "
        "All these errors are subclasses of `colonnade.errors.ColonnadeError`, with the code in `error.code`.\n"
        "`python -m colonnade.error_pages docs/reference/errors.md` generates this page.\n"
    )
    parts = [head]
    for code, page in PAGES.items():
        more = f" More: [{page.more}](../{page.more}.md)." if page.more else ""
        parts.append(f"## {code}: {page.title}\n\n{page.means}\n\n**What to do.** {page.do}{more}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
