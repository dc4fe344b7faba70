"""`LayerRecord`, the result of reading one layer of a module, and helpers for the code lines that set attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from polyamp.porting.layouts.inventory import InventoryLeaf
from polyamp.porting.layouts.layer_layout import Form, Rule

AttributeLine = Callable[[str, Any], str]
"""(expression of the module, canonical value) -> the line of code that gives it that value."""


@dataclasses.dataclass(frozen=True)
class LayerRecord:
    """One layer of a module, or of its arrays in a file, from which a `NativeLayer` is built.

    Attributes:
        forms: possible forms, likeliest first.
        names: native array, as the form's rules name it -> path of the tensor from the module, `.`-separated; where
            it is empty, the rules' names are those of the module.
        suffix: appended to the module's path; names a cell in a stack.
        lines: attribute -> the line of code that sets it.
    """

    forms: tuple[Form, ...]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    suffix: str = ""
    lines: Mapping[str, AttributeLine] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, str]:
        """`names` with the default filled in."""
        return self.names or {name: name for rule in self.forms[0].rules for name in rule.native}


LayerReader = Callable[[Any], list[LayerRecord]]
"""Function from a module to its layers."""

LayerLeaves = Mapping[str, InventoryLeaf]
"""Arrays of one module in a file, by name."""


FileReader = Callable[[LayerLeaves], Iterator[LayerRecord]]
"""Function from the arrays of a module in a file to the layers that it recognises."""


def one_layer(
    kind: str,
    rules: Sequence[Rule] = (),
    attributes: Mapping[str, Any] | None = None,
    lines: Mapping[str, AttributeLine] | None = None,
) -> list[LayerRecord]:
    """Return the reading of a module that is one layer of a known kind."""
    return [LayerRecord((Form(kind, tuple(rules), attributes or {}),), lines=lines or {})]


def array_rules(owner: Any, /, **canonical_names: str) -> tuple[Rule, ...]:
    """Return the rules of those arrays that a module, or a mapping of a file's arrays, has: native name = canonical
    name."""
    arrays = owner if isinstance(owner, Mapping) else {name: getattr(owner, name, None) for name in canonical_names}
    return tuple(Rule((native,), (name,)) for native, name in canonical_names.items() if arrays.get(native) is not None)


def assignment_line(attribute: str, native: Callable[[Any], Any] = lambda value: value) -> AttributeLine:
    """Return a function that writes the line which assigns an attribute of a module.

    >>> assignment_line("momentum", lambda kept: round(1 - kept, 12))("model.bn1", 0.99)
    'model.bn1.momentum = 0.01'
    """
    return lambda module, value: f"{module}.{attribute} = {native(value)!r}"


def module_expression(path: str) -> str:
    """Return code that names the module at a `.`-separated path.

    >>> module_expression("layers.0.bn1"), module_expression("")
    ('model.layers[0].bn1', 'model')
    """
    parts = path.split(".") if path else []
    if not all(part.isidentifier() or part.isdecimal() for part in parts):
        return f"model.get_submodule({path!r})"
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def has_own_forward(module: nn.Module, kind: type) -> bool:
    """Return whether a subclass overrides the `forward` of the class that defines its layer."""
    return type(module).forward is not kind.forward  # type: ignore[attr-defined]  # every module has one
