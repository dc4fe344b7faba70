"""Detection and application of parameter writes in a forward pass (S12).

nnx modules change in place: spectral and weight normalization, a max-norm constraint. Writes are detected during
tracing: a written parameter is a different array object afterwards. A nested `nnx.jit` or `nnx.remat` also returns
every parameter as a different object. For these the traced program decides (`output_origins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import ModelError
from polyamp_jax import compat
from polyamp_jax.arrays import named_leaves, path_name

NamedLeaves = Mapping[str, Any]
"""Path of a parameter -> array."""


def find_writes(before: Any, after: Any) -> NamedLeaves | None:
    """Return the leaves of `after` that are not the same array objects as in `before`, or None if there are none."""
    old = named_leaves(before)
    found = {path: leaf for path, leaf in named_leaves(after).items() if path in old and leaf is not old[path]}
    return found or None


def conform_writes(written: NamedLeaves, params: Any) -> NamedLeaves:
    """Return the written arrays in the dtypes of the parameters.

    Raises:
        ModelError: a written array has another shape than its parameter.
    """
    old = named_leaves(params)
    for path, leaf in written.items():
        if jnp.shape(leaf) != jnp.shape(old[path]):
            raise ModelError(
                f"the forward pass writes an array of another shape to the parameter {path!r}: {jnp.shape(leaf)} for "
                f"{jnp.shape(old[path])}. A step keeps what is written to a parameter, and its optimizer state, where "
                "the shape stays. Write an array of the parameter's shape, or keep it in an nnx.Variable."
            )
    return {path: jnp.asarray(leaf, old[path].dtype) for path, leaf in written.items()}


def writes_on_masters(written: NamedLeaves, computed: Any, masters: Any) -> NamedLeaves:
    """Return the written parameters as master weights.

    For a cast parameter, changed elements come from the write; the other elements keep the master's full precision.

    Args:
        written: the arrays that a pass wrote, in its compute dtypes.
        computed: the parameters that it computed with.
        masters: the master weights, which may be the same object.
    """
    if computed is masters:
        return written
    before, old = named_leaves(computed), named_leaves(masters)
    return {
        path: leaf
        if before[path] is old[path]
        else jnp.where(leaf == before[path], old[path], leaf.astype(old[path].dtype))
        for path, leaf in written.items()
    }


def overlay_writes(params: Any, written: NamedLeaves | None) -> Any:
    """Return the parameters with the written ones replaced; `params` itself if there are none."""
    if not written:
        return params
    return jax.tree_util.tree_map_with_path(lambda path, leaf: written.get(path_name(path), leaf), params)


def nest_writes(params: Any, written: NamedLeaves) -> dict[Any, Any]:
    """Return the written arrays as nested dicts, with the same keys as in the nested dicts `params`."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return nest_values(
        {tuple(entry.key for entry in path): written[path_name(path)] for path in paths if path_name(path) in written}
    )


def nest_values(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return values by path as nested dicts."""
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return tree


def drop_unchanged_writes(written: NamedLeaves, origins: Mapping[str, int | None], params: Any) -> NamedLeaves | None:
    """Return the written parameters without those that a pass returned unchanged; None if none is left.

    Args:
        written: the candidates.
        origins: for each candidate the index of the program input that it equals, as `output_origins` returns it.
        params: the parameters, which are the first inputs of the program.
    """
    numbers = {path: number for number, path in enumerate(named_leaves(params))}
    found = {path: leaf for path, leaf in written.items() if origins[path] != numbers[path]}
    return found or None


def output_origins(program: compat.Jaxpr) -> list[int | None]:
    """Return for each program output the index of the input that it passes through unchanged, or None if computed."""
    made = {var: (eqn, number) for eqn in program.eqns for number, var in enumerate(eqn.outvars)}
    inputs = {var: number for number, var in enumerate(program.invars)}

    def of(atom: Any) -> int | None:
        while not isinstance(atom, compat.Literal):
            if atom in inputs:
                return inputs[atom]
            if atom not in made:
                return None
            eqn, number = made[atom]
            inner = [p for p in compat.inner_programs(eqn) if len(p.invars) == len(eqn.invars)]
            if (
                len(inner) != 1
                or len(inner[0].outvars) != len(eqn.outvars)
                or compat.primitive_name(eqn) not in _CALL_PRIMITIVES
            ):
                return None
            origin = output_origins(inner[0])[number]
            if origin is None:
                return None
            atom = eqn.invars[origin]
        return None

    return [of(atom) for atom in program.outvars]


_CALL_PRIMITIVES = frozenset(("jit", "remat", "checkpoint", "closed_call", "core_call", "custom_jvp_call"))
"""Primitives that run a single inner program once."""
