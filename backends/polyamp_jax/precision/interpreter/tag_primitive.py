"""`tag`: marks a module's output in a program with the module's path, so that it can be found later.

A mark is an identity operation. Autocast removes marks from a program before it analyses it, so that every operation
runs in the same dtype as without marks. Then it puts each mark around the operation's result.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from polyamp_jax import compat

TAG_PRIMITIVE_NAME: Final = "polyamp_shown"


def _batch_rule(args: Sequence[Any], dims: Sequence[Any], *, axes: tuple[int, ...], **params: Any) -> tuple[Any, Any]:
    """Mark the value of all examples under `jax.vmap`. `axes` are the mapped axes, outermost first."""
    (value,), (dim,) = args, dims
    if dim is not None:
        axes = (dim, *(axis + (axis >= dim) for axis in axes))
    return TAG_PRIMITIVE.bind(value, axes=axes, **params), dim


def _tangent_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return TAG_PRIMITIVE.bind(*primals, **params), tangents[0]


TAG_PRIMITIVE: Final = compat.make_identity_primitive(TAG_PRIMITIVE_NAME, _tangent_rule, _batch_rule)


def tag(value: Any, path: str, call: int, what: str = "output") -> Any:
    """Mark a floating array. Return any other value unchanged.

    Args:
        value: an output or input of a module.
        path: path of the module.
        call: a number shared by all marks of the same call.
        what: "output" or "input".
    """
    if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return TAG_PRIMITIVE.bind(value, path=path, call=call, what=what, axes=())


class Tags(NamedTuple):
    """A program without its marks.

    Attributes:
        jaxpr: the program, otherwise unchanged.
        after: index of an equation, -1 before the first -> marks after it, as (variable, parameters of the mark).
        last: variable -> index of the last equation after which it is marked.
    """

    jaxpr: compat.Jaxpr
    after: Mapping[int, Sequence[tuple[Any, Mapping[str, Any]]]]
    last: Mapping[Any, int]


_tags: weakref.WeakKeyDictionary[Any, Tags] = weakref.WeakKeyDictionary()


def strip_tags(jaxpr: compat.Jaxpr) -> Tags:
    """Remove a program's marks. Inner programs keep theirs. A program without marks is returned itself."""
    if not any(eqn.primitive is TAG_PRIMITIVE for eqn in jaxpr.eqns):
        return Tags(jaxpr, {}, {})
    if jaxpr not in _tags:
        _tags[jaxpr] = _strip_tags(jaxpr)
    return _tags[jaxpr]


def _strip_tags(jaxpr: compat.Jaxpr) -> Tags:
    same: dict[Any, Any] = {}
    after: dict[int, list[tuple[Any, Mapping[str, Any]]]] = {}
    last: dict[Any, int] = {}
    eqns: list[Any] = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, compat.Literal) else same.get(atom, atom)

    for eqn in jaxpr.eqns:
        if eqn.primitive is not TAG_PRIMITIVE:
            eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
            continue
        atom = same[eqn.outvars[0]] = read(eqn.invars[0])
        if not isinstance(atom, compat.Literal):
            after.setdefault(len(eqns) - 1, []).append((atom, eqn.params))
            last[atom] = len(eqns) - 1
    replaceable: Any = jaxpr  # JAX does not annotate `replace`
    return Tags(replaceable.replace(eqns=eqns, outvars=[read(atom) for atom in jaxpr.outvars]), after, last)
