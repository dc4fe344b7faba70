"""Layer dtypes under a policy as plain values for a `.keras` file, and their lookup in the loaded model.

The dtypes are saved in addition to the policy, since a loaded model lacks the information which layers had an explicit
`dtype=`, and Keras renumbers automatic names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from polyamp.errors import ModelError
from polyamp_keras.models.keras_serialization import PUBLIC_MODULE
from polyamp_keras.models.layers import LayerEntry, is_container, list_layers, own_class
from polyamp_keras.precision.layer_dtypes import LayerDtype, functional_operations


class _LayerDtypeRow(NamedTuple):
    """`LayerDtype` in a file.

    Attributes:
        kind: class of the layer or operation.
        path, stable_path: paths of the layer; for an operation, those of the model that calls it.
        number: index among that model's operations; -1 for a layer.
        dtype, why: as in `LayerDtype`.
    """

    kind: str
    path: str
    stable_path: str
    number: int
    dtype: str | None
    why: str


def layer_dtypes_to_rows(model: Any, choices: Sequence[LayerDtype]) -> list[list[Any]]:
    """Return the choices as plain values, without those for layers that the model no longer has."""
    known = {id(target): row for target, _, row in _rows_by_target(model)}
    return [
        list(known[id(choice.target)]._replace(dtype=choice.dtype, why=choice.why))
        for choice in choices
        if id(choice.target) in known
    ]


def layer_dtypes_from_rows(model: Any, rows: Sequence[Sequence[Any]]) -> list[LayerDtype]:
    """Return the choices from `layer_dtypes_to_rows` for another model with the same layers.

    Raises:
        ModelError: the model lacks one of the layers.
    """
    found = _rows_by_target(model)
    by_path = {(row.path, row.number): (target, module, row) for target, module, row in found}
    by_stable_path = {(row.stable_path, row.number): (target, module, row) for target, module, row in found}
    saved = [_LayerDtypeRow(*row) for row in rows]
    named = all((row.path, row.number) in by_path for row in saved)
    choices = []
    for row in saved:
        entry = by_path.get((row.path, row.number)) if named else by_stable_path.get((row.stable_path, row.number))
        if entry is None or entry[2].kind != row.kind:
            known = ", ".join(sorted({other.path for _, _, other in found if other.path}))
            raise ModelError(
                f"load_model: the file's policy names {row.path or 'the model itself'!r} ({row.kind}), which the model "
                f"that Keras built from the file does not have. Received: {known}. Load it with the class "
                f"that saved it, or build the model by hand, load its weights and call {PUBLIC_MODULE}.compile or "
                "apply_policy again."
            )
        target, module, _ = entry
        parent = module.parent
        if row.number >= 0:
            choices.append(LayerDtype(target, f"{module.path}/{target.name}".lstrip("/"), row.dtype, row.why))
            continue
        called_by = None if parent is None or is_container(parent) else parent
        choices.append(LayerDtype(target, module.path, row.dtype, row.why, called_by))
    return choices


def _rows_by_target(model: Any) -> list[tuple[Any, LayerEntry, _LayerDtypeRow]]:
    """Return every layer and every operation of functional models, with a row without dtype."""
    found = []
    for module in list_layers(model):
        row = _LayerDtypeRow(own_class(module.layer).__name__, module.path, module.stable_path, -1, None, "")
        found.append((module.layer, module, row))
        for number, (operation, _) in enumerate(functional_operations(module)):
            found.append((operation, module, row._replace(kind=type(operation).__name__, number=number)))
    return found
