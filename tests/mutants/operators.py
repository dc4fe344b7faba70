"""Mutation operators: the small faults that a source file can be given, each an edit of a few characters.

The edits are made in the text, at the positions of the syntax tree, so that a mutant differs in one place. What no test
should notice is left out: docstrings, annotations, messages of exceptions, assertions, imports, `__slots__`, `strict=`.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

OPERATORS: Final[dict[type[ast.AST], tuple[str, tuple[str, ...]]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("*",)),
    ast.Pow: ("**", ("*",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
"""Operator -> its text, and what may stand in its place."""
NAMES: Final = re.compile(r"[a-z]\w*( [a-z]\w*){3,}")
"""Four names and more in one string."""
DROPPED: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Continue, ast.Delete)
"""Statements that `pass` may replace."""


class Mutant(NamedTuple):
    """One edit.

    Attributes:
        kind: "comparison", "logic", "arithmetic", "number", "word", "condition", "argument" or "statement".
        line: its line, from 1.
        start: where it begins, a byte offset into the file in UTF-8.
        end: where the replaced text ends.
        after: the new text.
    """

    kind: str
    line: int
    start: int
    end: int
    after: str

    def applied(self, source: str) -> str:
        """The file with the edit."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        """The lines that differ, `-` before and `+` after."""
        lines = difflib.ndiff(source.splitlines(), self.applied(source).splitlines())
        return "\n".join(line for line in lines if line[0] in "+-")


def mutants(source: str) -> list[Mutant]:
    """Every edit of a file, in the order of its text."""
    return sorted(set(_Walk(source).found(ast.parse(source))), key=lambda mutant: (mutant.start, mutant))


class _Walk:
    """The edits of a tree, and the positions of its nodes in the text."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def found(self, node: ast.AST) -> Iterator[Mutant]:
        """The edits of a node and of what is in it."""
        yield from self._own(node)
        for child in _children(node):
            yield from self.found(child)

    def _own(self, node: Any) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                yield from self._between("comparison", operator, left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between("logic", node.op, left, right)
        elif isinstance(node, ast.BinOp):
            yield from self._between("arithmetic", node.op, node.left, node.right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._edit("condition", node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.Constant):
            yield from (self._edit("number", node, text) for text in _other_numbers(node.value))
            yield from self._without_words(node)
        elif isinstance(node, ast.Call):
            yield from self._without_arguments(node)
        elif isinstance(node, DROPPED):
            yield self._edit("statement", node, "pass")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield self._edit("condition", node.test, f"not ({self._text(node.test)})")

    def _between(self, kind: str, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        """The edits of an operator, which has no position of its own: it stands between its operands."""
        text, others = OPERATORS.get(type(operator), ("", ()))
        start = self._span(left)[1]
        gap = self._data[start : self._span(right)[0]].decode()
        if gap.count(text) != 1 or "#" in gap:
            return
        at = start + len(gap[: gap.index(text)].encode())
        for other in others:
            yield Mutant(kind, self._line(at), at, at + len(text), other)

    def _without_arguments(self, node: ast.Call) -> Iterator[Mutant]:
        """A call without one of its keyword arguments."""
        before: Any = node.func
        for each in sorted([*node.args, *node.keywords], key=lambda part: self._span(part)[0]):
            if isinstance(each, ast.keyword) and each.arg not in (None, "strict") and before is not node.func:
                start, end = self._span(before)[1], self._span(each)[1]
                if self._data[start:end].decode().lstrip().startswith(","):  # no bracket around the one before
                    yield Mutant("argument", each.lineno, start, end, "")
            before = each

    def _without_words(self, node: ast.Constant) -> Iterator[Mutant]:
        """A list of names in one string, such as an op list, without one of its names."""
        if isinstance(node.value, str) and NAMES.fullmatch(node.value) and "_" in node.value:
            start, end = self._span(node)
            for word in re.finditer(rb" \w+", self._data[start:end]):
                yield Mutant("word", node.lineno, start + word.start(), start + word.end(), "")

    def _edit(self, kind: str, node: Any, after: str) -> Mutant:
        return Mutant(kind, node.lineno, *self._span(node), after)

    def _text(self, node: Any) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _line(self, at: int) -> int:
        return self._data.count(b"\n", 0, at) + 1


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a node, less what no test should notice."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "type_params", "bases"):
            continue
        if isinstance(node, ast.Raise) and name in ("exc", "cause"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and not _is_silent(each):
                yield each


def _is_silent(node: Any) -> bool:
    """Docstrings and other constants as statements, assertions, imports, f-strings, and what only type checkers run."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__slots__":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of `zip`: an assertion
        return True
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _other_numbers(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (str(not value),)
    if isinstance(value, int):
        return (str(value + 1), *([str(value - 1)] if value > 0 else []))
    return (repr(2.0 * value if value else 1.0),) if isinstance(value, float) else ()
