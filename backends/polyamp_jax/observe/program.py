"""A loss as a program, in which what the modules gave is marked: run so that the marked values come out. Called by
`watching`.

Nested jit and recomputation that hold marks are run equation by equation, where the marks are seen; what a loop, a
branch or a rule of differentiation of the user's own runs is not taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from polyamp.parity.observing import What
from polyamp_jax import compat
from polyamp_jax.precision.interpreter import seen

_OPENED: Final = ("call", "closed_call", "jit", "remat")
"""Operations that run one program once."""


class Mark(NamedTuple):
    """A marked value.

    Attributes:
        path: of the module; another call of the same module has "#2" behind it.
        what: "output", or "input" of a module that has no modules in it.
        axes: those of `jax.vmap`s around the call, outermost first.
        aval: shape and dtype.
    """

    path: str
    what: What
    axes: tuple[int, ...]
    aval: Any


Tap = Callable[[Mark, Any], Any]
"""Given a mark and the value, what goes on in its place."""


def marks_in(jaxpr: compat.Jaxpr) -> list[Mark | None]:
    """The marks that a run meets, in its order; None for those that are of no use."""
    found = [eqn.params for eqn in _marks(jaxpr)]
    paths = {eqn.params["path"] for eqn in _every(jaxpr) if eqn.primitive is seen.SHOWN}
    around = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    names: dict[tuple[str, int], str] = {}
    calls: dict[str, int] = {}
    for path, call in [(said["path"], said["call"]) for said in found if said["what"] == "output"]:
        calls[path] = number = calls.get(path, 0) + 1
        names[path, call] = path if number == 1 else f"{path}#{number}"
    marks: list[Mark | None] = []
    for said, eqn in zip(found, _marks(jaxpr), strict=True):
        name = names.get((said["path"], said["call"]))
        useless = name is None or (said["what"] == "input" and said["path"] in around)
        marks.append(None if useless or name is None else Mark(name, said["what"], said["axes"], eqn.invars[0].aval))
    return marks


def hidden(jaxpr: compat.Jaxpr) -> set[str]:
    """Paths of the modules whose marks a run does not meet."""
    met = {id(eqn) for eqn in _marks(jaxpr)}
    return {eqn.params["path"] for eqn in _every(jaxpr) if eqn.primitive is seen.SHOWN and id(eqn) not in met}


def run(program: compat.ClosedJaxpr, args: Sequence[Any], marks: Sequence[Mark | None], tap: Tap) -> list[Any]:
    """The outputs of a program, each marked value replaced by what `tap` makes of it."""
    return _run(program.jaxpr, program.consts, args, iter(marks), tap)


def _run(
    jaxpr: compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], marks: Iterator[Mark | None], tap: Tap
) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        inner = _opened(eqn)
        with compat.context_of(eqn):
            if eqn.primitive is seen.SHOWN:
                mark = next(marks)
                out = operands if mark is None else [tap(mark, *operands)]
            elif inner is not None:
                out = _run(*inner, operands, marks, tap)
            else:
                out = compat.bind(eqn, operands, eqn.params)
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _marks(jaxpr: compat.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is seen.SHOWN:
            yield eqn
        elif (inner := _opened(eqn)) is not None:
            yield from _marks(inner[0])


def _every(jaxpr: compat.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.programs_of(eqn):
            yield from _every(inner)


def _opened(eqn: compat.JaxprEqn) -> tuple[compat.Jaxpr, Sequence[Any]] | None:
    """The one program of an equation and its constants, where there are marks in it."""
    if compat.name_of(eqn) not in _OPENED:
        return None
    params: Mapping[str, Any] = eqn.params
    program = next(iter(params[name] for name in ("jaxpr", "call_jaxpr") if name in params))
    jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, compat.ClosedJaxpr) else (program, ())
    return (jaxpr, consts) if any(eqn.primitive is seen.SHOWN for eqn in _every(jaxpr)) else None
