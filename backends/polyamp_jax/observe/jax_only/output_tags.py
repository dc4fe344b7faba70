"""Tags on the inputs and outputs of module calls, by the module paths of `polyamp.port`, and evaluation of a jaxpr with
access to the tagged values.

linen and haiku have interceptors for calls. nnx and equinox have none: the calls of the step's copies of their modules
are hooked, as in `models.call_hook`.

Nested jit and recomputation that contain tags run equation by equation, so that the tags are reached. Loops, branches
and custom differentiation rules of the user stay closed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from polyamp.context_values import temporary_value
from polyamp.parity.trace.observer import CaptureKind
from polyamp_jax import compat
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.call_hook import hook_calls
from polyamp_jax.observe.jax_only.library_observer import loaded_observers
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE, tag

_INLINE_PRIMITIVES: Final = ("call", "closed_call", "jit", "remat")
"""Primitives that run one inner jaxpr once."""

_call_numbers: Final = itertools.count(1)
_name_scopes_enabled: ContextVar[bool] = ContextVar("polyamp_scoping", default=False)


def enable_name_scopes() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which each call opens a name scope "/" + path.

    It is for passes without autocast; autocast opens these scopes itself.
    """
    return temporary_value(_name_scopes_enabled, True)


def call_with_tags(function: Callable[..., Any], args: Any, kwargs: Any, path: str, *, cell: str | None = None) -> Any:
    """Call a module and return its output, tagged.

    Args:
        function: the call.
        args: positional arguments; the first floating array is tagged too.
        kwargs: keyword arguments.
        path: path of the module.
        cell: path of the cell of a flax RNN. The cell is the layer, but runs in a scan, so the RNN is tagged for it.
    """
    number = next(_call_numbers)
    given = next((arg for arg in args if isinstance(arg, jax.Array) and jnp.issubdtype(arg.dtype, jnp.floating)), None)
    if path:
        tag(given, path if cell is None else cell, number, "input")
    with jax.named_scope(f"/{path}") if _name_scopes_enabled.get() else contextlib.nullcontext():
        output = function(*args, **kwargs)
    if cell is not None:
        if isinstance(output, tuple) and len(output) == 2:
            return output[0], tag(tag(output[1], cell, number), path, number)
        return tag(tag(output, cell, number), path, number)
    return _tag_output(output, path, number)


def _tag_output(output: Any, path: str, number: int) -> Any:
    """Tag the array in a module's output; of several, the first top-level one.

    For a cell that returns (carry, output) this is the output.
    """
    if isinstance(output, jax.Array):
        return tag(output, path, number)
    if isinstance(output, list | tuple):
        place = next((place for place, item in enumerate(output) if isinstance(item, jax.Array)), None)
        if place is None:
            return output
        items = [tag(item, path, number) if n == place else item for n, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is dict:
        name = next((name for name, item in output.items() if isinstance(item, jax.Array)), None)
        return {key: tag(item, path, number) if key == name else item for key, item in output.items()}
    return output


@contextlib.contextmanager
def tag_module_outputs() -> Iterator[None]:
    """Return a context manager in which linen and haiku modules tag their outputs."""
    with contextlib.ExitStack() as blocks:
        for observer in loaded_observers():
            observer.tag_outputs(blocks)
        yield


class TaggingCasts(CallCasts):
    """Casts and scopes of a call whose nnx or equinox modules tag their outputs."""

    is_active = True

    def hook_module(self, module: Any, path: str, *, is_pinned: bool = False, uncast: tuple[type, ...] = ()) -> None:
        if path:
            hook_calls(module, _tag_call, path)
        super().hook_module(module, path, is_pinned=is_pinned, uncast=uncast)


def _tag_call(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, path: str) -> Any:
    cell = f"{path}/cell" if compat.is_a(module, "flax.nnx", "RNN") else None
    return call_with_tags(call, args, kwargs, path, cell=cell)


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
    paths = {eqn.params["path"] for eqn in _all_equations(jaxpr) if eqn.primitive is TAG_PRIMITIVE}
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
        eqn.params["path"] for eqn in _all_equations(jaxpr) if eqn.primitive is TAG_PRIMITIVE and id(eqn) not in met
    }


def run_with_tap(
    program: compat.ClosedJaxpr, args: Sequence[Any], marks: Sequence[OutputTag | None], tap: Tap
) -> list[Any]:
    """Run a program and return its outputs, with each tagged value replaced by the result of `tap`."""
    return _run_jaxpr(program.jaxpr, program.consts, args, iter(marks), tap)


def _run_jaxpr(
    jaxpr: compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], marks: Iterator[OutputTag | None], tap: Tap
) -> list[Any]:
    def equation(eqn: compat.JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        inner = inline_program(eqn)
        if eqn.primitive is TAG_PRIMITIVE:
            mark = next(marks)
            return operands if mark is None else [tap(mark, *operands)]
        if inner is not None:
            return _run_jaxpr(*inner, operands, marks, tap)
        return compat.bind_equation(eqn, operands, eqn.params)

    return run_equations(jaxpr, consts, args, equation)


def run_equations(
    jaxpr: compat.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    equation: Callable[[compat.JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Return the outputs of a program, whose equations `equation` runs on their operands, in order."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, compat.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        with compat.equation_context(eqn):
            known.update(zip(eqn.outvars, equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _reachable_tags(jaxpr: compat.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is TAG_PRIMITIVE:
            yield eqn
        elif (inner := inline_program(eqn)) is not None:
            yield from _reachable_tags(inner[0])


def _all_equations(jaxpr: compat.Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in compat.inner_programs(eqn):
            yield from _all_equations(inner)


def tagged_paths(eqn: compat.JaxprEqn, what: str = "output") -> list[str]:
    """Return the paths of the modules with tags of a kind in the inner programs of an equation."""
    inner = [each for jaxpr in compat.inner_programs(eqn) for each in _all_equations(jaxpr)]
    tags = [each.params for each in inner if each.primitive is TAG_PRIMITIVE]
    return list(dict.fromkeys(params["path"] for params in tags if params["what"] == what))


def inline_program(eqn: compat.JaxprEqn) -> tuple[compat.Jaxpr, Sequence[Any]] | None:
    """Return an equation's inner jaxpr and its constants if its tags are reached, else None."""
    if compat.primitive_name(eqn) not in _INLINE_PRIMITIVES:
        return None
    params: Mapping[str, Any] = eqn.params
    program = next(iter(params[name] for name in ("jaxpr", "call_jaxpr") if name in params))
    jaxpr, consts = (program.jaxpr, program.consts) if isinstance(program, compat.ClosedJaxpr) else (program, ())
    return (jaxpr, consts) if any(eqn.primitive is TAG_PRIMITIVE for eqn in _all_equations(jaxpr)) else None
