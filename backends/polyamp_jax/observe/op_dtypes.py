"""`record_op_dtypes`: the operations of a pass without autocast, read from its jaxpr."""

from __future__ import annotations

from collections.abc import Iterator

from polyamp_jax import compat
from polyamp_jax.precision.interpreter import tag_primitive
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.op_list import MOVES, STRUCTURES


def record_op_dtypes(jaxpr: compat.Jaxpr, recorder: Recorder) -> None:
    """Record the model's operations with their dtypes; operations of the loss belong to no module and are left out.

    Args:
        jaxpr: the program, in which module calls are name scopes ("/" and the path).
        recorder: receives the operations.
    """
    for eqn, name, module in _model_operations(jaxpr, None):
        recorder.operation(module, name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], "off")


def _model_operations(jaxpr: compat.Jaxpr, module: str | None) -> Iterator[tuple[compat.JaxprEqn, str, str]]:
    """Yield (equation, name, module) for each computing operation inside the model."""
    for eqn in jaxpr.eqns:
        inside = next((scope[1:] for scope in reversed(compat.named_scopes(eqn)) if scope.startswith("/")), module)
        name = compat.primitive_name(eqn)
        whole = compat.linear_algebra_name(eqn)
        if inside is not None and whole is not None:
            yield eqn, whole, inside
        elif name in STRUCTURES and name != "convert_element_type":
            for inner in compat.inner_programs(eqn):
                yield from _model_operations(inner, inside)
        elif inside is not None and name not in MOVES | {"convert_element_type", tag_primitive.TAG_PRIMITIVE_NAME}:
            yield eqn, name, inside
