"""Tracing of a Python function into a jaxpr. Arrays become its inputs, all other arguments are closed over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import jax

from polyamp.context_values import temporary_value
from polyamp.errors import TraceError
from polyamp_jax import compat
from polyamp_jax.arrays import is_array
from polyamp_jax.precision.interpreter.matrix_products import neutral_precision

KEEP_SCOPE: Final = "keep_precision"
"""Name of the scope in which operations run in their declared dtypes."""

_tracing: ContextVar[bool] = ContextVar("polyamp_tracing", default=False)


def innermost_policy_scope() -> contextlib.AbstractContextManager[Any]:
    """Return a context for a call with its own policy inside a function that is traced for another policy.

    The other policy does not change the call's dtypes: the innermost policy wins, as with `torch.autocast`.
    """
    return jax.named_scope(KEEP_SCOPE) if _tracing.get() else contextlib.nullcontext()


class FunctionTrace(NamedTuple):
    """A traced function.

    Attributes:
        jaxpr: the program.
        consts: arrays that it closed over.
        arrays: the arrays among its arguments.
        result: function from flat output arrays to the function's result.
    """

    jaxpr: compat.Jaxpr
    consts: Sequence[Any]
    arrays: list[Any]
    result: Callable[[Sequence[Any]], Any]


def trace_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    opaque: Callable[[Any], bool] | None = None,
) -> FunctionTrace:
    """Trace `function(*args, **kwargs)`. Matrix products have the precision that the function itself specifies.

    Args:
        function: the function to trace.
        args: positional arguments, pytrees.
        kwargs: keyword arguments.
        opaque: predicate for leaves that are not arrays but may be returned.

    Raises:
        TraceError: the function branches in Python on the value of an array, returns something that is not an array,
            or changes one of its arguments.
    """
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    places = [
        n for n, leaf in enumerate(leaves) if is_array(leaf) and getattr(leaf.dtype, "kind", "") not in [*"OSUMm"]
    ]
    made: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        inputs = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            inputs[place] = array
        given, named = jax.tree.unflatten(structure, inputs)
        with temporary_value(_tracing, True):
            out = function(*given, **named)
        _refuse_changes((given, named), structure, inputs)
        flat_out, tree = jax.tree.flatten(out)
        made[:] = [leaf if opaque is not None and opaque(leaf) else None for leaf in flat_out], tree
        returned = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(out):
            if opaque is None or not opaque(leaf):
                returned.append(_output_array(path, leaf))
        return returned

    arrays = [leaves[place] for place in places]
    try:
        with neutral_precision():
            closed = jax.make_jaxpr(flat)(*arrays)
    except _CONTROL_FLOW as error:
        raise TraceError(
            "policy.autocast traces the function, as jax.jit does, and the function needs the value of an array while "
            "it is traced (an `if` or `while` on an array, float(x), int(x), x[x > 0], or a NumPy call). Use "
            "jax.lax.cond, jnp.where or jax.lax.while_loop for what depends on values, and pass what is fixed as a "
            "Python number."
        ) from error
    except Exception as error:
        if compat.is_flax_trace_error(error):
            raise TraceError(
                "the function changes an nnx module that it closes over, and a traced function cannot. Pass the module "
                "itself to policy.autocast(model), which puts the changes back."
            ) from error
        raise

    def result(out: Sequence[Any]) -> Any:
        flat_out, tree = made
        values = iter(out)
        return jax.tree.unflatten(tree, [next(values) if leaf is None else leaf for leaf in flat_out])

    return FunctionTrace(closed.jaxpr, closed.consts, arrays, result)


def _output_array(path: Any, leaf: Any) -> Any:
    if is_array(leaf) or isinstance(leaf, bool | int | float | complex):
        return leaf
    raise TraceError(
        "a function under policy.autocast may return arrays, numbers, and pytrees of them. Received: "
        f"{type(leaf).__name__} at {jax.tree_util.keystr(path) or 'the top'}: {leaf!r}. Return it from outside the "
        "function, or make it a static field of the pytree."
    )


def _refuse_changes(after: Any, structure: Any, inputs: list[Any]) -> None:
    leaves, now = jax.tree.flatten(after)
    if now != structure or any(a is not b for a, b in zip(leaves, inputs, strict=True)):
        raise TraceError(
            "the function changes one of its arguments, and a traced function works on copies, so that the change "
            "would be lost. Return the new value instead; of an nnx module, pass the module itself to "
            "policy.autocast(model), which puts the changes back."
        )


_CONTROL_FLOW = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def scope_path(scopes: Sequence[str], modules: Container[str] | None) -> str:
    """Return the module path of some scopes. A scope that begins with "/" is a path from the root.

    Args:
        scopes: names of scopes, outermost first.
        modules: paths of the model's modules; other scopes are left out. None for a plain function, whose every scope
            but `KEEP_SCOPE` is a path segment.
    """
    if modules is None:
        return "/".join(scope for scope in scopes if scope != KEEP_SCOPE)
    path = ""
    for scope in scopes:
        if scope.startswith("/"):
            path = scope[1:]
            continue
        inner = f"{path}/{scope}" if path else scope
        if inner in modules:
            path = inner
    return path
