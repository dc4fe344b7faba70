"""`Watching`: one forward and backward pass as the step makes it, from which every module's output, its cotangent and
all gradients come out. Called by `observer`.

The pass is one compiled function of the state and the batch, so that it is traced once for a structure of the state and
the shapes of a batch. It is the loss as a program (`program`), differentiated by the very code of the step, with zeros
beside every output that are differentiated by too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.contract.report import Operation
from polyamp.parity.observing import What
from polyamp.results import LossFunction
from polyamp.rules import refusals
from polyamp.rules.batches import check_has_rows
from polyamp_jax.arrays import entering, matmul_precision
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.routes import Route
from polyamp_jax.observe import program
from polyamp_jax.observe.marking import marked, marking
from polyamp_jax.observe.operations import record
from polyamp_jax.observe.outputs import called, scoping
from polyamp_jax.precision.bound import Engine
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.walk import interprets
from polyamp_jax.precision.reading import bound_model
from polyamp_jax.step import differentiate, forward_backward
from polyamp_jax.step.failures import check_aux
from polyamp_jax.step.measure import unscaled_leaf
from polyamp_jax.step.state import JaxState
from polyamp_jax.step.step import Fixed


class Found(NamedTuple):
    """What is known of a pass when it is traced.

    Attributes:
        shown: (path, what) of the arrays that come out, in the order in which they come to
            be, but that a module's input stands right before its output.
        operations: what ran, by module.
        unseen: why the modules inside of the model do not show theirs; "" where they do.
    """

    shown: tuple[tuple[str, What], ...]
    operations: tuple[Operation, ...]
    unseen: str


class Passed(NamedTuple):
    """What a pass gave.

    Attributes:
        loss: unscaled.
        arrays: of the modules, in the dtypes that they have.
        cotangents: of each of them, unscaled, float32 or wider; None of an input, and where the loss does not depend on
            an output.
        gradients: by the leaves of the parameters, the same.
        found: `Found`.
    """

    loss: Any
    arrays: list[Any]
    cotangents: list[Any]
    gradients: list[Any]
    found: Fixed


class Watching:
    """`(state, batch) -> Passed`.

    Args:
        loss_fn: the loss.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        run: Callable[..., Passed] = self._run
        self._call = jax.jit(run)

    def __call__(self, state: JaxState, batch: Any) -> Passed:
        passed: Passed = self._call(state, entering(batch, state.setup.plan, compiled=True))
        return passed

    def _run(self, state: JaxState, batch: Any) -> Passed:
        check_has_rows(np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf))
        params, scale = forward_backward.computed(state), forward_backward.scale_of(state)
        keys = forward_backward.keys_of(state, state.running.draws)
        adapter, plan = marked(state.setup.adapter), state.setup.plan
        recorder, interpreted = Recorder(), interprets(plan)

        def loss_of(params: Any, masters: Any) -> tuple[Any, Any]:
            engine = _Engine(adapter, plan, params, state.running, keys, masters=masters, recorder=recorder)
            with matmul_precision(plan), marking(), contextlib.nullcontext() if interpreted else scoping():
                loss, aux = refusals.split_result(self._loss_fn(bound_model(engine), batch))
            check_aux(aux)
            return forward_backward.scaled_loss(loss, scale)[0], loss

        # in cast mode loss_fn may use both a parameter's cast and the master itself
        masters = None if params is state.params else state.params
        traced = jax.make_jaxpr(loss_of)(params, masters)
        if not interpreted:
            record(traced.jaxpr, recorder)
        marks = program.marks_in(traced.jaxpr)

        def seeing(params: Any, masters: Any, zeros: list[Any]) -> tuple[Any, Any]:
            arrays: list[Any] = []
            left = iter(zeros)

            def tap(mark: program.Mark, value: Any) -> Any:
                arrays.append(value)
                return _beside(value, next(left)) if mark.what == "output" else value

            scaled, loss = program.run(traced, jax.tree.leaves((params, masters)), marks, tap)
            return scaled, (loss, arrays)

        kept = [mark for mark in marks if mark is not None]
        zeros = [jnp.zeros(mark.aval.shape, mark.aval.dtype) for mark in kept if mark.what == "output"]
        (values,), cotangents, (loss, arrays) = forward_backward.taken(seeing, [params], [masters], zeros)
        behind = iter(cotangents)
        seen = [
            (mark, _in_front(array, mark), None if mark.what == "input" else _in_front(next(behind), mark))
            for mark, array in zip(kept, arrays, strict=True)
        ]
        seen = _inputs_last(seen)
        return Passed(
            loss,
            [array for _, array, _ in seen],
            [_unscaled(cotangent, scale) for _, _, cotangent in seen],
            differentiate.unscaled(values, scale, jax.tree.leaves(state.params)),
            Fixed(_found(state, traced.jaxpr, [mark for mark, _, _ in seen], recorder)),
        )


class _Engine(Engine):
    """An engine whose model's own output is marked as it is for `loss_fn`."""

    def call(self, route: Route, args: Any, kwargs: Any, part: Any = None) -> Any:
        own = super().call
        if route.steps:
            return own(route, args, kwargs, part)
        return called(lambda *args, **kwargs: own(route, args, kwargs, part), args, kwargs, "")


def _inputs_last(seen: Sequence[tuple[program.Mark, Any, Any]]) -> list[tuple[program.Mark, Any, Any]]:
    """Each module's input right before its output: other calls may have ended between."""
    waiting = {item[0].path: item for item in seen if item[0].what == "input"}
    made = []
    for item in seen:
        if item[0].what == "output":
            before = waiting.pop(item[0].path, None)
            made += [item] if before is None else [before, item]
    return made


def _found(state: JaxState, jaxpr: Any, marks: Sequence[program.Mark], recorder: Recorder) -> Found:
    shown = tuple((mark.path, mark.what) for mark in marks)
    operations = recorder.report(state.recipe.policy).operations
    return Found(shown, operations, "" if any(path.partition("#")[0] for path, _ in shown) else _unseen(state, jaxpr))


def _unseen(state: JaxState, jaxpr: Any) -> str:
    if isinstance(state.setup.adapter, FunctionAdapter):
        return "the model is a function: what it is made of has no modules that could be seen"
    hidden = sorted(program.hidden(jaxpr))
    if hidden:
        return (
            f"modules run where JAX hands nothing out, in a scan, a branch or a rule of differentiation: {hidden[0]!r}"
            + (f" and {len(hidden) - 1} more" if hidden[1:] else "")
        )
    return "no module inside of the model is called"


@jax.custom_jvp
def _beside(value: Any, zeros: Any) -> Any:
    """The value as it is; the gradient of the loss by `zeros` is that by the value."""
    return value


@_beside.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] + tangents[1]


def _unscaled(cotangent: Any, scale: Any | None) -> Any:
    if cotangent is None:
        return None
    return unscaled_leaf(cotangent, scale, jnp.promote_types(cotangent.dtype, jnp.float32))


def _in_front(array: Any, mark: program.Mark) -> Any:
    """An array of examples that `jax.vmap` mapped, their axes first."""
    return array if array is None or not mark.axes else jnp.moveaxis(array, mark.axes, range(len(mark.axes)))
