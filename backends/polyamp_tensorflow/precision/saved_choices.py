"""What each layer got under a policy, as plain values for a `.keras` file, and found again on the model of the file.

The choices themselves are saved, not only the policy: the model of a file does not know any more which layers were
given a dtype by their author, and Keras numbers automatic names anew. Called by `autocast`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from polyamp.errors import ModelError
from polyamp_tensorflow.models.layers import Module, modules, only_contains, own_class
from polyamp_tensorflow.precision.layer_choice import Choice, operations_of


class _Row(NamedTuple):
    """A choice in a file.

    Attributes:
        kind: class of the layer or operation.
        path, stable_path: of the layer; of an operation those of the model that calls it.
        number: which of that model's operations it is; -1 for a layer.
        dtype, why: as of `Choice`.
    """

    kind: str
    path: str
    stable_path: str
    number: int
    dtype: str | None
    why: str


def rows_of(model: Any, choices: Sequence[Choice]) -> list[list[Any]]:
    """The choices as plain values; without those for layers that the model has no longer."""
    known = {id(target): row for target, _, row in _targets(model)}
    return [
        list(known[id(choice.target)]._replace(dtype=choice.dtype, why=choice.why))
        for choice in choices
        if id(choice.target) in known
    ]


def choices_of(model: Any, rows: Sequence[Sequence[Any]]) -> list[Choice]:
    """The choices that `rows_of` described, of another model of the same layers.

    Raises:
        ModelError: the model lacks one of the layers.
    """
    found = _targets(model)
    by_path = {(row.path, row.number): (target, module, row) for target, module, row in found}
    by_stable_path = {(row.stable_path, row.number): (target, module, row) for target, module, row in found}
    saved = [_Row(*row) for row in rows]
    named = all((row.path, row.number) in by_path for row in saved)
    choices = []
    for row in saved:
        place = by_path.get((row.path, row.number)) if named else by_stable_path.get((row.stable_path, row.number))
        if place is None or place[2].kind != row.kind:
            known = ", ".join(sorted({other.path for _, _, other in found if other.path}))
            raise ModelError(
                f"load_model: the file's policy names {row.path or 'the model itself'!r} ({row.kind}), which the model "
                f"that Keras built from the file does not have. Received: {known}. Load it with the class "
                "that saved it, or build the model by hand, load its weights and call polyamp_tensorflow.compile or "
                "apply_policy again."
            )
        target, module, _ = place
        parent = module.parent
        if row.number >= 0:
            choices.append(Choice(target, f"{module.path}/{target.name}".lstrip("/"), row.dtype, row.why))
            continue
        called_by = None if parent is None or only_contains(parent) else parent
        choices.append(Choice(target, module.path, row.dtype, row.why, called_by))
    return choices


def _targets(model: Any) -> list[tuple[Any, Module, _Row]]:
    """Every layer and every operation of functional models, with the row of one that has no choice yet."""
    found = []
    for module in modules(model):
        row = _Row(own_class(module.layer).__name__, module.path, module.stable_path, -1, None, "")
        found.append((module.layer, module, row))
        for number, (operation, _) in enumerate(operations_of(module)):
            found.append((operation, module, row._replace(kind=type(operation).__name__, number=number)))
    return found
