"""A store that counts the keys that a rank asks for or leaves."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Counted(dist.Store):
    """Looks of rank 0 at who has come are left out: how many there are depends on how long it waits."""

    def __init__(self, store: Any, of: Counted | None = None) -> None:
        super().__init__()
        self._own, self._of, self.keys, self.clones = store, of or self, 0, []

    def _count(self, name: str, first: Any, *rest: Any) -> Any:
        keys = first if isinstance(first, list) else [first]
        if not (name in ("add", "check") and keys[0].endswith(("launch/arrivals", "colonnade/outcome"))):
            self._of.keys += len(keys)
        return getattr(self._own, name)(first, *rest)

    def set(self, *args: Any) -> Any:
        return self._count("set", *args)

    def get(self, *args: Any) -> Any:
        return self._count("get", *args)

    def add(self, *args: Any) -> Any:
        return self._count("add", *args)

    def wait(self, *args: Any) -> Any:
        return self._count("wait", *args)

    def check(self, *args: Any) -> Any:
        return self._count("check", *args)

    def multi_get(self, *args: Any) -> Any:
        return self._count("multi_get", *args)

    def compare_set(self, *args: Any) -> Any:
        return self._count("compare_set", *args)

    def delete_key(self, *args: Any) -> Any:
        return self._count("delete_key", *args)

    def clone(self) -> Any:
        """Torch does not keep a Python object alive, so this does."""
        self._of.clones.append(Counted(self._own.clone(), self._of))
        return self._of.clones[-1]
