"""Old paths of modules keep working: the module at its new place, with a warning that names it."""

from __future__ import annotations

import importlib
import sys

import pytest

from colonnade._imports import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_gives_the_module_at_its_new_place(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    above = old.rpartition(".")[0]
    importlib.import_module(above)
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {MOVED[old]}".replace(".", r"\.")):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old])
    assert found.__name__ == MOVED[old]
