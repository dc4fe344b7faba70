"""`Found`: what the readers of modules (`layers`, `recurrent`, `attention`, `plain`) say of one layer; `walk` makes
the inventory of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from polyamp.porting.layouts.forms import Form

Line = Callable[[str, Any], str]
"""(expression of the module, canonical value) -> the line of code that gives it that value."""


@dataclasses.dataclass(frozen=True)
class Found:
    """One layer in a module.

    Attributes:
        forms: what it may be, likeliest first.
        names: native array, as the form's rules name it -> path of the tensor from the module, `.`-separated; where
            it is empty, the rules' names are those of the module.
        suffix: what comes behind the module's path, of a cell in a stack.
        lines: attribute -> how it is set.
    """

    forms: tuple[Form, ...]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    suffix: str = ""
    lines: Mapping[str, Line] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, str]:
        """`names`, filled in."""
        return self.names or {name: name for rule in self.forms[0].rules for name in rule.native}


Reader = Callable[[Any], list[Found]]
"""A module -> its layers."""


def setting(attribute: str, native: Callable[[Any], Any] = lambda value: value) -> Line:
    """The line that assigns an attribute of a module.

    >>> setting("momentum", lambda kept: round(1 - kept, 12))("model.bn1", 0.99)
    'model.bn1.momentum = 0.01'
    """
    return lambda module, value: f"{module}.{attribute} = {native(value)!r}"


def expression(path: str) -> str:
    """Code that names the module at a path, `.`-separated.

    >>> expression("layers.0.bn1"), expression("")
    ('model.layers[0].bn1', 'model')
    """
    parts = path.split(".") if path else []
    if not all(part.isidentifier() or part.isdecimal() for part in parts):
        return f"model.get_submodule({path!r})"
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def overridden(module: nn.Module, kind: type) -> bool:
    """Whether a subclass computes something else than the class whose layer it is."""
    return type(module).forward is not kind.forward  # type: ignore[attr-defined]  # every module has one
