"""`read_program`: 16-bit norms and softmaxes, dtypes and the last matrix product of a program, from its jaxpr."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from polyamp.float_formats import FLOAT_DTYPES, HALF_DTYPES
from polyamp.linter.setup_figures import SensitiveOperation
from polyamp_jax import compat
from polyamp_jax.precision.op_list import MOVES, PRODUCTS, STRUCTURES

_EXPONENTIALS: Final = frozenset({"exp", "exp2"})
_SUMS: Final = frozenset({"reduce_sum", "dot_general"})
_ROOTS: Final = frozenset({"rsqrt", "sqrt"})
_CAST: Final = "convert_element_type"


class ProgramFigures(NamedTuple):
    """What a program holds. Attributes as in `SetupFigures`; `head`: name of the weight of the last matrix product."""

    operations: list[SensitiveOperation]
    dtypes: list[str]
    head: str | None


def read_program(forward: compat.Jaxpr, both: compat.Jaxpr, names: Sequence[str]) -> ProgramFigures:
    """Return the figures of a loss.

    A softmax is an exponential that is summed; a norm, a root of an array. Fused kernels show neither.

    Args:
        forward: the program of the loss, whose inputs are the parameters.
        both: the program of its gradient.
        names: of the parameters.
    """
    operations = list(dict.fromkeys(_sensitive_operations(forward, "")))
    dtypes = {dtype for eqn in _equations(both) for dtype in _dtypes(eqn.outvars)}
    heads = list(_weights_of_products(forward, dict(zip(forward.invars, names, strict=True))))
    return ProgramFigures(operations, sorted(dtypes), heads[-1] if heads else None)


def _sensitive_operations(jaxpr: compat.Jaxpr, module: str) -> Iterator[SensitiveOperation]:
    readers = defaultdict(list)
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            readers[id(atom)].append(eqn)

    def is_summed(atom: Any) -> bool:
        for eqn in readers[id(atom)]:
            name = compat.primitive_name(eqn)
            if name in _SUMS or ((name == _CAST or name in MOVES) and is_summed(eqn.outvars[0])):
                return True
            if name in STRUCTURES and any(compat.primitive_name(each) in _SUMS for each in _equations_of(eqn)):
                return True  # a sum that is a function of its own
        return False

    for eqn in jaxpr.eqns:
        name = compat.primitive_name(eqn)
        inside = "/".join((*filter(None, [module]), *compat.named_scopes(eqn)))
        for inner in compat.inner_programs(eqn):
            yield from _sensitive_operations(inner, inside)
        dtype = next(iter(_dtypes(eqn.outvars)), "")
        if dtype not in HALF_DTYPES or not compat.atom_shape(eqn.outvars[0]):
            continue
        if name in _EXPONENTIALS and is_summed(eqn.outvars[0]):
            yield SensitiveOperation(inside, name, dtype, "softmax")
        elif name in _ROOTS:
            yield SensitiveOperation(inside, name, dtype, "norm")


def _equations(jaxpr: compat.Jaxpr) -> Iterator[compat.JaxprEqn]:
    """Yield every equation that computes, inside of functions too."""
    for eqn in jaxpr.eqns:
        inner = list(compat.inner_programs(eqn))
        if inner:
            yield from _equations_of(eqn)
        elif compat.primitive_name(eqn) not in MOVES | {_CAST}:
            yield eqn


def _equations_of(eqn: compat.JaxprEqn) -> Iterator[compat.JaxprEqn]:
    for inner in compat.inner_programs(eqn):
        yield from _equations(inner)


def _dtypes(atoms: Any) -> list[str]:
    named = [str(getattr(atom.aval, "dtype", "")) for atom in atoms]  # a token has none
    return [each for each in named if each in FLOAT_DTYPES]


def _weights_of_products(jaxpr: compat.Jaxpr, sources: dict[Any, str]) -> Iterator[str | None]:
    """Yield the parameter of each matrix product, in order, through casts and moves; None if it has none.

    Args:
        jaxpr: the program.
        sources: its variables that are parameters, or casts and moves of them, and their names.
    """
    for eqn in jaxpr.eqns:
        name = compat.primitive_name(eqn)
        known = [sources.get(atom) if _is_variable(atom) else None for atom in eqn.invars]
        given = [each for each in known if each is not None]
        if name in PRODUCTS:
            yield given[-1] if given else None
        elif (name == _CAST or name in MOVES) and given:
            sources[eqn.outvars[0]] = given[0]
        elif name in STRUCTURES:
            for inner in compat.inner_programs(eqn):
                last = zip(reversed(inner.invars), reversed(known), strict=False)  # a condition's choice comes first
                yield from _weights_of_products(inner, {atom: each for atom, each in last if each is not None})


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")
