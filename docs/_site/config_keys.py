"""The table of config keys, from the schema."""

from __future__ import annotations

from itertools import groupby

from colonnade.config.settings import REFUSED, Key, all_keys


def markdown() -> str:
    """One table for each top-level key that has keys of its own, and one for the rest."""
    sections = {name: list(keys) for name, keys in groupby(all_keys(), lambda key: key.path.split(".")[0].strip("[]"))}
    single = [keys[0] for keys in sections.values() if len(keys) == 1]
    lines = []
    for name, keys in sections.items():
        if len(keys) > 1:
            lines += [f"## {name}", "", *_table(keys), ""]
    lines += ["## Other keys", "", *_table(single), ""]
    lines += ["## Keys of other frameworks that raise an error", "", "| key | message |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(said)} |" for name, said in REFUSED.items()]
    return "\n".join(lines) + "\n"


def _table(keys: list[Key]) -> list[str]:
    rows = [
        f"| `{key.path}`{' (required)' if key.required else ''} | {_cell(key.means)} | "
        f"{f'`{key.default}`' if key.default else ''} | {_cell(key.allows)} |"
        for key in keys
    ]
    return ["| key | meaning | default | allowed values |", "|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
