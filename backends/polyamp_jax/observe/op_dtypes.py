"""`traced_operations`: the operations of a traced program with their dtypes, and `record_op_dtypes`, those of a pass
without autocast."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, Final, NamedTuple

from polyamp_jax import compat
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE_NAME
from polyamp_jax.precision.interpreter.tracing import KEEP_SCOPE, scope_path
from polyamp_jax.precision.op_list import MOVES, STRUCTURES

MODEL_SCOPE: Final = "polyamp_model"
"""Scope around the model's calls, which tells them from the loss around them."""
RECOMPUTED_SCOPE: Final = "rematted_computation"
"""JAX's scope for the forward operations that a backward pass runs again."""
NO_MODULES: Final = frozenset({MODEL_SCOPE, RECOMPUTED_SCOPE, KEEP_SCOPE, "checkpoint"})
_CAST: Final = "convert_element_type"


class TracedOperation(NamedTuple):
    """An equation that computes.

    Attributes:
        module: path of its module.
        name: its canonical name.
        avals: of its operands and of its results.
        direction: as in `OperationCount`.
        is_model: whether the model computes it, and not the loss around it.
        is_cast: whether it is a cast.
    """

    module: str
    name: str
    avals: tuple[list[Any], list[Any]]
    direction: str
    is_model: bool
    is_cast: bool = False


def traced_operations(
    jaxpr: compat.Jaxpr,
    modules: Container[str] | None,
    outer: tuple[str, ...] = (),
    *,
    is_backward: bool = False,
    casts: bool = False,
) -> Iterator[TracedOperation]:
    """Yield the operations of a program that compute, those of nested programs included; `casts`: casts too."""
    for eqn in jaxpr.eqns:
        scopes = outer + compat.named_scopes(eqn)
        backward = is_backward or "transpose" in compat.transforms(eqn)
        name, whole = compat.primitive_name(eqn), compat.linear_algebra_name(eqn)
        if whole is None and name in STRUCTURES and name != _CAST:
            for inner in compat.inner_programs(eqn):
                yield from traced_operations(inner, modules, scopes, is_backward=backward, casts=casts)
        elif name not in MOVES | {TAG_PRIMITIVE_NAME} and (casts or name != _CAST):
            direction = "forward" if not backward else "recompute" if RECOMPUTED_SCOPE in scopes else "backward"
            path = scope_path([scope for scope in scopes if scope not in NO_MODULES], modules)
            avals = [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]
            is_model = MODEL_SCOPE in scopes or any(scope.startswith("/") for scope in scopes)  # scopes of layers
            yield TracedOperation(path, whole or name, avals, direction, is_model, name == _CAST)


def record_op_dtypes(jaxpr: compat.Jaxpr, recorder: Recorder) -> None:
    """Record the model's operations with their dtypes; operations of the loss belong to no module and are left out.

    Args:
        jaxpr: the program, in which module calls are name scopes ("/" and the path).
        recorder: receives the operations.
    """
    for each in traced_operations(jaxpr, ()):
        if each.is_model:
            recorder.operation(each.module, each.name, *each.avals, "off")
