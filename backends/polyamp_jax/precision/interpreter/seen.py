"""`shown`: marks what a module gave in a program, by the module's path, so that the program can be read for it later.

A mark is an identity. Under autocast it is taken out of the program before that is looked at, so that every operation
runs in the dtype that it has without, and put around the value that the operation gave. Called by `walk` and
`lookahead`, and by `observe`, which alone makes marks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from polyamp_jax import compat

NAME: Final = "polyamp_shown"


def _batched(args: Sequence[Any], dims: Sequence[Any], *, axes: tuple[int, ...], **said: Any) -> tuple[Any, Any]:
    """Under `jax.vmap` the value of all examples is marked; `axes` are those of the maps, outermost first."""
    (value,), (dim,) = args, dims
    if dim is not None:
        axes = (dim, *(axis + (axis >= dim) for axis in axes))
    return SHOWN.bind(value, axes=axes, **said), dim


def _tangent(primals: Sequence[Any], tangents: Sequence[Any], **said: Any) -> tuple[Any, Any]:
    return SHOWN.bind(*primals, **said), tangents[0]


SHOWN: Final = compat.identity(NAME, _tangent, _batched)


def shown(value: Any, path: str, call: int, what: str = "output") -> Any:
    """A floating array, marked; anything else as it is.

    Args:
        value: what a module gave, or was given.
        path: of the module.
        call: a number that its other marks of the same call have too.
        what: "output" or "input".
    """
    if not isinstance(value, jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    return SHOWN.bind(value, path=path, call=call, what=what, axes=())


class Marks(NamedTuple):
    """A program without its marks.

    Attributes:
        jaxpr: the program, of which nothing else differs.
        after: index of an equation, -1 before the first -> what is marked after it: (variable, parameters of the mark).
        last: variable -> index of the last equation after which it is marked.
    """

    jaxpr: compat.Jaxpr
    after: Mapping[int, Sequence[tuple[Any, Mapping[str, Any]]]]
    last: Mapping[Any, int]


_kept: weakref.WeakKeyDictionary[Any, Marks] = weakref.WeakKeyDictionary()


def without(jaxpr: compat.Jaxpr) -> Marks:
    """A program without its marks; where it has none, itself. Programs inside of it keep theirs."""
    if not any(eqn.primitive is SHOWN for eqn in jaxpr.eqns):
        return Marks(jaxpr, {}, {})
    if jaxpr not in _kept:
        _kept[jaxpr] = _without(jaxpr)
    return _kept[jaxpr]


def _without(jaxpr: compat.Jaxpr) -> Marks:
    same: dict[Any, Any] = {}
    after: dict[int, list[tuple[Any, Mapping[str, Any]]]] = {}
    last: dict[Any, int] = {}
    eqns: list[Any] = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, compat.Literal) else same.get(atom, atom)

    for eqn in jaxpr.eqns:
        if eqn.primitive is not SHOWN:
            eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars]))
            continue
        atom = same[eqn.outvars[0]] = read(eqn.invars[0])
        if not isinstance(atom, compat.Literal):
            after.setdefault(len(eqns) - 1, []).append((atom, eqn.params))
            last[atom] = len(eqns) - 1
    replaceable: Any = jaxpr  # JAX does not annotate `replace`
    return Marks(replaceable.replace(eqns=eqns, outvars=[read(atom) for atom in jaxpr.outvars]), after, last)
