"""`record_operations`: the operations of a forward pass with their values, from its jaxpr, equation by equation.

Nested programs that run once (jit, recomputation, custom rules) are inlined; a loop or a branch is one operation, but
for a scan of a recorder that opens loops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.parity.trace.operation_log import OperationRecorder, SourceFrame, hidden_folders, is_visible
from polyamp.results import LossFunction
from polyamp_jax import compat
from polyamp_jax.arrays import prepare_batch
from polyamp_jax.models.libraries import LIBRARIES
from polyamp_jax.observe.capture import tagged_loss
from polyamp_jax.observe.jax_only.output_tags import OutputTag, inline_program, program_tags
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE
from polyamp_jax.step import forward_backward
from polyamp_jax.step.state import JaxState

_PACKAGES: Final = ("jax", "jaxlib", "polyamp_jax", "polyamp_keras", *(library.package for library in LIBRARIES))
_RUN_ONCE: Final = ("call", "closed_call", "jit", "remat", "custom_jvp_call", "custom_vjp_call")
"""Primitives that run one inner program once, with the arguments of the equation."""


def record_operations(state: JaxState, loss_fn: LossFunction, batch: Any, recorder: OperationRecorder) -> None:
    """Run a pass and record its operations (`OperationObserver.record_operations`)."""
    batch = prepare_batch(batch, state.setup.plan, compiled=True)
    params, keys = forward_backward.compute_parameters(state), forward_backward.pass_keys(state, state.running.draws)
    masters = None if params is state.params else state.params
    with compat.separate_trace_cache("watch", strictly=False):
        traced = jax.make_jaxpr(tagged_loss(state, loss_fn, batch, keys, None, Recorder()))(params, masters)
        walk = _OperationWalk(recorder)
        operands = [walk.given(leaf) for leaf in jax.tree.leaves((params, masters))]
        with contextlib.suppress(_RecordEndError):
            _, (loss, _) = walk.run(traced.jaxpr, traced.consts, operands, iter(program_tags(traced.jaxpr)), ())
            recorder.see("", "loss", np.asarray(loss))


_Operand = tuple[Any, int | None]
"""A value, and the index of its record; None of a constant or of what has no numbers, such as a key."""


class _RecordEndError(Exception):
    """The value at which the record ends was made."""


class _OperationWalk:
    """Evaluation of a program that records what each equation makes."""

    def __init__(self, recorder: OperationRecorder) -> None:
        self._recorder = recorder
        self._hidden = hidden_folders(_PACKAGES)

    def run(
        self,
        jaxpr: compat.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[_Operand],
        marks: Iterator[OutputTag | None] | None,
        outside: Sequence[SourceFrame],
    ) -> list[_Operand]:
        """Return the outputs of a program.

        Args:
            jaxpr, consts: the program.
            args: its arguments.
            marks: the tags that are reported, in order; None in a program whose tags are not.
            outside: visible frames of the equation that runs the program; empty for the outermost.
        """
        known: dict[Any, _Operand] = dict(zip(jaxpr.constvars, map(self.given, consts), strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> _Operand:
            return (atom.val, None) if isinstance(atom, compat.Literal) else known[atom]

        file = compat.function_file(jaxpr)
        is_own = not outside or (bool(file) and is_visible(file, self._hidden))
        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars], marks, outside, is_own=is_own)
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def given(self, value: Any) -> _Operand:
        """Return a value that the pass is given, recorded."""
        array = _host_array(value)
        return value, None if array is None else self._recorder.add_given(array, str(jnp.result_type(value)))

    def _equation(
        self,
        eqn: compat.JaxprEqn,
        operands: Sequence[Any],
        marks: Iterator[OutputTag | None] | None,
        outside: Sequence[SourceFrame],
        *,
        is_own: bool,
    ) -> Sequence[_Operand]:
        if eqn.primitive is TAG_PRIMITIVE:
            mark = None if marks is None else next(marks)
            if mark is not None:
                self._recorder.see(mark.path, mark.what, np.asarray(operands[0][0]))
                if self._recorder.is_closed:
                    raise _RecordEndError
            return operands
        frames = self._frames(eqn, outside, is_own=is_own)
        tagged = inline_program(eqn)
        inner = tagged or _program_run_once(eqn)
        if inner is not None:
            return self.run(*inner, operands, marks if tagged is not None else None, frames or outside)
        with compat.equation_context(eqn):
            results = compat.bind_equation(eqn, [value for value, _ in operands], eqn.params)
        frame = frames[0] if frames else None
        inputs = [number for _, number in operands if number is not None]
        if self._recorder.opens_loops and compat.primitive_name(eqn) == "scan" and _turns_nonfinite(operands, results):
            inputs = self._first_nonfinite_turn(eqn, operands, frames or outside)
        return [(result, self._record(eqn, inputs, result, frame)) for result in results]

    def _first_nonfinite_turn(
        self, eqn: compat.JaxprEqn, operands: Sequence[_Operand], frames: Sequence[SourceFrame]
    ) -> list[int]:
        """Record the turns of a scan up to the first that makes inf or NaN; return the records of what it makes."""
        body, outer = eqn.params["jaxpr"], self._recorder.iterations
        begin, length = eqn.params["num_consts"], eqn.params["length"]
        end = begin + eqn.params["num_carry"]
        consts, carry, stacked = list(operands[:begin]), list(operands[begin:end]), operands[end:]
        made: list[_Operand] = []
        for turn in reversed(range(length)) if eqn.params["reverse"] else range(length):
            self._recorder.iterations = (*outer, turn)
            slices = [(jax.lax.index_in_dim(value, turn, keepdims=False), number) for value, number in stacked]
            made = self.run(body.jaxpr, body.consts, [*consts, *carry, *slices], None, frames)
            carry = made[: end - begin]
            if _has_nonfinite([value for value, _ in made]):
                break
        self._recorder.iterations = outer
        return [number for _, number in made if number is not None]

    def _record(
        self, eqn: compat.JaxprEqn, inputs: Sequence[int], result: Any, frame: SourceFrame | None
    ) -> int | None:
        array = _host_array(result)
        if array is None:
            return None
        return self._recorder.add(compat.primitive_name(eqn), inputs, array, str(jnp.result_type(result)), frame)

    def _frames(self, eqn: compat.JaxprEqn, outside: Sequence[SourceFrame], *, is_own: bool) -> Sequence[SourceFrame]:
        """Return the visible frames of an equation.

        JAX keeps the program of a nested jit. The frames in it may then be those of another call, so that those of the
        call itself are taken, unless the function is the user's: its lines are the same for each call.
        """
        frames = [frame for frame in compat.equation_frames(eqn) if is_visible(frame[0], self._hidden)]
        return frames if frames and (is_own or outside[0] in frames) else outside


def _host_array(value: Any) -> Any:
    """Return the numbers of a value on the host; None if it has none."""
    if not jnp.size(value) or jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended):
        return None
    array = np.asarray(value)
    return np.stack([array.real, array.imag]) if np.iscomplexobj(array) else array


def _has_nonfinite(values: Iterable[Any]) -> bool:
    arrays = (value for value in values if jnp.issubdtype(jnp.result_type(value), jnp.inexact))
    return any(not bool(jnp.isfinite(value).all()) for value in arrays)


def _turns_nonfinite(operands: Sequence[_Operand], results: Sequence[Any]) -> bool:
    """Return whether results are not finite although the operands are."""
    return _has_nonfinite(results) and not _has_nonfinite(value for value, _ in operands)


def _program_run_once(eqn: compat.JaxprEqn) -> tuple[compat.Jaxpr, Sequence[Any]] | None:
    """Return the inner program, with its constants, of an equation that runs one once; else None."""
    if compat.primitive_name(eqn) not in _RUN_ONCE:
        return None
    program = next((eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params), None)
    if isinstance(program, compat.ClosedJaxpr):
        found = program.jaxpr, program.consts
    elif isinstance(program, compat.Jaxpr):
        found = program, ()
    else:
        return None
    return found if len(found[0].invars) == len(eqn.invars) else None
