"""`colonnade ckpt`: list, verify, import and export checkpoints in one process, without the code of the model."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from colonnade.errors import CheckpointError, listed


class CkptAction(StrEnum):
    """The actions of the command."""

    ls = "ls"
    verify = "verify"
    export = "export"
    import_ = "import"


class Format(StrEnum):
    """File formats of imports and exports."""

    safetensors = "safetensors"
    hf = "hf"
    dcp = "dcp"


def ckpt(
    action: Annotated[CkptAction, typer.Argument(help="What to do.")],
    path: Annotated[
        Path, typer.Argument(help="Folder of a run or of one checkpoint; for import, the file or folder to read.")
    ],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Step of the checkpoint. Default: all (ls, verify), the newest intact one (export), 0 (import).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="File or folder to write; for import, the folder of the run."),
    ] = None,
    kind: Annotated[
        Format,
        typer.Option("--format", help="Format to import or export: one file, a Hugging Face folder, or torch's DCP."),
    ] = Format.safetensors,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For export --format hf: copy config.json and tokenizer files from here."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="For import: allow pickles (DCP metadata, .bin files), which can run code.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For ls and verify: print JSON instead of a table.")] = False,
) -> None:
    """List, verify, export or import checkpoints.

    ls checks the manifest and the file sizes; verify reads every byte. Both exit with 1 if a checkpoint has a problem.

    export writes all weights into one safetensors file, or with --format into a folder that transformers or
    torch.distributed.checkpoint can load. import creates a checkpoint from such a file or folder.
    """
    if action in (CkptAction.ls, CkptAction.verify):
        raise typer.Exit(_show(_rows(path, step, content=action is CkptAction.verify), as_json))
    if out is None:
        raise CheckpointError(f"{action.value} needs --out: a file or folder")
    from colonnade.checkpoint.export import export_checkpoint, find_checkpoint, import_checkpoint

    if action is CkptAction.import_:
        typer.echo(f"{path} -> {import_checkpoint(path, out, kind.value, step or 0, trust=trust)}")
        return
    source = find_checkpoint(_run_folder(path), step)
    typer.echo(f"{source} -> {export_checkpoint(source, out, kind.value, config=config)}")


def _rows(path: Path, step: int | None, content: bool) -> list[dict[str, Any]]:
    """One row for each checkpoint, newest last."""
    from colonnade.checkpoint.manifest import MANIFEST
    from colonnade.checkpoint.storage import published

    path = _run_folder(path)
    if (path / MANIFEST).exists():
        folders = [path]
    else:
        folders = [found.path for found in published(path) if step in (None, found.step)]
    if not folders:
        wanted = f" of step {step}" if step is not None else ""
        raise CheckpointError(
            f"no checkpoint{wanted} in {path}; give the folder of a run, or one step-... folder in it", code="C080"
        )
    return [_row(folder, content) for folder in folders]


def _run_folder(path: Path) -> Path:
    """`path`, or its only subfolder with checkpoints: a run writes them to `checkpoints`, next to its log."""
    from colonnade.checkpoint.manifest import MANIFEST
    from colonnade.checkpoint.storage import published

    if (path / MANIFEST).exists() or published(path) or not path.is_dir():
        return path
    found = sorted(inner for inner in path.iterdir() if inner.is_dir() and published(inner))
    if len(found) > 1:
        raise CheckpointError(
            f"several folders in {path} have checkpoints: {listed(found)}; give one of them", code="C080"
        )
    return found[0] if found else path


def _row(folder: Path, content: bool) -> dict[str, Any]:
    from colonnade.checkpoint.storage import verify

    try:
        manifest = verify(folder, content)
    except (CheckpointError, OSError) as error:
        return {"folder": folder.name, "ok": False, "problem": str(error)}
    return {
        "folder": folder.name,
        "ok": True,
        "step": manifest.step,
        "bytes": manifest.size,
        "files": len(manifest.files),
        "layout": str(manifest.layout),
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time)),
    }


def _show(rows: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from colonnade.checkpoint.storage import megabytes

        table = Table(box=None, pad_edge=False)
        for title in ("checkpoint", "step", "size", "files", "layout", "saved", "ok"):
            table.add_column(title, justify="right" if title in ("step", "size", "files") else "left")
        for row in rows:
            if row["ok"]:
                size, step, files = megabytes(row["bytes"]), str(row["step"]), str(row["files"])
                table.add_row(row["folder"], step, size, files, row["layout"], row["saved"], Text("ok", style="green"))
            else:
                table.add_row(row["folder"], "", "", "", "", "", Text(row["problem"], style="red"))
        Console().print(table)
    return 0 if all(row["ok"] for row in rows) else 1
