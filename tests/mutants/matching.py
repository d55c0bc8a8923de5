"""Which tests should notice a change to a module: by their place in the tree, and by what they import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = "colonnade"


class Matching:
    """The imports of a tree of the package and its tests, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = _dotted(root, PACKAGE)
        self.tests = _dotted(root, "tests")
        self._defined = {name: _top_level_names(path) for name, path in self.modules.items()}
        everything = {**self.modules, **self.tests}
        self._imports = {name: set(self._imported(path)) for name, path in everything.items()}
        self._names = {name: set(self._named(path)) for name, path in self.tests.items()}

    def tests_for(self, module: str) -> list[str]:
        """Return the test files (paths from the root) for a file of the package, the nearest first.

        First the file at the mirrored place, then those that name the module or import it, then those of the modules that
        import it, then all of the mirrored folder; of each kind those first that import little else of the package.
        """
        name = _name(Path(module))
        users = [other for other in self.modules if name in self._imports[other]]
        focused = sorted(self.tests, key=lambda test: len(self._reached(test)))
        near = [
            *self._mirrored(name),
            *(test for test in focused if name in self._names[test]),
            *(test for test in focused if name in self._reached(test)),
            *(test for user in users for test in self._mirrored(user)),
            *sorted(self._folder(Path(module).parent), key=focused.index),
        ]
        files = [str(self.tests[test].relative_to(self.root)) for test in near]
        return [file for file in dict.fromkeys(files) if Path(file).name.startswith("test_")]

    def _mirrored(self, module: str) -> list[str]:
        """Return the test of that name in the folder of the module, else in the one above it, and so on."""
        *folders, last = module.split(".")[1:] or [""]
        wanted = [".".join(["tests", *folders[:depth], f"test_{last}"]) for depth in range(len(folders), -1, -1)]
        return [test for test in wanted if test in self.tests][:1]

    def _folder(self, folder: Path) -> list[str]:
        while True:
            prefix = ".".join(["tests", *folder.parts[1:]]) + "."
            found = [test for test in self.tests if test.startswith(prefix) and "." not in test[len(prefix) :]]
            if any(test.rpartition(".")[2].startswith("test_") for test in found) or len(folder.parts) <= 1:
                return found
            folder = folder.parent

    @cache  # noqa: B019 - one object for the whole run
    def _reached(self, test: str) -> frozenset[str]:
        """Return what a test imports of the package, by itself or by the helpers beside it."""
        seen, waiting = set[str](), [test]
        while waiting:
            for name in self._imports[waiting.pop()] - seen:
                seen.add(name)
                if name in self.tests and not name.rpartition(".")[2].startswith("test_"):
                    waiting.append(name)
        return frozenset(seen)

    def _imported(self, path: Path) -> Iterable[str]:
        """Yield the modules behind the imports of a file, through the packages that pass names on."""
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield from self._behind(node.module, alias.name)

    def _named(self, path: Path) -> Iterable[str]:
        """Yield the modules behind the dotted names in the texts of a file, as in a table of names."""
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for word in re.findall(r"(?:\w+\.)+\w+", node.value):
                    module, _, name = f"{PACKAGE}.{word.removeprefix(f'{PACKAGE}.')}".rpartition(".")
                    while module != PACKAGE and module not in self.modules:
                        module, _, name = module.rpartition(".")
                    if module != PACKAGE:
                        yield from self._behind(module, name)

    def _behind(self, module: str, name: str) -> Iterable[str]:
        if f"{module}.{name}" in self.modules or module.startswith("tests"):
            yield f"{module}.{name}"
        yield module
        if name not in self._defined.get(module, {name}):
            yield from (m for m, names in self._defined.items() if m.startswith(f"{module}.") and name in names)


def _dotted(root: Path, folder: str) -> dict[str, Path]:
    return {_name(path.relative_to(root)): path for path in sorted((root / folder).rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _top_level_names(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
