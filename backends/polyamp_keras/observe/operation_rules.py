"""`operation_rule`: the rule behind the dtype of an operation of a Keras model, for `polyamp.explain`.

A Keras policy acts on layers: a layer that is sensitive as a whole computes in float32 (S4), any other in the compute
dtype.
"""

from __future__ import annotations

from typing import Final

from polyamp.contract.casting_report import OperationCount
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.overrides import deciding_glob
from polyamp.recipe.policy import Policy
from polyamp_keras.precision.float8_layers import PRODUCT_REASONS
from polyamp_keras.precision.layer_dtypes import LayerDtype


def operation_rule(row: OperationCount, policy: Policy, choice: LayerDtype | None) -> str:
    """Return the rule of a row in the words of `OperationCount`.

    Args:
        row: the operations, whose `rule` is the op list that names them, or the family of sensitive ones.
        policy: the policy.
        choice: what was chosen for the layer; None for operations of no layer.
    """
    why = "" if choice is None else choice.why
    if row.rule == "compute" and why.startswith(PRODUCT_REASONS):
        return why
    if row.module and deciding_glob(policy.overrides, row.module) is not None:
        return "override"
    if policy.compute not in HALF_DTYPES:
        return "off"
    if row.direction == "backward":
        return "follow"
    if choice is not None and why == "op_rules":
        return f"{'float32' if choice.dtype == 'float32' else 'compute'} (op_rules)"
    if row.rule == "compute":
        return "compute" if row.dtype == policy.compute else "compute (uncast)"
    if row.rule in _OF_OPERANDS:
        return row.rule
    return "float32" if row.dtype == "float32" else "float32 (uncast)"


_OF_OPERANDS: Final = ("follow", "promote", "opaque", "unknown")
"""Rules of operations that no list casts. What is in neither of them, nor in "compute", is sensitive."""
