"""The notebook, executed by a kernel: functions of its cells train on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook.ipynb"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_its_ranks_equal_one_process(tmp_path: Path) -> None:
    import nbformat  # the extra `long`, which `make long` installs
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    shown = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert shown.count("step 40/40") == 3
    assert "weights differ by" in shown
    assert "Did you mean" in shown
