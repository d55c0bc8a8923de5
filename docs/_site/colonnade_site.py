"""The Sphinx extension of this site: generated parts of pages, tables of the pieces, docstrings, plain copies."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any
from zlib import crc32

import aliases
import docstrings
import generated
import plain
import tables
from sphinx.addnodes import toctree
from sphinx.application import Sphinx

VERSION = crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()))
"""Sphinx reads pages again if code of this folder has changed, although their own text has not."""


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect each of them to its moment of a build."""
    app.connect("source-read", _fill)
    # Before napoleon (priority 500), which reads the sections of the docstring.
    app.connect("autodoc-process-docstring", docstrings.as_restructured_text, priority=400)
    app.connect("autodoc-skip-member", docstrings.is_left_out)
    app.connect("html-page-context", _say_levels)
    # After the theme (priority 500), which makes the tree.
    app.connect("html-page-context", _caption_sidebar, priority=900)
    app.connect("build-finished", _after)
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": VERSION}


def _fill(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = aliases.with_entries(page, generated.filled(source[0]))


def _say_levels(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Captions of tables of contents are headings, whose level Sphinx leaves out; names of arguments end with a colon."""
    body = context.get("body", "").replace('role="heading">', 'role="heading" aria-level="2">')
    context["body"] = re.sub(r"(</strong>(?: \([^)]*\))?|</a>|</code>) -- ", r"\1: ", body)


def _caption_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """The sidebar shows the captions of an index page above the first page of each."""
    tree = context.get("furo_navigation_tree") or ""
    for section in app.env.toctree_includes.get("index", []):
        for each in app.env.tocs[section].findall(toctree):
            if each["caption"]:
                first = each["entries"][0][1]
                link = app.builder.get_relative_uri(page, first) if first != page else "#"
                item = rf'<li class="toctree-l2[^"]*"><a [^>]*href="{re.escape(link)}"'
                tree = re.sub(
                    item, lambda found, name=each["caption"]: f'<li class="group">{escape(name)}</li>{found[0]}', tree
                )
    context["furo_navigation_tree"] = tree


def _after(app: Sphinx, failure: Exception | None) -> None:
    if failure is None and app.builder.format == "html":
        tables.write(Path(app.outdir) / "_static")
        plain.write(app)
