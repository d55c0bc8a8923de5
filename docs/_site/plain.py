"""For programs that read: a plain `.md` of each page beside its html, `llms.txt`, and a list of the versions."""

from __future__ import annotations

import html
import re
from pathlib import Path

import generated
from sphinx.application import Sphinx

_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FENCES = re.compile(r"^:::+.*\n", re.MULTILINE)
_TOCTREE = re.compile(r"^```\{toctree\}\n.*?^```\n", re.MULTILINE | re.DOTALL)
_RANKS = re.compile(r"^<!-- ranks: \d+ -->\n", re.MULTILINE)


def write(app: Sphinx) -> None:
    """Write all of them into the folder of this version, and the list of versions above it."""
    out = Path(app.outdir)
    for page in sorted(app.env.found_docs):
        text = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
        target = out / f"{page}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(copy_of(text), encoding="utf-8")
    (out / "llms.txt").write_text(_index(app), encoding="utf-8")
    (out.parent / "index.html").write_text(_versions(out.parent), encoding="utf-8")


def copy_of(text: str) -> str:
    """The page without what only Sphinx reads."""
    for pattern in (_TOCTREE, _FENCES, _RANKS):
        text = pattern.sub("", text)
    return generated.filled(text, plain=True)


def _index(app: Sphinx) -> str:
    """`llms.txt`: every page by section, with its first sentence."""
    lines = [f"# Colonnade {app.config.release}", "", f"> {_first_sentence(app, 'index')}", ""]
    for section in app.env.toctree_includes.get("index", []):
        lines += [f"## {app.env.titles[section].astext()}", "", _line(app, section)]
        lines += [_line(app, page) for page in _below(app, section)] + [""]
    return "\n".join(lines)


def _below(app: Sphinx, page: str) -> list[str]:
    return [each for child in app.env.toctree_includes.get(page, []) for each in (child, *_below(app, child))]


def _line(app: Sphinx, page: str) -> str:
    return f"- [{app.env.titles[page].astext()}]({page}.md): {_first_sentence(app, page)}"


def _first_sentence(app: Sphinx, page: str) -> str:
    """The first sentence of prose."""
    text = _CODE.sub("", copy_of(Path(app.env.doc2path(page)).read_text(encoding="utf-8")))
    for block in text.split("\n\n"):
        if block.strip() and block.strip()[0] not in "#|<-:>!(":
            prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=[.?]) ", prose.replace("**", ""))[0]
    return ""


def _versions(folder: Path) -> str:
    """A page with a link to every version that was built here; the newest first."""
    found = sorted((each.name for each in folder.iterdir() if (each / "index.html").exists()), key=_as_numbers)[::-1]
    links = "".join(
        f'<li><a href="{html.escape(name)}/index.html">Colonnade {html.escape(name)}</a></li>' for name in found
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Colonnade: versions</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><style>:root{color-scheme:light dark}'
        "body{font:1.1rem/1.6 system-ui,sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem}</style></head>"
        f"<body><main><h1>Colonnade</h1><ul>{links}</ul></main></body></html>\n"
    )


def _as_numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
