"""Display of states, results and reports: one line or a few in a terminal, a small table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar


def plain_number(value: Any) -> str:
    """Format a scalar of any framework, read on the host.

    >>> plain_number(1000000.0), plain_number(0.5)
    ('1000000', '0.5')
    """
    number = float(value)
    return f"{number:.0f}" if number.is_integer() else f"{number:g}"


def first_lines(text: str, count: int = 10) -> str:
    """Return the `repr` of a report: its text, of which at most `count` lines.

    >>> print(first_lines("a\\nb\\nc\\nd", 3))
    a
    b
    ... (2 more lines: print it)
    """
    lines = text.splitlines()
    if len(lines) > count:
        lines[count - 1 :] = [f"... ({len(lines) - count + 1} more lines: print it)"]
    return "\n".join(lines)


def table_lines(rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """Return the rows of a table as lines with aligned columns, the last `right` ones flush right.

    >>> table_lines([("name", "n"), ("a", "10")], right=1)
    ['name   n', 'a     10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) - right
    aligned = (
        [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        + [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        for row in rows
    )
    return ["  ".join(cells).rstrip() for cells in aligned]


class StateClass(type):
    """Class of a backend's state: `help` lists what `dir` of a state does."""

    def __dir__(cls) -> list[str]:
        """Return what users need; the rest is between a backend's own modules."""
        return user_names(cls, type.__dir__(cls))


def user_names(kind: type, names: Iterable[str]) -> list[str]:
    """Return those of the names that a state of this class offers users, and the special ones."""
    shown = {name for each in kind.__mro__ for name in vars(each).get("_shown", ())}
    return [name for name in names if name.startswith("__") or name in shown]


class StateDisplayMixin:
    """Mixin with a state's `repr` and notebook table, from `_place`.

    The backends' states inherit from it; they have the attributes of `polyamp.contract.backend.State`.
    """

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("backend", "groups", "model", "recipe", "scale_state", "step")
    """What a state offers users, here what `polyamp.State` has; a framework's own state names more in its `_shown`."""

    def __dir__(self) -> list[str]:
        """Return what users need, for `dir` and completion; the rest is between a backend's own modules."""
        return user_names(type(self), object.__dir__(self))

    def _place(self) -> tuple[str, int | str]:
        """Return the device, and the number of trainable parameters."""
        raise NotImplementedError  # implemented by every state

    def _number(self, value: Any) -> str:
        """Format a scalar of the state. Override it for states whose scalars may be traced and have no value."""
        return plain_number(value)

    def _fields(self: Any) -> dict[str, str]:
        device, parameters = self._place()
        return {
            "backend": repr(self.backend.name),
            "device": repr(device),
            "parameters": parameters if isinstance(parameters, str) else f"{parameters:,}",
            "policy": str(self.recipe.policy),
            "scale": self._number(self.scale_state.scale),
            "step": self._number(self.step),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self._fields().items())})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, (), self._fields().items())


def html_table(caption: str, heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table for a notebook; every text is escaped.

    >>> html_table("a", (), [("b", 1)])
    '<table><caption>a</caption><tbody><tr><th>b</th><td>1</td></tr></tbody></table>'
    """
    import html

    def escape(value: object) -> str:
        return html.escape(str(value))

    head = "".join(f"<th>{escape(word)}</th>" for word in heading)
    body = []
    for first, *rest in rows:
        start = f"<td>{escape(first)}</td>" if heading else f"<th>{escape(first)}</th>"
        body.append(f"<tr>{start}{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>")
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<table><caption>{escape(caption)}</caption>{top}<tbody>{''.join(body)}</tbody></table>"
