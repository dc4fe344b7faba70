"""Analysis of a program before its evaluation: which values later operations need in float32 (S4).

The rounding of 16 bits becomes visible when a value reaches an exponential as `x - max`, a logarithm, or `1 - x`. The
operations that compute such a value run in float32. One backward pass finds them, in nested programs too. Loops are
analysed to a fixed point.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyamp_jax import compat
from polyamp_jax.precision.interpreter import tag_primitive
from polyamp_jax.precision.op_list import (
    INDEXED_READS,
    MOVES,
    ROUNDING,
    SATURATING,
    SHIFT_INPUTS,
    SHIFTS,
    STRUCTURES,
    TRANSPARENT,
)

PrecisionNeed = Literal["", "shift", "1 - x", "logarithm"]
"""Reason why a value is needed in float32, as the casting report names it. "" if it is not."""

_STRENGTH: Final[dict[PrecisionNeed, int]] = {"": 0, "shift": 1, "1 - x": 2, "logarithm": 3}


class ProgramAnalysis(NamedTuple):
    """Result of a program's analysis.

    Attributes:
        needs: for each equation, the needs of its results.
        inputs: the needs of the program's inputs.
        single_uses: indices of the casts that are the only use of their operand.
        last_uses: for each equation, the variables last used there.
    """

    needs: Sequence[tuple[PrecisionNeed, ...]]
    inputs: tuple[PrecisionNeed, ...]
    single_uses: frozenset[int]
    last_uses: Sequence[Sequence[Any]]


_analyses: weakref.WeakKeyDictionary[Any, dict[Any, ProgramAnalysis]] = weakref.WeakKeyDictionary()
_read_inputs: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def analyze_program(
    jaxpr: compat.Jaxpr, output_needs: Sequence[PrecisionNeed], logarithms: frozenset[str]
) -> ProgramAnalysis:
    """Analyse a program. The result is cached.

    Args:
        jaxpr: the program.
        output_needs: the needs of its outputs.
        logarithms: names of the primitives that need a float32 operand.
    """
    jaxpr = tag_primitive.strip_tags(jaxpr).jaxpr
    kept = _analyses.setdefault(jaxpr, {})
    key = (tuple(output_needs), logarithms)
    found = kept.get(key)
    if found is None:
        other = next(iter(kept.values()), None)
        uses = (_single_use_casts(jaxpr), _last_uses(jaxpr)) if other is None else (other.single_uses, other.last_uses)
        found = kept[key] = ProgramAnalysis(*_needs(jaxpr, output_needs, logarithms), *uses)
    return found


def float32_reason(name: str, needs: Iterable[PrecisionNeed]) -> PrecisionNeed:
    """Return why an operation of the lists "promote" or "follow" must run in float32 for its consumers, or "".

    Operations that do not round (a maximum, a selection) keep the dtype of their operands.
    """
    need = _strongest_need(needs)
    if need == "shift":
        return need if name == "sub" else ""
    return need if name in ROUNDING or name in SATURATING else ""


def no_needs(count: int) -> tuple[PrecisionNeed, ...]:
    """Return empty needs for `count` values."""
    empty: PrecisionNeed = ""
    return (empty,) * count


def loop_output_needs(
    jaxpr: compat.Jaxpr, output_needs: Sequence[PrecisionNeed], first: int, count: int, logarithms: frozenset[str]
) -> tuple[PrecisionNeed, ...]:
    """Return the needs of the outputs of a loop's body. Those of the carry include the needs of the next iteration.

    Args:
        jaxpr: the body. The carry comes first among its outputs.
        output_needs: the needs of the loop's results.
        first: index of the carry among the body's inputs.
        count: length of the carry.
        logarithms: as for `analyze_program`.
    """
    now = tuple(output_needs)
    while True:
        inputs = analyze_program(jaxpr, now, logarithms).inputs
        after = (*_merge_needs(now[:count], inputs[first : first + count]), *now[count:])
        if after == now:
            return now
        now = after


def indexed_inputs(jaxpr: compat.Jaxpr) -> frozenset[int]:
    """Return the indices of the inputs from which the program reads rows at computed indices."""
    jaxpr = tag_primitive.strip_tags(jaxpr).jaxpr
    found = _read_inputs.get(jaxpr)
    if found is None:
        read: set[Any] = set()
        for eqn in reversed(jaxpr.eqns):
            if is_indexed_read(eqn) or (compat.primitive_name(eqn) in MOVES and not read.isdisjoint(eqn.outvars)):
                read.add(_key(eqn.invars[0]))
            for inner, operands, _ in _inner_programs(eqn):
                read.update(_key(operands[index]) for index in indexed_inputs(inner))
        found = _read_inputs[jaxpr] = frozenset(n for n, var in enumerate(jaxpr.invars) if var in read)
    return found


def is_indexed_read(eqn: compat.JaxprEqn) -> bool:
    """Return whether an equation reads its operand at computed indices, which may repeat. Its gradient is a sum."""
    if compat.primitive_name(eqn) not in INDEXED_READS or eqn.params.get("unique_indices"):
        return False
    return any(not isinstance(atom, compat.Literal) for atom in eqn.invars[1:])


def _needs(
    jaxpr: compat.Jaxpr, output_needs: Sequence[PrecisionNeed], logarithms: frozenset[str]
) -> tuple[list[tuple[PrecisionNeed, ...]], tuple[PrecisionNeed, ...]]:
    """Return the needs of each equation's results, and of the inputs."""
    found: dict[Any, PrecisionNeed] = {}
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def ask(atoms: Sequence[Any], needs: Iterable[PrecisionNeed]) -> None:
        for atom, need in zip(atoms, needs, strict=True):
            if need and not isinstance(atom, compat.Literal):
                found[atom] = _strongest_need((need, found.get(atom, "")))

    ask(jaxpr.outvars, output_needs)
    needs: list[tuple[PrecisionNeed, ...]] = []
    for eqn in reversed(jaxpr.eqns):
        outs = tuple(found.get(var, "") for var in eqn.outvars)
        needs.append(outs)
        name = compat.primitive_name(eqn)
        ask(eqn.invars, [_operand_need(eqn, name, _strongest_need(outs), logarithms)] * len(eqn.invars))
        ask(eqn.invars, _one_minus_needs(eqn, name, makers))
        for inner, operands, results in _inner_programs(eqn):
            ask(operands, _analyze_inner(eqn, name, inner, outs[:results], logarithms).inputs)
    return needs[::-1], tuple(found.get(var, "") for var in jaxpr.invars)


def _operand_need(eqn: compat.JaxprEqn, name: str, need: PrecisionNeed, logarithms: frozenset[str]) -> PrecisionNeed:
    """Return an operation's need for its operands, given the `need` of its results."""
    if name in logarithms:
        return "logarithm"
    if name in SHIFTS:
        return "shift"
    if need == "shift":
        return need if name in SHIFT_INPUTS else ""
    if name == "convert_element_type":  # the program's own casts to 16 bits are kept
        new, old = eqn.params["new_dtype"], compat.atom_dtype(eqn.invars[0])
        widens = jnp.issubdtype(old, np.floating) and jnp.issubdtype(new, np.floating) and new.itemsize >= old.itemsize
        return need if widens else ""
    return need if name in ROUNDING or name in TRANSPARENT or name in MOVES else ""


def _one_minus_needs(eqn: compat.JaxprEqn, name: str, makers: dict[Any, Any]) -> tuple[PrecisionNeed, ...]:
    """Return the need of `x` in `1 - x`, `1 + (-x)` and `-x + 1`."""
    if name == "sub" and _is_one(eqn.invars[0], makers):
        return "", "1 - x"
    if name == "add":
        for n, other in ((0, 1), (1, 0)):
            if _is_one(eqn.invars[n], makers) and _producer_name(eqn.invars[other], makers) == "neg":
                return ("", "1 - x") if n == 0 else ("1 - x", "")
    return no_needs(len(eqn.invars))


def _is_one(atom: Any, makers: dict[Any, Any]) -> bool:
    while _producer_name(atom, makers) in ("broadcast_in_dim", "convert_element_type"):
        atom = makers[atom].invars[0]
    return isinstance(atom, compat.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 1)


def _producer_name(atom: Any, makers: dict[Any, Any]) -> str | None:
    eqn = None if isinstance(atom, compat.Literal) else makers.get(atom)
    return None if eqn is None else compat.primitive_name(eqn)


def _analyze_inner(
    eqn: compat.JaxprEqn, name: str, inner: compat.Jaxpr, outs: tuple[PrecisionNeed, ...], logarithms: frozenset[str]
) -> ProgramAnalysis:
    """Analyse a program inside an equation."""
    if name == "scan":
        outs = loop_output_needs(inner, outs, *compat.scan_counts(eqn), logarithms)
    elif name == "while" and outs:
        outs = loop_output_needs(inner, outs, eqn.params["body_nconsts"], len(outs), logarithms)
    return analyze_program(inner, outs or no_needs(len(inner.outvars)), logarithms)


def _inner_programs(eqn: compat.JaxprEqn) -> list[tuple[compat.Jaxpr, Sequence[Any], int]]:
    """Return the programs to rewrite inside an equation: (program, its operands, number of results it shares)."""
    name, params = compat.primitive_name(eqn), eqn.params
    if name not in STRUCTURES or name == "convert_element_type" or compat.linear_algebra_name(eqn) is not None:
        return []
    every = len(eqn.outvars)
    if name == "cond":
        return [(branch.jaxpr, eqn.invars[1:], every) for branch in params["branches"]]
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body, carry = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr, eqn.invars[second:]
        return [(test, [*eqn.invars[:first], *carry], 0), (body, [*eqn.invars[first:second], *carry], every)]
    return [(inner, eqn.invars, every) for inner in [next(compat.inner_programs(eqn))]]


def _key(atom: Any) -> Any:
    return None if isinstance(atom, compat.Literal) else atom


def _strongest_need(needs: Iterable[PrecisionNeed]) -> PrecisionNeed:
    return max(needs, key=_STRENGTH.__getitem__, default="")


def _merge_needs(one: Sequence[PrecisionNeed], other: Sequence[PrecisionNeed]) -> tuple[PrecisionNeed, ...]:
    return tuple(_strongest_need(pair) for pair in zip(one, other, strict=True))


def _single_use_casts(jaxpr: compat.Jaxpr) -> frozenset[int]:
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    uses: Counter[Any] = Counter(atom for atom in atoms if not isinstance(atom, compat.Literal))
    casts = [n for n, eqn in enumerate(jaxpr.eqns) if compat.primitive_name(eqn) == "convert_element_type"]
    operands = {n: jaxpr.eqns[n].invars[0] for n in casts}
    return frozenset(n for n, atom in operands.items() if not isinstance(atom, compat.Literal) and uses[atom] == 1)


def _last_uses(jaxpr: compat.Jaxpr) -> list[list[Any]]:
    kept = {v for v in jaxpr.outvars if not isinstance(v, compat.Literal)}
    last: list[list[Any]] = [[] for _ in jaxpr.eqns]
    for index in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[index]
        for var in (*eqn.invars, *eqn.outvars):
            if not isinstance(var, compat.Literal) and var not in kept:
                kept.add(var)
                last[index].append(var)
    return last
