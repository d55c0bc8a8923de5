"""`colonnade explain`: sharding and reductions of every parameter, the causes of a wrong factor, the page of an error code.

Starts no process.
"""

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
    """The quantity that is wrong by a factor."""

    gradient = "gradient"
    norm = "norm"


def explain(
    config: Annotated[Path, typer.Argument(help="Config file, .py or .toml; or an error code such as C040.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function (or FILE.py:FUNCTION) that returns the model or the result of colonnade.split. It may have the "
            "parameters `config` and `context`, and runs on the meta device. A function `optimizer` in the same module is "
            "used too.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of ranks. Default: the fewest that fit the config."),
    ] = None,
    param: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only parameters whose names match, such as '*.bias'.")
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR", help="List possible causes of a gradient (or norm) that is wrong by this factor."
        ),
    ] = None,
    of: Annotated[Of, typer.Option(help="With --ratio: the wrong quantity.")] = Of.gradient,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import your module first (modes, handlers). May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show how each parameter is sharded and how its gradient is reduced; or explain an error code.

    Without --model, one example parameter is shown for each kind of placement. With --ratio, the possible causes of a wrong
    factor in a gradient or norm are listed, the most likely first. With an error code, its meaning and the next step are
    printed.

    Exit code 1 if `initialize` would reject the config.
    """
    if re.fullmatch(r"[Cc]\d+", str(config)):
        typer.echo(_page(str(config)))
        return
    from colonnade.config import least_world, load_config
    from colonnade.proof.user_functions import function_named, import_named

    for name in imports or ():
        import_named(name, config.parent)
    build = function_named(model, config.parent, "--model") if model is not None else None
    module = vars(import_named(model.rpartition(":")[0], config.parent)) if model is not None else {}
    optimizer = module.get("optimizer") if callable(module.get("optimizer")) else None
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
            else _meanings_text(ratio, of.value, count, found, near)
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


# --- Text output ---


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
        console.print("\nWithout --model, these are example parameters, one for each kind of placement:", markup=False)
    console.print()
    console.print(_table(explained, console.width))
    for number, parameters in enumerate(explained.classes, 1):
        console.print()
        for line in _description(number, parameters, pipeline="pipeline" in explained.axes):
            console.print(line, markup=False, soft_wrap=True)
    for problem in explained.problems:
        console.print(f"\ninitialize() would reject this: {problem}", markup=False, style="red", soft_wrap=True)


def _table(explained: Explanation, width: int) -> Any:
    from colonnade.cli.tables import fitted_table

    rows = []
    for number, parameters in enumerate(explained.classes, 1):
        sums = parameters.sums
        rows.append(
            (
                str(number),
                "\n".join(_names(parameters, 3)),
                str(sum(parameters.names.values())),
                "\n".join(reduction.mode for reduction in sums) or "-",
                "\n".join(f"{reduction.divisor:g}" for reduction in sums) or "-",
                "\n".join(reduction.handler.removesuffix("GradientHandler") for reduction in sums) or "-",
                f"1/{parameters.share}",
                _few(parameters.writers),
            )
        )
    heads = ("", "parameters", "n", "reduced over", "divisor", "handler", "norm", "saved by")
    return fitted_table(heads, rows, width)


def _description(number: int, parameters: ParameterClass, pipeline: bool) -> list[str]:
    """The paragraph of one class of parameters: placement, reductions, norm, initial values, checkpoint."""
    from colonnade.proof.explain import groups_text

    where = f"a rank of each stage, at stage {', '.join(map(str, parameters.stages))}" if pipeline else "a rank"
    frozen = ", frozen" if parameters.frozen else ""
    lines = [f"{number}. {', '.join(_names(parameters, 8))}: {parameters.elements:,} elements on {where}{frozen}"]
    lines.append(f"   placement  {'; '.join(parameters.lies) or 'full, on one rank'}")
    for reduction in parameters.sums:
        kind = "not reduced"
        if len(reduction.groups[0]) > 1:
            kind = f"all-reduced over {reduction.mode} {groups_text(reduction.groups)}"
        divided = reduction.why_divided
        if reduction.divisor != 1:
            divided = f"divided by {reduction.divisor:g} ({divided})"
        lines.append(f"   gradient   {kind}, {divided}")
        lines.append(f"              by {reduction.handler} ({reduction.why_handled})")
    if not parameters.sums:
        lines.append("   gradient   needs no reduction")
    share = parameters.share
    replicas = f"replicas on {groups_text(parameters.holders)}" if share > 1 else "no replicas"
    contribution = (
        f"each rank contributes 1/{share} of its squares" if share > 1 else "each rank contributes its squares"
    )
    lines.append(f"   norm       {contribution}; {replicas}")
    lines.append(f"   start      {'replicas must start with equal values' if share > 1 else 'no replicas to compare'}")
    lines.append(
        f"   checkpoint {parameters.kept}; written by the first replica of each shard: {_few(parameters.writers)}"
    )
    return lines


def _names(parameters: ParameterClass, shown: int) -> list[str]:
    names = [f"{name} ({count})" if count > 1 else name for name, count in parameters.names.items()]
    return names[:shown] + ([f"... {len(names) - shown} more"] if len(names) > shown else [])


def _few(ranks: tuple[int, ...]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (f" ... ({len(ranks)})" if len(ranks) > 8 else "")
    return f"rank {text}"


def _rows(found: list[Meaning]) -> list[dict[str, Any]]:
    return [meaning._asdict() for meaning in found]


def _meanings_text(ratio: float, of: str, count: int, found: list[Meaning], near: list[Meaning]) -> str:
    lines = [f"Possible causes of a {of} that is {ratio:g} times the correct value, on {count} ranks of this config:"]
    for number, cause in enumerate(found, 1):
        lines.append(f"{number:2}. {cause.cause} (x {cause.value:.4g} = {cause.made_of}): {cause.sentence}")
    if not found:
        lines.append("none: no combination of sizes of this layout has that value. The nearest:")
        lines += [f" -  {cause.cause} (x {cause.value:.4g} = {cause.made_of}): {cause.sentence}" for cause in near]
    return "\n".join(lines)
