"""Checkpoint metadata that describes a model and its optimizer, so that another framework can read the checkpoint.

`state_metadata_json` is stored in checkpoints that `polyamp.save` writes; `read_state_metadata` parses it. The metadata
lists the file's arrays by layer, with the forms that convert them to canonical arrays. It is JSON, and runs no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final, cast

from polyamp.backend_lookup import converter_of_choice
from polyamp.errors import PortError
from polyamp.porting.layouts import operations
from polyamp.porting.layouts.converter import Converter
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_kinds import to_json_value
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.layouts.operations import Operation
from polyamp.porting.states.optimizer_layout import (
    OptimizerLayout,
    StateConverter,
    map_leaf_arrays,
    unnamed_leaves_reason,
)

METADATA_VERSION: Final = 1


def state_metadata_json(state: Any, arrays: Mapping[str, Array], converter: Converter, states: StateConverter) -> str:
    """Return the description of a state as JSON.

    A checkpoint must be written for any model, so this function does not raise. The JSON contains the error of an
    unsupported state, and `polyamp.port` raises it for this file.

    Args:
        state: a polyamp state.
        arrays: result of its backend's `export_state`.
        converter: converter that lists the layers of its model, unless its framework runs on several others.
        states: converter that lists the arrays of its optimizer.
    """
    try:
        inventory = (converter_of_choice(state.model) or converter).inventory(state.model)
        leaves, lost = map_leaf_arrays(inventory, arrays)
        if lost:
            raise PortError(unnamed_leaves_reason(lost))
        metadata: dict[str, Any] = {
            "framework": inventory.framework,
            "ordered": inventory.ordered,
            "left": dict(inventory.left),
            "layers": [_layer_to_json(layer) for layer in inventory.layers],
            "leaves": leaves,
            "optimizer": states.layout(state, arrays).plain(),
        }
    except Exception as error:  # noqa: BLE001  # a third party's layer may raise anything
        metadata = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps({"version": METADATA_VERSION, **metadata})


def read_state_metadata(
    metadata: Mapping[str, Any], arrays: Mapping[str, Array]
) -> tuple[Inventory, Mapping[str, str], OptimizerLayout]:
    """Return the layers of a checkpoint, the array of each leaf, and the layout of its optimizer.

    Args:
        metadata: parsed result of `state_metadata_json`.
        arrays: the checkpoint's arrays.

    Raises:
        ValueError: the metadata is from a later version, or has an unknown operation.
    """
    if metadata.get("version") != METADATA_VERSION:
        raise ValueError(
            f"its description has version {metadata.get('version')!r}, and this polyamp reads {METADATA_VERSION}"
        )
    leaves = dict(metadata["leaves"])
    layers = [_layer_from_json(layer, leaves, arrays) for layer in metadata["layers"]]
    found = Inventory(layers, metadata["framework"], metadata["ordered"], dict(metadata["left"]))
    return found, leaves, OptimizerLayout.of(metadata["optimizer"])


def _layer_to_json(layer: NativeLayer) -> dict[str, Any]:
    return {
        "path": layer.path,
        "module": layer.module,
        "leaves": {name: [leaf.name, leaf.trainable, leaf.tied] for name, leaf in layer.leaves.items()},
        "forms": [
            {
                "kind": form.kind,
                "attributes": to_json_value(form.attributes),
                "rules": [_rule_to_json(rule) for rule in form.rules],
            }
            for form in layer.forms
        ],
    }


def _rule_to_json(rule: Rule) -> list[Any]:
    return [rule.native, rule.canonical, [_operation_to_json(each) for each in rule.operations]]


def _layer_from_json(data: Mapping[str, Any], leaves: Mapping[str, str], arrays: Mapping[str, Array]) -> NativeLayer:
    held = {
        name: InventoryLeaf(own, Lazy.of(arrays[leaves[own]]), trainable, tied)
        for name, (own, trainable, tied) in data["leaves"].items()
        if own in leaves
    }
    forms = [
        Form(
            form["kind"],
            tuple(
                Rule(tuple(a), tuple(b), tuple(_operation_from_json(o) for o in rest)) for a, b, rest in form["rules"]
            ),
            form["attributes"],
        )
        for form in data["forms"]
    ]
    return NativeLayer(data["path"], held, tuple(forms), data["module"])


def _operation_to_json(operation: Operation) -> dict[str, Any]:
    """Return an operation of `operations` as its name and fields.

    Raises:
        TypeError: a third party's operation, which a file cannot represent.
    """
    kind = type(operation)
    if kind.__module__ != operations.__name__ or not dataclasses.is_dataclass(operation):
        raise TypeError(f"a file holds polyamp's own operations alone, and not {kind.__module__}.{kind.__qualname__}")
    fields = {field.name: _field_to_json(getattr(operation, field.name)) for field in dataclasses.fields(operation)}
    return {"operation": kind.__name__, **fields}


def _field_to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _operation_to_json(value)  # type: ignore[arg-type]  # a nested operation
    return [_field_to_json(item) for item in value] if isinstance(value, tuple | list) else value


def _operation_from_json(data: Mapping[str, Any]) -> Operation:
    """Return the operation; raises ValueError if this version does not have it."""
    name = data["operation"]
    kind = getattr(operations, name, None) if isinstance(name, str) and name[:1].isupper() else None
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind) or not hasattr(kind, "backward"):
        raise ValueError(f"it uses an operation {name!r}, which this version of polyamp does not have")
    fields = {key: _field_from_json(item) for key, item in data.items() if key != "operation"}
    return cast("Operation", kind(**fields))


def _field_from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _operation_from_json(value)
    return tuple(map(_field_from_json, value)) if isinstance(value, list) else value
