"""`colonnade explain`: what a config makes of every parameter, and what a factor in a gradient can mean. Starts no process."""

from __future__ import annotations

import json
import re
import shutil
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.proof.explain import Explanation, ParameterClass
    from colonnade.proof.ratio import Meaning


class Of(StrEnum):
    """What is off by a factor."""

    gradient = "gradient"
    norm = "norm"


def explain(
    config: Annotated[Path, typer.Argument(help="The config, a .py or .toml file; or the code of an error, as C040.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="MODULE:FUNCTION or FILE.py:FUNCTION that returns the model, or what colonnade.split returns. It may take "
            "`config` and `context`. Built on the meta device. A function `optimizer` beside it is used too."
        ),
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="How many ranks; else the least that the config fits.")] = None,
    param: Annotated[str | None, typer.Option(help="Only parameters of these names, as a pattern: '*.bias'.")] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Which bug is this: a gradient (or norm) is so many times what it should be.")
    ] = None,
    of: Annotated[Of, typer.Option(help="--ratio: of what.")] = Of.gradient,
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="Modules of yours to import first: modes, handlers.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of words and a table.")] = False,
) -> None:
    """Say of every class of parameters where it lies, what is summed over which ranks, by whom, divided by what, and why.

    Without --model: of one parameter of each kind of placement. With --ratio: what a factor in a gradient or a norm
    can mean in this layout, best guess first. Exit code 1 if `initialize` would refuse the config.
    With the code of an error: what it means and what to do.
    """
    if re.fullmatch(r"[Cc]\d+", str(config)):
        typer.echo(_page(str(config)))
        return
    from colonnade.config import least_world, load_config
    from colonnade.proof.user_functions import function_named, import_named

    for name in imports or ():
        import_named(name, config.parent)
    build = function_named(model, config.parent, "--model") if model is not None else None
    beside = vars(import_named(model.rpartition(":")[0], config.parent)) if model is not None else {}
    optimizer = beside.get("optimizer") if callable(beside.get("optimizer")) else None
    loaded = load_config(config)
    count = world_size if world_size is not None else least_world(loaded)
    if ratio is not None:
        from colonnade.proof.ratio import meanings

        found, near = meanings(loaded, count, ratio, of.value)
        typer.echo(
            json.dumps(
                {"ratio": ratio, "of": of.value, "world_size": count, "meanings": _rows(found), "nearest": _rows(near)}
            )
            if as_json
            else _ratio_text(ratio, of.value, count, found, near)
        )
        return
    from colonnade.proof.explain import explain as explain_config

    explained = explain_config(loaded, count, build, param, optimizer=optimizer)
    if as_json:
        typer.echo(json.dumps(explained.to_dict()))
    else:
        _show(explained, named=build is not None)
    if explained.problems:
        raise typer.Exit(1)


def _page(code: str) -> str:
    from colonnade.error_pages import find, unknown

    page = find(code)
    if page is None:
        raise ConfigError(unknown(code))
    return page.text(code.upper(), width=min(shutil.get_terminal_size().columns, 100))


# -- for people -------------------------------------------------------------------------------------------


def _show(explained: Explanation, named: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    axes = " x ".join(f"{name} {size}" for name, size in explained.axes.items()) or "no parallelism"
    console.print(f"[bold]{explained.world_size} ranks: {axes}[/bold]")
    for mode, groups in explained.modes.items():
        console.print(f"  {mode:<28}{groups}", markup=False, soft_wrap=True)
    for note in explained.notes:
        console.print(f"- {note}", markup=False)
    if not named:
        console.print("\nNo --model was given; these are one parameter of each kind of placement:", markup=False)
    console.print()
    console.print(_table(explained))
    for number, one in enumerate(explained.classes, 1):
        console.print()
        for line in _words(number, one, pipeline="pipeline" in explained.axes):
            console.print(line, markup=False, soft_wrap=True)
    for problem in explained.problems:
        console.print(f"\ninitialize() would refuse this: {problem}", markup=False, style="red", soft_wrap=True)


def _table(explained: Explanation) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("", "parameters", "n", "over", "divided by", "done by", "norm", "written by"):
        table.add_column(head, overflow="fold")
    for number, one in enumerate(explained.classes, 1):
        sums = one.sums or (None,)
        table.add_row(
            str(number),
            "\n".join(_names(one, 3)),
            str(sum(one.names.values())),
            "\n".join("-" if each is None else each.mode for each in sums),
            "\n".join("-" if each is None else f"{each.divisor:g}" for each in sums),
            "\n".join("-" if each is None else each.handler for each in sums),
            f"1/{one.share}",
            _few(one.writers),
        )
    return table


def _words(number: int, one: ParameterClass, pipeline: bool) -> list[str]:
    from colonnade.proof.explain import groups_text

    stages = f", at stage {', '.join(map(str, one.stages))}" if pipeline else ""
    frozen = ", frozen" if one.frozen else ""
    lines = [
        f"{number}. {', '.join(_names(one, 8))}: {one.elements:,} elements on a rank of each stage{stages}{frozen}"
    ]
    if not pipeline:
        lines[0] = lines[0].replace(" on a rank of each stage", " on a rank")
    lines.append(f"   lies       {'; '.join(one.lies) or 'whole, on one rank'}")
    for each in one.sums:
        kind = (
            f"summed over {each.mode} {groups_text(each.groups)}" if len(each.groups[0]) > 1 else "summed with nobody"
        )
        divided = each.why_divided if each.divisor == 1 else f"divided by {each.divisor:g}: {each.why_divided}"
        lines.append(f"   gradient   {kind}, {divided}")
        lines.append(f"              by {each.handler}: {each.why_handled}")
    if not one.sums:
        lines.append("   gradient   owes nothing: it is final as backward leaves it")
    same = f"held alike by {groups_text(one.holders)}" if one.share > 1 else "held by one rank each"
    lines.append(f"   norm       each rank counts 1/{one.share} of its squares; {same}")
    lines.append(f"   start      {'these ranks must start equal' if one.share > 1 else 'nobody must start equal'}")
    lines.append(f"   checkpoint keeps {one.kept}; the first holder of each part writes it: {_few(one.writers)}")
    return lines


def _names(one: ParameterClass, shown: int) -> list[str]:
    names = [f"{name} ({count})" if count > 1 else name for name, count in one.names.items()]
    return names[:shown] + ([f"... {len(names) - shown} more"] if len(names) > shown else [])


def _few(ranks: tuple[int, ...]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (f" ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"rank {text}"


def _rows(found: list[Meaning]) -> list[dict[str, Any]]:
    return [meaning._asdict() for meaning in found]


def _ratio_text(ratio: float, of: str, count: int, found: list[Meaning], near: list[Meaning]) -> str:
    lines = [f"A {of} that is {ratio:g} times what it should be, on {count} ranks of this config:"]
    for number, one in enumerate(found, 1):
        lines.append(f"{number:2}. {one.cause} (x {one.value:.4g} = {one.made_of}): {one.sentence}")
    if not found:
        lines.append("nothing that this layout can make has that value. The nearest:")
        lines += [f" -  {one.cause} (x {one.value:.4g} = {one.made_of}): {one.sentence}" for one in near]
    return "\n".join(lines)
