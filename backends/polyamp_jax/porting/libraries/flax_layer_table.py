"""Table of flax's classes of layers, of the rows in `flax_layers`, `flax_convolutions` and `flax_composites`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from polyamp.errors import PortError
from polyamp.porting.layouts.layer_layout import Form
from polyamp_jax.porting.input_orders import ChainItem, function_item
from polyamp_jax.porting.layers.refusal import RefusedError
from polyamp_jax.porting.libraries import flax_composites, flax_convolutions, flax_layers
from polyamp_jax.porting.libraries.flax_layer_spec import FlaxLayerSpec

LAYER_SPECS: Final[Mapping[str, FlaxLayerSpec]] = {
    **flax_convolutions.ROWS,
    **flax_layers.ROWS,
    **flax_composites.ROWS,
}
"""Class name -> row; of rows that may fit the same arrays, the likeliest first."""

ARRAY_NAMES: Final = frozenset(name for spec in LAYER_SPECS.values() for name in spec.arrays)
"""Array names of flax's layers that consist of one module. A subclass's other arrays are parameters of no layer."""


def flax_class(module: Any) -> type | None:
    """Return the nearest class of a module in this table; None for a custom class."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("flax.") and kind.__name__ in LAYER_SPECS:
            return kind
    return None


def find_layer_spec(module: Any) -> FlaxLayerSpec | None:
    """Return the row of a module's class, or of its nearest base class."""
    kind = flax_class(module)
    return None if kind is None else LAYER_SPECS[kind.__name__]


def make_form(module: Any, shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any], path: str) -> Form:
    """Return the form of a module of one of flax's classes.

    Args:
        module: the module.
        shapes: shapes of its arrays by name.
        settings: settings by name.
        path: path of the module, for the message.

    Raises:
        PortError: the layer, or one of its settings, has no canonical equivalent.
    """
    kind = flax_class(module)
    assert kind is not None
    spec = LAYER_SPECS[kind.__name__]
    try:
        if spec.form is None:
            raise RefusedError(spec.refusal)
        if spec.stacked is not None:
            _check_axes(*spec.stacked(settings), shapes)
        return spec.form(shapes, settings)
    except RefusedError as error:
        raise refusal_error(path, f"{'.'.join(kind.__module__.split('.')[:2])}.{kind.__name__}: {error}") from None


def flax_chain_item(part: Any, path: str) -> ChainItem:
    """Return the item of a module, or of a function, in a Sequential of flax's.

    Args:
        part: the module or function.
        path: its path in the inventory.
    """
    kind = type(part)
    if kind.__module__.startswith(("flax.nnx", "flax.linen")):
        spec = LAYER_SPECS.get(kind.__name__)
        if spec is None or getattr(part, "reduction_axes", None) not in (None, -1, (-1,)):
            return ChainItem("unknown")
        size = getattr(part, "kernel_size", ())
        return ChainItem(spec.role, path, spatial=1 if isinstance(size, int) else len(size))
    is_module = any(each.__module__.startswith("flax.") for each in kind.__mro__)
    return ChainItem("unknown") if is_module or not callable(part) else function_item(part)


def _check_axes(array: str, axes: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if an array stacks those of several layers, as `nnx.vmap` and `nnx.scan` do."""
    if array in shapes and len(shapes[array]) != axes:
        raise RefusedError(
            f"its {array} of {list(shapes[array])} has an axis too many: a stack of layers, as vmap and scan make "
            "them; linen's alone are moved, along the first axis and with a batch"
        )


def refusal_error(path: str, why: str) -> PortError:
    """Return the error for a layer that cannot be moved; `why` starts with its class."""
    return PortError(
        f"{path or 'the model'!r} cannot be moved: {why}. Give it a form with polyamp.porting.register, or port the "
        "model without it."
    )


def attribute_lines(module: Any, form: Form, path: str) -> dict[str, Callable[[Any], str]]:
    """Return canonical attribute -> the line of code that sets it. In nnx it is an attribute; in linen, whose modules
    are immutable, an argument of the class."""
    kind = flax_class(module)
    if kind is None:
        return {}
    return {
        attribute: functools.partial(_attribute_line, kind, path, setting)
        for attribute, setting in SETTING_NAMES.items()
        if attribute in form.attributes
    }


def _attribute_line(kind: type, path: str, setting: str, value: Any) -> str:
    written = repr(value.upper() if setting == "padding" and isinstance(value, str) else value)
    if kind.__module__.startswith("flax.linen"):
        return f"nn.{kind.__name__}({setting}={written}) for {path!r}"
    steps = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in path.split("/"))
    return f"model{steps}.{setting} = {written}"


SETTING_NAMES: Final[Mapping[str, str]] = {
    "epsilon": "epsilon",
    "momentum": "momentum",
    "padding": "padding",
    "strides": "strides",
    "rate": "rate",
    "dropout": "dropout_rate",
}
"""Canonical attribute -> flax's setting of the same meaning."""
