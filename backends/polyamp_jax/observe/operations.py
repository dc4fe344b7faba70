"""The operations of a pass that autocast does not run, read off its program. Called by `watching`."""

from __future__ import annotations

from collections.abc import Iterator

from polyamp_jax import compat
from polyamp_jax.precision.interpreter import seen
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.op_list import MOVES, STRUCTURES


def record(jaxpr: compat.Jaxpr, recorder: Recorder) -> None:
    """Tell a recorder of the operations of the model, in the dtypes that they have; those of the loss have no module.

    Args:
        jaxpr: the program, in which the calls of modules are scopes ("/" and the path).
        recorder: what is told.
    """
    for eqn, name, module in _operations(jaxpr, None):
        recorder.operation(module, name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], "off")


def _operations(jaxpr: compat.Jaxpr, module: str | None) -> Iterator[tuple[compat.JaxprEqn, str, str]]:
    """(equation, name, module) of what computes inside of the model."""
    for eqn in jaxpr.eqns:
        inside = next((scope[1:] for scope in reversed(compat.scopes_of(eqn)) if scope.startswith("/")), module)
        name = compat.name_of(eqn)
        whole = compat.linear_algebra(eqn)
        if inside is not None and whole is not None:
            yield eqn, whole, inside
        elif name in STRUCTURES and name != "convert_element_type":
            for inner in compat.programs_of(eqn):
                yield from _operations(inner, inside)
        elif inside is not None and name not in MOVES | {"convert_element_type", seen.NAME}:
            yield eqn, name, inside
