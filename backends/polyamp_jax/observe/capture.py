"""`PassCapture`: one forward and backward pass of the training step that also returns module outputs and cotangents.

The pass is one compiled function of the state and the batch, traced once per state structure and batch shape. It runs
the loss as a jaxpr (`output_tags`) and differentiates it with the step's own code. Each output gets an additional
input of zeros, whose gradient is the output's cotangent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.trace.observer import CaptureKind
from polyamp.results import LossFunction
from polyamp.rules import step_checks
from polyamp.rules.batches import check_has_rows
from polyamp_jax.arrays import matmul_precision, prepare_batch
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.observe.jax_only.library_observer import observer_of
from polyamp_jax.observe.jax_only.output_tags import (
    OutputTag,
    TaggingCasts,
    call_with_tags,
    enable_name_scopes,
    hidden_modules,
    program_tags,
    run_with_tap,
    tag_module_outputs,
)
from polyamp_jax.observe.op_dtypes import record_op_dtypes
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.interpreter.interpreter import has_interpreted_operations
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine, forward_scopes
from polyamp_jax.precision.policy_module import make_policy_module
from polyamp_jax.step import accumulation, forward_backward
from polyamp_jax.step.error_hints import check_aux
from polyamp_jax.step.grad_stats import unscale_leaf
from polyamp_jax.step.state import JaxState
from polyamp_jax.step.step import StaticResult


class PassTraceInfo(NamedTuple):
    """Information about a pass that is known at trace time.

    Attributes:
        captures: (path, what) of the returned arrays in the order of computation, except that a module's input comes
            right before its output.
        operations: the operations that ran, by module.
        hidden_reason: why outputs of submodules are not visible; "" if they are.
    """

    captures: tuple[tuple[str, CaptureKind], ...]
    operations: tuple[OperationCount, ...]
    hidden_reason: str


class PassOutputs(NamedTuple):
    """Results of a pass.

    Attributes:
        loss: unscaled.
        arrays: inputs and outputs of the modules, in their own dtypes.
        cotangents: one per array, unscaled, float32 or wider; None for an input, and where the loss does not depend
            on an output.
        gradients: one per parameter leaf, unscaled, float32 or wider; None where the loss does not depend on it.
        trace_info: static result with the `PassTraceInfo`.
    """

    loss: Any
    arrays: list[Any]
    cotangents: list[Any]
    gradients: list[Any]
    trace_info: StaticResult


class PassCapture:
    """Compiled pass: a callable `(state, batch) -> PassOutputs`.

    Args:
        loss_fn: the loss.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        run: Callable[..., PassOutputs] = self._run
        self._call = jax.jit(run)

    def __call__(self, state: JaxState, batch: Any) -> PassOutputs:
        passed: PassOutputs = self._call(state, prepare_batch(batch, state.setup.plan, compiled=True))
        return passed

    def _run(self, state: JaxState, batch: Any) -> PassOutputs:
        check_has_rows(np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf))
        params, scale = forward_backward.compute_parameters(state), forward_backward.active_loss_scale(state)
        keys = forward_backward.pass_keys(state, state.running.draws)
        recorder, interpreted = Recorder(), is_interpreted(state)
        # in cast mode loss_fn may use both a parameter's cast and the master itself
        masters = None if params is state.params else state.params
        traced = jax.make_jaxpr(tagged_loss(state, self._loss_fn, batch, keys, scale, recorder))(params, masters)
        if not interpreted:
            record_op_dtypes(traced.jaxpr, recorder)
        marks = program_tags(traced.jaxpr)

        def seeing(params: Any, masters: Any, zeros: list[Any]) -> tuple[Any, Any]:
            arrays: list[Any] = []
            left = iter(zeros)

            def tap(mark: OutputTag, value: Any) -> Any:
                arrays.append(value)
                return _add_cotangent_input(value, next(left)) if mark.what == "output" else value

            scaled, loss = run_with_tap(traced, jax.tree.leaves((params, masters)), marks, tap)
            return scaled, (loss, arrays)

        kept = [mark for mark in marks if mark is not None]
        zeros = [jnp.zeros(mark.aval.shape, mark.aval.dtype) for mark in kept if mark.what == "output"]
        (values,), cotangents, (loss, arrays) = forward_backward.take_gradients(seeing, [params], [masters], zeros)
        behind = iter(cotangents)
        captures = [
            (
                mark,
                _batch_axes_first(array, mark),
                None if mark.what == "input" else _batch_axes_first(next(behind), mark),
            )
            for mark, array in zip(kept, arrays, strict=True)
        ]
        captures = _inputs_before_outputs(captures)
        return PassOutputs(
            loss,
            [array for _, array, _ in captures],
            [_unscale_cotangent(cotangent, scale) for _, _, cotangent in captures],
            accumulation.unscale_gradients(values, scale, jax.tree.leaves(state.params)),
            StaticResult(_trace_info(state, traced.jaxpr, [mark for mark, _, _ in captures], recorder)),
        )


def tagged_loss(
    state: JaxState, loss_fn: LossFunction, batch: Any, keys: Any, scale: Any, recorder: Recorder
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a function of the parameters and the masters -> (scaled loss, loss), whose modules tag their outputs.

    Args:
        state: the state.
        loss_fn: the loss.
        batch: prepared batch.
        keys, scale: of the pass.
        recorder: receives the operations under autocast.
    """
    adapter, plan = state.setup.adapter, state.setup.plan
    scopes = contextlib.nullcontext() if is_interpreted(state) else enable_name_scopes()

    def loss_of(params: Any, masters: Any) -> tuple[Any, Any]:
        engine = TaggingEngine(adapter, plan, params, state.running, keys, masters=masters, recorder=recorder)
        with matmul_precision(plan), tag_module_outputs(), scopes, forward_scopes([engine]):
            loss, aux = step_checks.split_loss_and_aux(loss_fn(make_policy_module(engine), batch))
        check_aux(aux)
        return forward_backward.scale_loss_value(loss, scale)[0], loss

    return loss_of


def is_interpreted(state: JaxState) -> bool:
    """Return whether the interpreter runs a state's model. The layers of Keras cast by themselves."""
    return not state.setup.adapter.applies_policy and has_interpreted_operations(state.setup.plan)


class TaggingEngine(PolicyEngine):
    """Policy engine whose modules tag their outputs; the model's own output as `loss_fn` receives it."""

    _casts_class = TaggingCasts

    def watch_layers(self) -> contextlib.AbstractContextManager[None]:
        model = self.view()
        return observer_of(model).tag_layers(model)

    def call(self, route: ModulePath, args: Any, kwargs: Any, part: Any = None) -> Any:
        own = super().call
        if route.steps:
            return own(route, args, kwargs, part)
        return call_with_tags(lambda *args, **kwargs: own(route, args, kwargs, part), args, kwargs, "")


def _inputs_before_outputs(
    captures: Sequence[tuple[OutputTag, Any, Any]],
) -> list[tuple[OutputTag, Any, Any]]:
    """Move each module's input right before its output; other calls may have ended between the two."""
    waiting = {item[0].path: item for item in captures if item[0].what == "input"}
    made = []
    for item in captures:
        if item[0].what == "output":
            before = waiting.pop(item[0].path, None)
            made += [item] if before is None else [before, item]
    return made


def _trace_info(state: JaxState, jaxpr: Any, marks: Sequence[OutputTag], recorder: Recorder) -> PassTraceInfo:
    captures = tuple((mark.path, mark.what) for mark in marks)
    operations = recorder.report(state.recipe.policy).operations
    return PassTraceInfo(
        captures,
        operations,
        "" if any(path.partition("#")[0] for path, _ in captures) else _hidden_modules_reason(state, jaxpr),
    )


def _hidden_modules_reason(state: JaxState, jaxpr: Any) -> str:
    if not state.setup.adapter.module:
        return "the model is a function: what it is made of has no modules that could be seen"
    hidden = sorted(hidden_modules(jaxpr))
    if hidden:
        return (
            f"modules run where JAX hands nothing out, in a scan, a branch or a rule of differentiation: {hidden[0]!r}"
            + (f" and {len(hidden) - 1} more" if hidden[1:] else "")
        )
    return "no module inside of the model is called"


@jax.custom_jvp
def _add_cotangent_input(value: Any, zeros: Any) -> Any:
    """Return `value`. The gradient with respect to `zeros` equals the gradient with respect to `value`."""
    return value


@_add_cotangent_input.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] + tangents[1]


def _unscale_cotangent(cotangent: Any, scale: Any | None) -> Any:
    if cotangent is None:
        return None
    return unscale_leaf(cotangent, scale, jnp.promote_types(cotangent.dtype, jnp.float32))


def _batch_axes_first(array: Any, mark: OutputTag) -> Any:
    """Return the array with the axes that `jax.vmap` mapped in front."""
    return array if array is None or not mark.axes else jnp.moveaxis(array, mark.axes, range(len(mark.axes)))
