"""Every single change that could be made to a module, without those that only change words or types."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {ast.Add: (r"\+", "-"), ast.Sub: ("-", "+")}
NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
SPEECH = {"debug", "info", "warning", "error", "exception", "warn", "warn_once", "print", "log"}
"""Calls that only say something."""
WORDS = {"__repr__", "__str__", "extra_repr", "describe", "picture"}
"""Functions that only make text for people."""


@dataclass(frozen=True)
class Change:
    """One replacement of a piece of a file."""

    path: str
    """Of the changed file, from the root of the tree."""
    line: int
    kind: str
    start: int
    end: int
    """In bytes of the file."""
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed file."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> list[str]:
        """Return the lines that go and come, each with its sign."""
        begin = source.rfind(b"\n", 0, self.start) + 1
        end = (source.find(b"\n", max(self.end, 1) - 1) + 1 or len(source) + 1) - 1
        changed = source[begin : self.start] + self.text.encode() + source[self.end : end]
        return [
            *(f"-{line}" for line in source[begin:end].decode().splitlines()),
            *(f"+{line}" for line in changed.decode().splitlines()),
        ]


def find_changes(path: Path, root: Path) -> list[Change]:
    """Return every change to the file, in its order."""
    source = path.read_bytes()
    finder = _Finder(str(path.relative_to(root)), source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda change: (change.start, change.end, change.text))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.found: list[Change] = []
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def visit(self, node: ast.AST) -> None:
        if not _is_words_or_types(node):
            for kind, start, end, text in self._replacements(node):
                line = self.source.count(b"\n", 0, start) + 1
                self.found.append(Change(self.path, line, kind, start, end, text))
            self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        left_out = {"annotation", "returns", "decorator_list", "type_params"}
        left_out |= {"msg"} if isinstance(node, ast.Assert) else set()
        for name, value in ast.iter_fields(node):
            if name not in left_out:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def _replacements(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for at, operator in enumerate(node.ops):
                yield from self._operator("comparison", operands[at], operands[at + 1], *COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            is_and = isinstance(node.op, ast.And)
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator("and/or", left, right, *(("and", "or") if is_and else ("or", "and")))
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
            left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                yield from self._operator("+/-", left, right, *ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = self._start(node)
            yield "dropped not", start, start + len("not "), ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield "True/False", *self._span(node), str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield "constant", *self._span(node), str(node.value + 1)
            yield "constant", *self._span(node), str(node.value - 1)
        elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
            yield "any/all, min/max", *self._span(node), NAMES[node.id]
        elif isinstance(node, ast.Return) and not (node.value is None or _is_nothing(node.value)):
            yield "return None", *self._span(node), "return None"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "dropped call", *self._span(node), "pass"
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(
            node.test, (ast.Name, ast.Attribute, ast.Call)
        ):
            yield "condition", self._start(node.test), self._start(node.test), "not "

    def _operator(
        self, kind: str, left: ast.expr, right: ast.expr, pattern: str, text: str
    ) -> Iterator[tuple[str, int, int, str]]:
        """Find the operator between two operands, where only brackets and comments lie beside it."""
        start = self._span(left)[1]
        between = self.source[start : self._start(right)].decode()
        between = re.sub("#.*", lambda comment: " " * len(comment[0].encode()), between)
        word = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
        if match := re.search(word, between):
            yield kind, start + match.start(), start + match.end(), text

    def _start(self, node: ast.expr) -> int:
        return self._span(node)[0]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset


def _is_words_or_types(node: ast.AST) -> bool:
    """Whether nothing inside changes what the library does: messages, text for people, types."""
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # of zip: both are as long, or the code is wrong elsewhere
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _called(node.value) in SPEECH
    if isinstance(node, ast.Call):
        return _called(node).endswith("Error") or _called(node) in SPEECH
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id in ("TYPE_CHECKING", "__debug__")
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        returns_text = isinstance(node.returns, ast.Name) and node.returns.id == "str"
        return node.name in WORDS or (returns_text and any(_is_sentence(inner) for inner in ast.walk(node)))
    return False


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_nothing(node: ast.expr) -> bool:
    """Whether None in its place would say the same: of a function that answers no."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _is_sentence(node: ast.AST) -> bool:
    """Whether this is a piece of a returned text with several words: docstrings are statements, not pieces."""
    return isinstance(node, (ast.Return, ast.Assign)) and any(
        _is_text(inner) and " " in str(getattr(inner, "value", "")) for inner in ast.walk(node)
    )
