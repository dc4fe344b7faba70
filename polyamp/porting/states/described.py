"""What a checkpoint says of its model and optimizer, so that another framework can read it without the first one.

A backend puts `text` into the checkpoints that `polyamp.save` writes; `sides` reads it back with `read`. It names
the arrays of the file, layer by layer, with the forms that lead to canonical ones; it is JSON, and runs no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from polyamp.errors import PortError
from polyamp.porting.layouts import operations
from polyamp.porting.layouts.converter import Converter
from polyamp.porting.layouts.forms import Form, Rule
from polyamp.porting.layouts.inventory import Inventory, Leaf, NativeLayer
from polyamp.porting.layouts.kinds import plain
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.layouts.operations import Operation
from polyamp.porting.states.layout import OptimizerLayout, StateConverter, leaf_arrays, unnamed

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

VERSION: Final = 1


def text(state: Any, arrays: Mapping[str, Array], converter: Converter, states: StateConverter) -> str:
    """The description of a state as JSON.

    A checkpoint must be written whatever the model is, so nothing is raised here: what cannot be described is said in
    the text, and is the error of whoever asks `polyamp.port` for this file.

    Args:
        state: a polyamp state.
        arrays: what its backend's `export_state` gave of it.
        converter: what finds the layers of its model.
        states: what finds the arrays of its optimizer.
    """
    try:
        inventory = converter.inventory(state.model)
        leaves, lost = leaf_arrays(inventory, arrays)
        if lost:
            raise PortError(unnamed(lost))
        found: dict[str, Any] = {
            "framework": inventory.framework,
            "ordered": inventory.ordered,
            "left": dict(inventory.left),
            "layers": [_layer(layer) for layer in inventory.layers],
            "leaves": leaves,
            "optimizer": states.layout(state, arrays).plain(),
        }
    except Exception as error:  # noqa: BLE001  # a third party's layer may raise anything
        found = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps({"version": VERSION, **found})


def read(said: Mapping[str, Any], arrays: Mapping[str, Array]) -> tuple[Inventory, Mapping[str, str], OptimizerLayout]:
    """The layers of a checkpoint, the array of each leaf, and what its optimizer's arrays are.

    Args:
        said: what `text` said, parsed.
        arrays: the checkpoint's.

    Raises:
        ValueError: written by a later version, or an operation that this one does not know.
    """
    if said.get("version") != VERSION:
        raise ValueError(f"its description has version {said.get('version')!r}, and this polyamp reads {VERSION}")
    leaves = dict(said["leaves"])
    layers = [_read_layer(layer, leaves, arrays) for layer in said["layers"]]
    found = Inventory(layers, said["framework"], said["ordered"], dict(said["left"]))
    return found, leaves, OptimizerLayout.of(said["optimizer"])


def _layer(layer: NativeLayer) -> dict[str, Any]:
    return {
        "path": layer.path,
        "module": layer.module,
        "leaves": {name: [leaf.name, leaf.trainable, leaf.tied] for name, leaf in layer.leaves.items()},
        "forms": [
            {
                "kind": form.kind,
                "attributes": plain(form.attributes),
                "rules": [_rule(rule) for rule in form.rules],
            }
            for form in layer.forms
        ],
    }


def _rule(rule: Rule) -> list[Any]:
    return [rule.native, rule.canonical, [_operation(each) for each in rule.operations]]


def _read_layer(said: Mapping[str, Any], leaves: Mapping[str, str], arrays: Mapping[str, Array]) -> NativeLayer:
    held = {
        name: Leaf(own, Lazy.of(arrays[leaves[own]]), trainable, tied)
        for name, (own, trainable, tied) in said["leaves"].items()
        if own in leaves
    }
    forms = [
        Form(
            form["kind"],
            tuple(Rule(tuple(a), tuple(b), tuple(_read_operation(o) for o in rest)) for a, b, rest in form["rules"]),
            form["attributes"],
        )
        for form in said["forms"]
    ]
    return NativeLayer(said["path"], held, tuple(forms), said["module"])


def _operation(operation: Operation) -> dict[str, Any]:
    """An operation of `operations` by its name and fields.

    Raises:
        TypeError: a third party's, which a file cannot hold.
    """
    kind = type(operation)
    if kind.__module__ != operations.__name__ or not dataclasses.is_dataclass(operation):
        raise TypeError(f"a file holds polyamp's own operations alone, and not {kind.__module__}.{kind.__qualname__}")
    fields = {field.name: _held(getattr(operation, field.name)) for field in dataclasses.fields(operation)}
    return {"operation": kind.__name__, **fields}


def _held(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _operation(value)  # type: ignore[arg-type]  # an operation made of operations
    return [_held(item) for item in value] if isinstance(value, tuple | list) else value


def _read_operation(said: Mapping[str, Any]) -> Operation:
    """Raises ValueError: an operation that this version does not have."""
    name = said["operation"]
    kind = getattr(operations, name, None) if isinstance(name, str) and name[:1].isupper() else None
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or not hasattr(kind, "backward"):
        raise ValueError(f"it uses an operation {name!r}, which this version of polyamp does not have")
    fields = {key: _back(item) for key, item in said.items() if key != "operation"}
    return cast("Operation", kind(**fields))


def _back(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _read_operation(value)
    return tuple(map(_back, value)) if isinstance(value, list) else value
