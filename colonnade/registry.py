"""Registries: look-up of classes and functions by their name in a config.

A registry knows its *home*, the module with the built-in entries, and imports it on the first look-up. So importing this module
is cheap, and the built-in entries are always listed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

from colonnade.errors import RegistryError, did_you_mean, listed

Entry = TypeVar("Entry", bound=Callable[..., Any])


class Registry:
    """A mapping from names in a config to classes and functions.

    Args:
        what: the noun for messages, such as "gradient handler".
        home: the module whose import registers the built-in entries.
        libraries: modules that are searched for names that are not registered, such as `torch.optim`.
    """

    def __init__(self, what: str, *, home: str | None = None, libraries: tuple[str, ...] = ()) -> None:
        self.what = what
        self._home = home
        self._libraries = libraries
        self._entries: dict[str, Callable[..., Any]] = {}

    @overload
    def register_module(self, entry: Entry) -> Entry: ...
    @overload
    def register_module(self, entry: str | None = None, *, name: str | None = None) -> Callable[[Entry], Entry]: ...
    def register_module(self, entry: Any = None, *, name: str | None = None) -> Any:
        """Register a class or function: `@R.register_module`, `@R.register_module("Name")` or `(name="Name")`.

        Example::

            from colonnade.registry import HOOKS
            from colonnade.trainer import BaseHook

            @HOOKS.register_module
            class ExampleHook(BaseHook):
                pass

            assert HOOKS.get_module("ExampleHook") is ExampleHook
        """
        if isinstance(entry, str):
            entry, name = None, entry
        if entry is not None:
            return self._add(entry, name)
        return lambda decorated: self._add(decorated, name)

    def get_module(self, name: str) -> Callable[..., Any]:
        """Return the entry called `name`.

        Raises:
            RegistryError: no such entry; the message lists the registered ones.
        """
        self._fill()
        if name in self._entries:
            return self._entries[name]
        found = self._from_libraries(name)
        if found is None:
            also = f" (or a class of {', '.join(self._libraries)})" if self._libraries else ""
            hint = did_you_mean(str(name), self)
            raise RegistryError(
                f"no {self.what} {name!r}; registered: {listed(self)}{also}.{hint} Register your own with "
                f"@{self._constant()}.register_module, and import the file that defines it before the config is used.",
                code="C004",
            )
        return found

    def has(self, name: str) -> bool:
        """Whether `get_module(name)` would return an entry."""
        self._fill()
        return name in self._entries or self._from_libraries(name) is not None

    def remove(self, name: str) -> None:
        """Remove an entry, for example so that a notebook cell can define it again."""
        self.get_module(name)
        self._entries.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.has(name)

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._fill()
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.what}: {listed(self)})"

    def _add(self, entry: Any, name: str | None) -> Any:
        if not callable(entry):
            raise RegistryError(
                f"{entry!r} cannot be registered as a {self.what}; only a class or a function can. Write "
                f"@{self._constant()}.register_module above its definition.",
                code="C004",
            )
        key = name or entry.__name__
        if not isinstance(key, str) or not key:
            raise RegistryError(f"the name of a {self.what} must be a non-empty string, but it is {key!r}", code="C004")
        before = self._entries.get(key)
        if before is not None and before is not entry:
            raise RegistryError(
                f"the {self.what} {key!r} is registered twice, by {_where(before)} and by {_where(entry)}. Rename "
                f"one of them, or call .remove({key!r}) first.",
                code="C004",
            )
        self._entries[key] = entry
        return entry

    def _fill(self) -> None:
        home, self._home = self._home, None  # before the import, during which the home may look up entries itself
        if home is not None:
            try:
                importlib.import_module(home)
            except BaseException:
                self._home = home
                raise

    def _from_libraries(self, name: str) -> Callable[..., Any] | None:
        for library in self._libraries:
            found = getattr(importlib.import_module(library), name, None)
            if inspect.isclass(found):
                return found
        return None

    def _constant(self) -> str:
        """The name of this registry in this module, for messages."""
        return next((key for key, value in globals().items() if value is self), "REGISTRY")


def _where(entry: Any) -> str:
    """`module.Name (file:line)` of a definition, or `module.Name` if it has no source file."""
    label = f"{entry.__module__}.{entry.__qualname__}"
    try:
        return f"{label} ({inspect.getsourcefile(entry)}:{inspect.getsourcelines(entry)[1]})"
    except (OSError, TypeError):  # defined in an interactive session or in C
        return label


DIST_GROUP_INITIALIZER = Registry("process group initializer", home="colonnade.context.dist_group_initializer")
GRADIENT_HANDLER = Registry("gradient handler", home="colonnade.engine.gradient_handler")
SCHEDULE = Registry("schedule", home="colonnade.engine.schedule")
ORDERS = Registry("pipeline order", home="colonnade.engine.schedule.orders")
HOOKS = Registry("trainer hook", home="colonnade.trainer.hooks")
LAYERS = Registry("layer", libraries=("torch.nn",))
LOSSES = Registry("loss", libraries=("torch.nn",))
MODELS = Registry("model")
DATASETS = Registry("dataset")
OPTIMIZERS = Registry("optimizer", libraries=("torch.optim",))
LR_SCHEDULERS = Registry(
    "learning-rate scheduler", home="colonnade.nn.lr_scheduler", libraries=("torch.optim.lr_scheduler",)
)
