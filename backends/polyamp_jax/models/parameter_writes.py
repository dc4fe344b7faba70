"""Parameters that a forward pass writes (S12), by path, and the trees of parameters with them.

nnx modules change in place: spectral and weight normalization, a max-norm constraint. Whether a pass writes is known
when it is traced: a parameter that was written is another array afterwards. A nested `nnx.jit` or `nnx.remat` hands out
every parameter as another array too, so that the program decides there (`origins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import ModelError
from polyamp_jax import compat
from polyamp_jax.arrays import named_leaves, path_name

Leaves = Mapping[str, Any]
"""Path of a parameter -> array."""


def writes(before: Any, after: Any) -> Leaves | None:
    """The leaves of `after` that are other arrays than those of `before` at their paths; None if there are none."""
    old = named_leaves(before)
    found = {path: leaf for path, leaf in named_leaves(after).items() if path in old and leaf is not old[path]}
    return found or None


def conformed(written: Leaves, params: Any) -> Leaves:
    """What was written in the dtypes of the parameters.

    Raises:
        ModelError: it has another shape.
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


def on_masters(written: Leaves, computed: Any, masters: Any) -> Leaves:
    """The master weights behind what was written: of a cast the elements that changed, and of the others the master's
    own digits.

    Args:
        written: what a pass wrote, in the dtypes that it computes in.
        computed: the parameters that it computed with.
        masters: the master weights, which may be the same.
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


def overlaid(params: Any, written: Leaves | None) -> Any:
    """The parameters with what was written in its places; themselves where nothing was."""
    if not written:
        return params
    return jax.tree_util.tree_map_with_path(lambda path, leaf: written.get(path_name(path), leaf), params)


def selected(params: Any, written: Leaves) -> dict[Any, Any]:
    """What was written as nested dicts with the keys that lead to it in `params`, which are nested dicts too."""
    found: dict[Any, Any] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if (name := path_name(path)) in written:
            inner = found
            for entry in path[:-1]:
                inner = inner.setdefault(entry.key, {})
            inner[path[-1].key] = written[name]
    return found


def without_origins(written: Leaves, came: Mapping[str, int | None], params: Any) -> Leaves | None:
    """What was written, less the parameters that a pass handed on as they came; None if nothing is left.

    Args:
        written: what looks written.
        came: of each the number of the program's input that it is, as `origins` has it.
        params: the parameters, the first inputs of the program.
    """
    numbers = {path: number for number, path in enumerate(named_leaves(params))}
    found = {path: leaf for path, leaf in written.items() if came[path] != numbers[path]}
    return found or None


def origins(program: compat.Jaxpr) -> list[int | None]:
    """For each output of a program the number of the input that it is, handed on as it came; None where it was made."""
    made = {var: (eqn, number) for eqn in program.eqns for number, var in enumerate(eqn.outvars)}
    inputs = {var: number for number, var in enumerate(program.invars)}

    def of(atom: Any) -> int | None:
        while not isinstance(atom, compat.Literal):
            if atom in inputs:
                return inputs[atom]
            if atom not in made:
                return None
            eqn, number = made[atom]
            inner = [p for p in compat.programs_of(eqn) if len(p.invars) == len(eqn.invars)]
            if len(inner) != 1 or len(inner[0].outvars) != len(eqn.outvars) or compat.name_of(eqn) not in _HANDING_ON:
                return None
            came = origins(inner[0])[number]
            if came is None:
                return None
            atom = eqn.invars[came]
        return None

    return [of(atom) for atom in program.outvars]


_HANDING_ON = frozenset(("jit", "remat", "checkpoint", "closed_call", "core_call", "custom_jvp_call"))
"""Equations that run their one program once."""
