"""What is known of a program before it is evaluated: above all, what later operations need of earlier ones (S4).

A value that reaches an exponential as `x - max`, a logarithm, or `1 - x` shows there what 16 bits have rounded away, so
the operations that make it run in float32. One backward pass finds them, through nested programs too; through loops
until nothing changes. Called by `walk`, and by `control_flow` for what loops carry.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyamp_jax import compat
from polyamp_jax.precision.interpreter import seen
from polyamp_jax.precision.op_list import (
    MOVES,
    PASSING,
    READS,
    ROUNDING,
    SATURATING,
    SHIFTS,
    STRUCTURES,
    TOWARDS_SHIFT,
)

Need = Literal["", "shift", "1 - x", "logarithm"]
"""Why a value is needed in float32, in the words of the casting report; "" where it is not."""

_STRENGTH: Final[dict[Need, int]] = {"": 0, "shift": 1, "1 - x": 2, "logarithm": 3}


class Plan(NamedTuple):
    """What is known of a program before it is evaluated.

    Attributes:
        needs: for each equation, what is needed of its results.
        inputs: what the program needs of its inputs.
        soles: indices of the casts that are the only use of their operand.
        last: for each equation the variables last used there.
    """

    needs: Sequence[tuple[Need, ...]]
    inputs: tuple[Need, ...]
    soles: frozenset[int]
    last: Sequence[Sequence[Any]]


_plans: weakref.WeakKeyDictionary[Any, dict[Any, Plan]] = weakref.WeakKeyDictionary()
_reads: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()


def plan(jaxpr: compat.Jaxpr, wanted: Sequence[Need], logarithms: frozenset[str]) -> Plan:
    """The plan of a program; it is kept.

    Args:
        jaxpr: the program.
        wanted: what its surroundings need of its outputs.
        logarithms: names of the primitives that need the digits of their operand.
    """
    jaxpr = seen.without(jaxpr).jaxpr
    kept = _plans.setdefault(jaxpr, {})
    key = (tuple(wanted), logarithms)
    found = kept.get(key)
    if found is None:
        other = next(iter(kept.values()), None)
        soles, last = (other.soles, other.last) if other is not None else (_sole_casts(jaxpr), _last_uses(jaxpr))
        found = kept[key] = Plan(*_needs(jaxpr, wanted, logarithms), soles, last)
    return found


def float32_for(name: str, needs: Iterable[Need]) -> Need:
    """Why an operation of the lists "promote" and "follow" runs in float32 for those that use its results, or "".

    What rounds nothing (a maximum, a selection) stays in the dtype of what it is given.
    """
    need = _strongest(needs)
    if need == "shift":
        return need if name == "sub" else ""
    return need if name in ROUNDING or name in SATURATING else ""


def none(count: int) -> tuple[Need, ...]:
    """No need of any of `count` values."""
    empty: Need = ""
    return (empty,) * count


def loop_wanted(
    jaxpr: compat.Jaxpr, wanted: Sequence[Need], first: int, count: int, logarithms: frozenset[str]
) -> tuple[Need, ...]:
    """What is needed of the outputs of a loop's body: of its carry also what the next iteration needs.

    Args:
        jaxpr: the body; of its outputs the carry comes first.
        wanted: what is needed of the loop's results.
        first: index of the carry among the body's inputs.
        count: length of the carry.
        logarithms: as of `plan`.
    """
    now = tuple(wanted)
    while True:
        inputs = plan(jaxpr, now, logarithms).inputs
        after = (*_merged(now[:count], inputs[first : first + count]), *now[count:])
        if after == now:
            return now
        now = after


def read_inputs(jaxpr: compat.Jaxpr) -> frozenset[int]:
    """Indices of the inputs that the program reads rows of, at places that it computes."""
    jaxpr = seen.without(jaxpr).jaxpr
    found = _reads.get(jaxpr)
    if found is None:
        read: set[Any] = set()
        for eqn in reversed(jaxpr.eqns):
            if reads(eqn) or (compat.name_of(eqn) in MOVES and not read.isdisjoint(eqn.outvars)):
                read.add(_key(eqn.invars[0]))
            for inner, operands, _ in _programs(eqn):
                read.update(_key(operands[index]) for index in read_inputs(inner))
        found = _reads[jaxpr] = frozenset(n for n, var in enumerate(jaxpr.invars) if var in read)
    return found


def reads(eqn: compat.JaxprEqn) -> bool:
    """Whether an equation reads parts of its operand at computed places, some perhaps twice: its gradient is a sum."""
    if compat.name_of(eqn) not in READS or eqn.params.get("unique_indices"):
        return False
    return any(not isinstance(atom, compat.Literal) for atom in eqn.invars[1:])


def _needs(
    jaxpr: compat.Jaxpr, wanted: Sequence[Need], logarithms: frozenset[str]
) -> tuple[list[tuple[Need, ...]], tuple[Need, ...]]:
    """What is needed of the results of each equation, and of the inputs."""
    found: dict[Any, Need] = {}
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def ask(atoms: Sequence[Any], needs: Iterable[Need]) -> None:
        for atom, need in zip(atoms, needs, strict=True):
            if need and not isinstance(atom, compat.Literal):
                found[atom] = _strongest((need, found.get(atom, "")))

    ask(jaxpr.outvars, wanted)
    needs: list[tuple[Need, ...]] = []
    for eqn in reversed(jaxpr.eqns):
        outs = tuple(found.get(var, "") for var in eqn.outvars)
        needs.append(outs)
        name = compat.name_of(eqn)
        ask(eqn.invars, [_passed(eqn, name, _strongest(outs), logarithms)] * len(eqn.invars))
        ask(eqn.invars, _one_minus(eqn, name, makers))
        for inner, operands, results in _programs(eqn):
            ask(operands, _inner(eqn, name, inner, outs[:results], logarithms).inputs)
    return needs[::-1], tuple(found.get(var, "") for var in jaxpr.invars)


def _passed(eqn: compat.JaxprEqn, name: str, need: Need, logarithms: frozenset[str]) -> Need:
    """What an operation needs of its operands, where `need` is needed of its results."""
    if name in logarithms:
        return "logarithm"
    if name in SHIFTS:
        return "shift"
    if need == "shift":
        return need if name in TOWARDS_SHIFT else ""
    if name == "convert_element_type":  # a cast to 16 bits is the program's own, and obeyed
        new, old = eqn.params["new_dtype"], compat.dtype(eqn.invars[0])
        widens = jnp.issubdtype(old, np.floating) and jnp.issubdtype(new, np.floating) and new.itemsize >= old.itemsize
        return need if widens else ""
    return need if name in ROUNDING or name in PASSING or name in MOVES else ""


def _one_minus(eqn: compat.JaxprEqn, name: str, makers: dict[Any, Any]) -> tuple[Need, ...]:
    """The need of `x` in `1 - x`, `1 + (-x)` and `-x + 1`."""
    if name == "sub" and _is_one(eqn.invars[0], makers):
        return "", "1 - x"
    if name == "add":
        for n, other in ((0, 1), (1, 0)):
            if _is_one(eqn.invars[n], makers) and _made_by(eqn.invars[other], makers) == "neg":
                return ("", "1 - x") if n == 0 else ("1 - x", "")
    return none(len(eqn.invars))


def _is_one(atom: Any, makers: dict[Any, Any]) -> bool:
    while _made_by(atom, makers) in ("broadcast_in_dim", "convert_element_type"):
        atom = makers[atom].invars[0]
    return isinstance(atom, compat.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 1)


def _made_by(atom: Any, makers: dict[Any, Any]) -> str | None:
    eqn = None if isinstance(atom, compat.Literal) else makers.get(atom)
    return None if eqn is None else compat.name_of(eqn)


def _inner(
    eqn: compat.JaxprEqn, name: str, inner: compat.Jaxpr, outs: tuple[Need, ...], logarithms: frozenset[str]
) -> Plan:
    """The plan of a program inside an equation."""
    if name == "scan":
        outs = loop_wanted(inner, outs, eqn.params["num_consts"], eqn.params["num_carry"], logarithms)
    elif name == "while" and outs:
        outs = loop_wanted(inner, outs, eqn.params["body_nconsts"], len(outs), logarithms)
    return plan(inner, outs or none(len(inner.outvars)), logarithms)


def _programs(eqn: compat.JaxprEqn) -> list[tuple[compat.Jaxpr, Sequence[Any], int]]:
    """The programs inside an equation that are rewritten: (program, its operands, how many results it shares)."""
    name, params = compat.name_of(eqn), eqn.params
    if name not in STRUCTURES or name == "convert_element_type" or compat.linear_algebra(eqn) is not None:
        return []
    every = len(eqn.outvars)
    if name == "cond":
        return [(branch.jaxpr, eqn.invars[1:], every) for branch in params["branches"]]
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body, carry = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr, eqn.invars[second:]
        return [(test, [*eqn.invars[:first], *carry], 0), (body, [*eqn.invars[first:second], *carry], every)]
    return [(inner, eqn.invars, every) for inner in [next(compat.programs_of(eqn))]]


def _key(atom: Any) -> Any:
    return None if isinstance(atom, compat.Literal) else atom


def _strongest(needs: Iterable[Need]) -> Need:
    return max(needs, key=_STRENGTH.__getitem__, default="")


def _merged(one: Sequence[Need], other: Sequence[Need]) -> tuple[Need, ...]:
    return tuple(_strongest(pair) for pair in zip(one, other, strict=True))


def _sole_casts(jaxpr: compat.Jaxpr) -> frozenset[int]:
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    uses: Counter[Any] = Counter(atom for atom in atoms if not isinstance(atom, compat.Literal))
    casts = [n for n, eqn in enumerate(jaxpr.eqns) if compat.name_of(eqn) == "convert_element_type"]
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
