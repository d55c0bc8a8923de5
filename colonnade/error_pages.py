"""The meaning of the codes at the end of error messages. The texts are in `errors.toml`, beside this file.

`colonnade explain C040` prints a page; `python -m colonnade.error_pages docs/reference/errors.md` writes all of them.
"""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import did_you_mean


@dataclass(frozen=True)
class ErrorPage:
    """One family of errors."""

    title: str
    means: str
    do: str
    more: str = ""
    """A page of the documents, without its ending."""

    def text(self, code: str) -> str:
        """As `colonnade explain` prints it."""
        more = f"\n\nMore, in the documents: {self.more}" if self.more else ""
        return f"{code}: {self.title}\n\n{self.means}\n\nWhat to do: {self.do}{more}"


def _read() -> dict[str, ErrorPage]:
    """The pages by code. A line break in a text of the file is a blank."""
    entries = tomllib.loads(Path(__file__).with_name("errors.toml").read_text(encoding="utf-8"))
    return {
        code: ErrorPage(**{name: text.replace("\n", " ") for name, text in entry.items()})
        for code, entry in entries.items()
    }


PAGES = _read()


def find(code: str) -> ErrorPage | None:
    """The page of a code, in any case of letters."""
    return PAGES.get(code.upper())


def unknown(code: str) -> str:
    """The message about a code that does not exist."""
    return f"there is no code {code!r}.{did_you_mean(code, PAGES)} The codes are {', '.join(PAGES)}"


def codes_in(text: str) -> list[str]:
    """The codes that a message ends with, or holds at the ends of messages inside it."""
    return [code for code in re.findall(r"\[(C\d{3})\]", text) if code in PAGES]


def document() -> str:
    """The text of docs/reference/errors.md."""
    head = (
        "# Error codes\n\n"
        "Errors that users meet end in a code, such as `[C040]`. `colonnade explain C040` prints its page from here. "
        "All are subclasses of `colonnade.errors.ColonnadeError`, and have it as `error.code`.\n"
        "This page is written by `python -m colonnade.error_pages docs/reference/errors.md`.\n"
    )
    parts = [head]
    for code, page in PAGES.items():
        more = f" More: [{page.more}](../{page.more}.md)." if page.more else ""
        parts.append(f"## {code}: {page.title}\n\n{page.means}\n\n**What to do.** {page.do}{more}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
