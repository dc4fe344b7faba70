"""Evaluation of a jaxpr whose module outputs are tagged, with access to the tagged values.

Nested jit and recomputation that contain tags run equation by equation, so that the tags are reached. Loops, branches
and custom differentiation rules of the user stay closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polyamp.parity.trace.observer import CaptureKind
from polyamp_jax import compat
from polyamp_jax.precision.interpreter import tags

_INLINE_PRIMITIVES: Final = ("call", "closed_call", "jit", "remat")
"""Primitives that run one inner jaxpr once."""


class OutputTag(NamedTuple):
    """Tag of a value.

    Attributes:
        path: path of the module; the second call of the same module is "path#2".
        what: "output", or "input" for a module without submodules.
        axes: axes of the enclosing `jax.vmap`s, outermost first.
        aval: shape and dtype.
    """

    path: str
    what: CaptureKind
    axes: tuple[int, ...]
    aval: Any


Tap = Callable[[OutputTag, Any], Any]
"""`tap(tag, value)`: return the value that replaces the tagged one."""


def program_tags(jaxpr: compat.Jaxpr) -> list[OutputTag | None]:
    """Return the tags that `run_with_tap` reaches, in order; None for tags that are not reported."""
    found = [eqn.params for eqn in _reachable_tags(jaxpr)]
    paths = {eqn.params["path"] for eqn in _all_equations(jaxpr) if eqn.primitive is tags.TAG_PRIMITIVE}
    around = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    names: dict[tuple[str, int], str] = {}
    calls: dict[str, int] = {}
    for path, call in [(said["path"], said["call"]) for said in found if said["what"] == "output"]:
        calls[path] = number = calls.get(path, 0) + 1
        names[path, call] = path if number == 1 else f"{path}#{number}"
    marks: list[OutputTag | None] = []
    for said, eqn in zip(found, _reachable_tags(jaxpr), strict=True):
        name = names.get((said["path"], said["call"]))
        useless = name is None or (said["what"] == "input" and said["path"] in around)
        marks.append(
            None if useless or name is None else OutputTag(name, said["what"], said["axes"], eqn.invars[0].aval)
        )
    return marks


def hidden_modules(jaxpr: compat.Jaxpr) -> set[str]:
    """Return the paths of modules whose tags `run_with_tap` does not reach."""
    met = {id(eqn) for eqn in _reachable_tags(jaxpr)}
    return {
        eqn.params["path"]
        for eqn in _all_equations(jaxpr)
        if eqn.primitive is tags.TAG_PRIMITIVE and id(eqn) not in met
    }


def run_with_tap(
    program: compat.ClosedJaxpr, args: Sequence[Any], marks: Sequence[OutputTag | None], tap: Tap
) -> list[Any]:
    """Run a program and return its outputs, with each tagged value replaced by the result of `tap`."""
    return _run_jaxpr(program.jaxpr, program.consts, args, iter(marks), tap)


def _run_jaxpr(
    jaxpr: compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], marks: Iterator[OutputTag | None], tap: Tap
) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        inner = _inline_program(eqn)
        with compat.equation_context(eqn):
            if eqn.primitive is tags.TAG_PRIMITIVE:
                mark = next(marks)
                out = operands if mark is None else [tap(mark, *operands)]
            elif inner is not None:
                out = _run_jaxpr(*inner, operands, marks, tap)
            else:
                out = compat.bind_equation(eqn, operands, eqn.params)
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _reachable_tags(jaxpr: compat.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is tags.TAG_PRIMITIVE:
            yield eqn
        elif (inner := _inline_program(eqn)) is not None:
            yield from _reachable_tags(inner[0])


def _all_equations(jaxpr: compat.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.inner_programs(eqn):
            yield from _all_equations(inner)


def _inline_program(eqn: compat.JaxprEqn) -> tuple[compat.Jaxpr, Sequence[Any]] | None:
    """Return an equation's inner jaxpr and its constants if it contains tags, else None."""
    if compat.primitive_name(eqn) not in _INLINE_PRIMITIVES:
        return None
    params: Mapping[str, Any] = eqn.params
    program = next(iter(params[name] for name in ("jaxpr", "call_jaxpr") if name in params))
    jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, compat.ClosedJaxpr) else (program, ())
    return (jaxpr, consts) if any(eqn.primitive is tags.TAG_PRIMITIVE for eqn in _all_equations(jaxpr)) else None
