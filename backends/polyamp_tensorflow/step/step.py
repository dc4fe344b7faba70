"""The training step as graph code: `differentiate` and `update`, the two halves, and the step made of both.

    differentiate: loss * scale -> gradients, summed over micro-batches -> / (scale * N)          (S6 to S8)
    update:        norm and finite flag -> clip -> optimizer under tf.cond -> scale adjustment    (S9 to S15)

`GraphFunction` traces them with `tf.function`, once per state and batch shape. The decision to skip is taken inside
the graph; Python never waits for it. Called by the backend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from polyamp.contract.backend import Gradients, LossFunction, Skip, StepResult
from polyamp.errors import GradientError, LossError, ModelError, UnsupportedError
from polyamp.rules import refusals
from polyamp.rules.batches import check_has_rows
from polyamp_tensorflow.arrays import XP, at_least_float32, dense, dense_wide, is_floating, leaves, raw
from polyamp_tensorflow.models.layers import BoundModel
from polyamp_tensorflow.precision.autocast import layer_policies, matmul_precision
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.additions import awaited
from polyamp_tensorflow.step.distribution import mean, on_replicas, several, stacked
from polyamp_tensorflow.interrupts import ending, repair
from polyamp_tensorflow.step.measure import norm_and_flag, scale_loss
from polyamp_tensorflow.step.state import TensorFlowState, turns
from polyamp_tensorflow.step.unused import leaving_alone
from polyamp_tensorflow.step.xla import needs_xla

States = Sequence[TensorFlowState]


class _Scaled(NamedTuple):
    """Float32 loss, aux, and the float32 gradients of the scaled loss by state and parameter; parameters on which the
    loss does not depend are left out (S23)."""

    loss: Any
    aux: Any
    gradients: list[dict[str, Any]]


class GraphFunction:
    """`body(states, *tensors)` as a `tf.function` for each combination of states.

    Args:
        body: graph code that reads and writes the states' variables; on several replicas each runs it.
        split: the tensors are a batch, of which each replica takes its part; otherwise all take the same.
        compile: False runs it eagerly, for debugging.
        jit_compile: XLA; None chooses it for float16 on a CPU, with a warning once per process.

    Raises:
        UnsupportedError: `jit_compile=True` without compiling; a model that XLA cannot compile.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        *,
        split: bool = True,
        compile: bool = True,  # noqa: A002  # the public option's name
        jit_compile: bool | None = False,
    ) -> None:
        if jit_compile and not compile:
            raise UnsupportedError("jit_compile=True compiles with XLA. Received: compile=False as well. Drop one.")
        self._body = body
        self._split = split
        self._compile = compile
        self._jit_compile = jit_compile

    def __call__(self, states: States, *tensors: Any) -> Any:
        repair()
        with turns(states), matmul_precision(states[0].recipe.policy):
            program = self._program(tuple(states))
            try:
                return program(*tensors)
            except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
                if "unsupported operations" not in str(error):
                    raise
                raise UnsupportedError(
                    f"XLA cannot compile loss_fn or the model: {error.message} Pass jit_compile=False to run without "
                    "XLA; on some processors float16 is then 300 times slower than float32, bfloat16 is not."
                ) from error

    def _program(self, states: tuple[TensorFlowState, ...]) -> Callable[..., Any]:
        # The program holds its states, so their ids stay theirs as long as the entry lives. The entry lies in the
        # first state and holds neither this object nor anything outside the states, so all go together.
        programs = states[0].programs.setdefault(self, {})
        key = tuple(id(state) for state in states)
        if key not in programs:
            programs[key] = self._traced(states)
        return programs[key]

    def _traced(self, states: tuple[TensorFlowState, ...]) -> Callable[..., Any]:
        body, split, strategy = self._body, self._split, states[0].strategy
        if any(state.strategy is not strategy for state in states):
            raise ModelError(
                "states of one step must be made in the scope of one strategy. Received: "
                f"{', '.join(type(state.strategy).__name__ for state in states)}."
            )

        def program(*tensors: Any) -> Any:
            return on_replicas(strategy, lambda *own: body(states, *own), tensors, split=split)

        if not self._compile:
            return program
        jit = self._jit_compile
        if several(strategy):
            if jit:
                raise UnsupportedError(
                    "jit_compile=True compiles the step of one replica. Received: a state on a strategy with "
                    f"{strategy.num_replicas_in_sync} replicas. Drop it."
                )
        elif jit is None:
            parameters = [variable for state in states for variable in state.variables.parameters.values()]
            jit = needs_xla([state.recipe.policy for state in states], parameters, stacklevel=6)
        # AutoGraph would rewrap exceptions raised while tracing, so that they reach the user as other ones.
        return tf.function(program, autograph=False, jit_compile=jit)  # type: ignore[no-any-return]  # untyped


def build_models(states: States, loss_fn: LossFunction, batch: Any) -> None:
    """Create the variables of models that are not built, by tracing `loss_fn` once and running nothing."""
    if all(state.is_ready for state in states):
        return

    def trace(batch: Any) -> None:
        _check_rows(batch)
        loss_fn(_bound(states), batch)

    tf.function(trace, autograph=False).get_concrete_function(batch)
    for state in states:
        if not state.is_ready:
            state.finish_building()


def full_step(states: States, loss_fn: LossFunction, batch: Any) -> StepResult:
    """Both halves for one state."""
    loss, aux, gradients = differentiate(states, loss_fn, batch, states[0].recipe.accumulate_steps)
    with tf.control_dependencies(_what_may_fail(loss, aux)):
        (result,) = update(states, gradients, "all")
    return result._replace(loss=loss, aux=aux)


def _what_may_fail(loss: Any, aux: Any) -> list[Any]:
    """What an update waits for beside the gradients, which may be known before `loss_fn` has failed: its results, and
    assertions and other operations that nothing depends on."""
    if tf.executing_eagerly():
        return []
    stateful = [op for op in tf.compat.v1.get_default_graph().get_operations() if op.op_def.is_stateful]
    return [tf.group(loss, *_present(aux), *stateful)]


def differentiate(states: States, loss_fn: LossFunction, batch: Any, count: int) -> tuple[Any, Any, list[Gradients]]:
    """Unscaled loss, aux and gradients over `count` micro-batches and all replicas. The states' variables end as they
    began, but for the random-number streams: they have moved on by `count` forward passes (S12). An error takes
    them back, unless it comes while a graph runs."""
    _check_rows(batch)
    streams = [state.read_rng() for state in states]
    statistics = [state.read_statistics() for state in states]

    def put_back(*, failed: bool) -> None:
        values = [{**own, **more} for own, more in zip(statistics, streams, strict=True)] if failed else statistics
        replicas.together(lambda _, values: _put_back(states, values), values)

    try:
        scaled = _accumulated(states, loss_fn, batch, count)
        after = [state.read_statistics() for state in states]
    except BaseException:
        put_back(failed=True)
        raise
    put_back(failed=False)
    mean_loss, sums = mean([scaled.loss, scaled.gradients])
    scaler = states[0].recipe.loss_scaler
    scale = states[0].scale_state.scale if scaler.scales else None
    found = []
    for state, values, running in zip(states, sums, after, strict=True):
        unscaled: dict[str, Any] = dict.fromkeys(state.variables.parameters)
        for name, value in values.items():
            divided = value if scale is None else value / tf.cast(scale, value.dtype)
            unscaled[name] = tf.cast(divided, state.variables.parameters[name].dtype)
        found.append(Gradients(unscaled, mean(running)))
    return mean_loss, stacked(scaled.aux), found


def _check_rows(batch: Any) -> None:
    """Refuse an empty batch, when a shape is traced for the first time."""
    check_has_rows(leaf.shape[0] for _, leaf in leaves(batch) if tf.is_tensor(leaf) and leaf.shape.rank)


def _put_back(states: States, values: Sequence[Any]) -> None:
    for state, own in zip(states, values, strict=True):
        state.put_back(own)


def update(states: States, gradients: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and scale adjustment for states that share a scaler (S14)."""
    values = [_fitting(state, item) for state, item in zip(states, gradients, strict=True)]
    measured = [norm_and_flag(list(item.values())) for item in values]
    every = tf.reduce_all(tf.stack([finite for _, finite in measured]))
    return [
        _updated(state, own, item.running, norm, every if skip == "all" else finite, every)
        for state, own, item, (norm, finite) in zip(states, values, gradients, measured, strict=True)
    ]


def _updated(
    state: TensorFlowState, gradients: dict[str, Any], running: Any, norm: Any, use: Any, every: Any
) -> StepResult:
    recipe = state.recipe
    unused = [variable for name, variable in state.variables.parameters.items() if name not in gradients]

    def commit(values: list[Any], norm: Any) -> None:
        if recipe.clip_norm is not None:
            factor = refusals.clip_factor(norm, recipe.clip_norm, XP)
            values = [value * tf.cast(factor, value.dtype) for value in values]
        state.commit(dict(zip(gradients, values, strict=True)))

    def decide(run: replicas.Run, values: Any, running: Any, norm: Any, use: Any, every: Any) -> None:
        def apply() -> None:
            state.accept(running)
            with replicas.reduced_already(state.optimizer), leaving_alone(state.optimizer, unused):
                run(commit, values, norm)

        if recipe.loss_scaler.checks:
            tf.cond(replicas.shared(use), apply, lambda: None)
            state.adjust_scale(replicas.shared(every))
        else:
            apply()

    replicas.together(decide, list(gradients.values()), running, norm, use, every)
    skipped = tf.logical_not(use) if recipe.loss_scaler.checks else tf.constant(False)
    return StepResult(None, None, norm, state.scale_state.scale, skipped, state.step)


def _fitting(state: TensorFlowState, gradients: Gradients) -> dict[str, Any]:
    """The gradients that there are, dense, in the parameters' order and at least in float32.

    Raises:
        GradientError: they do not fit the state, or every one is None.
    """
    parameters, received = state.variables.parameters, gradients.values
    if not isinstance(received, dict):
        raise GradientError(
            f"gradients.values must be a dict of parameter path -> tensor. Received: {type(received).__name__}."
        )
    _check(parameters, received)
    found = {}
    for name, parameter in parameters.items():
        if received[name] is None:
            continue
        value = dense(received[name], parameter)
        if not is_floating(value):
            raise GradientError(f"the gradient of {name!r} must be floating. Received dtype: {value.dtype.name}.")
        found[name] = tf.cast(value, at_least_float32(value.dtype))
    return found


def _check(parameters: dict[str, Any], gradients: dict[str, Any]) -> None:
    refusals.check_gradients(
        [(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in gradients.items()],
    )


def _accumulated(states: States, loss_fn: LossFunction, batch: Any, count: int) -> _Scaled:
    """Mean loss, stacked aux and mean scaled gradients (S8): the first micro-batch, then a loop over the others.

    The first one stands before the loop because it tells the loop the structure of aux; the graph holds two copies of
    the model whatever the number of micro-batches. Both tell which parameters have gradients, since `loss_fn` is run
    for each copy: what either of them uses is used.
    """
    if count == 1:
        return _scaled(states, loss_fn, batch)
    parts = _micro_batches(batch, count)

    def part(index: Any) -> _Scaled:
        return _scaled(states, loss_fn, keras.tree.map_structure(lambda leaf: leaf[index], parts))

    first = part(0)
    used = [set(own) for own in first.gradients]
    sums = [first.loss, [_with_zeros(own, state) for own, state in zip(first.gradients, states, strict=True)]]
    stacks = [
        tf.TensorArray(leaf.dtype, count, element_shape=leaf.shape, clear_after_read=False).write(0, leaf)
        for leaf in _present(first.aux)
    ]

    def body(index: Any, sums: Any, stacks: Any) -> Any:
        other = part(index)
        loss, totals = sums
        added = [loss + other.loss, [dict(own) for own in totals]]
        for names, own, more in zip(used, added[1], other.gradients, strict=True):
            names.update(more)
            own.update({name: own[name] + value for name, value in more.items()})
        written = [s.write(index, leaf) for s, leaf in zip(stacks, _present(other.aux), strict=True)]
        return index + 1, added, written

    _, sums, stacks = tf.while_loop(
        lambda index, *_: index < count, body, (tf.constant(1), sums, stacks), parallel_iterations=1
    )
    loss, gradients = keras.tree.map_structure(lambda total: total / tf.cast(count, total.dtype), sums)
    gradients = [
        {n: value for n, value in own.items() if n in names} for own, names in zip(gradients, used, strict=True)
    ]
    stacked = iter([stack.stack() for stack in stacks])
    return _Scaled(loss, _map_present(lambda _: next(stacked), first.aux), gradients)


def _with_zeros(gradients: dict[str, Any], state: TensorFlowState) -> dict[str, Any]:
    """One for every parameter."""
    return {
        name: gradients[name] if name in gradients else tf.zeros(variable.shape, at_least_float32(variable.dtype))
        for name, variable in state.variables.parameters.items()
    }


def _micro_batches(batch: Any, count: int) -> Any:
    """The batch with every leaf shaped (count, micro-batch, ...), from a batch to split or a list of micro-batches."""
    if isinstance(batch, list):
        refusals.check_micro_batches(
            [[(path, tuple(leaf.shape)) for path, leaf in leaves(part)] for part in batch], count
        )
        return keras.tree.map_structure(lambda *members: tf.stack(members), *batch)
    size = refusals.micro_batch_size([(path, tuple(leaf.shape)) for path, leaf in leaves(batch)], count)
    return keras.tree.map_structure(lambda leaf: tf.reshape(leaf, (count, size, *leaf.shape[1:])), batch)


def _scaled(states: States, loss_fn: LossFunction, batch: Any) -> _Scaled:
    """Loss and scaled gradients of one micro-batch. `loss_fn` runs with the models' layers under their policies.

    Raises:
        LossError: no scalar loss, or one that depends on no parameter.
    """
    scaler = states[0].recipe.loss_scaler
    parameters = [state.variables.parameters for state in states]
    watched = [raw(variable) for own in parameters for variable in own.values()]
    with contextlib.ExitStack() as stack:
        tape = tf.GradientTape(watch_accessed_variables=False)
        stack.enter_context(ending(functools.partial(tape.__exit__, None, None, None)))
        tape.__enter__()
        tape.watch(watched)
        for state in states:  # inside the tape, which must see the casts of variables
            stack.enter_context(layer_policies(state.model, state.recipe.policy))
        with awaited(states):
            loss, aux = refusals.split_result(loss_fn(_bound(states), batch))
        loss = scale_loss(loss, None, what="loss_fn")
        scaled = loss * states[0].scale_state.scale if scaler.scales else loss
    flat = iter(tape.gradient(scaled, watched))  # a parameter that several states share gets its whole gradient in each
    found = [{n: (v, g) for n, v in own.items() if (g := next(flat)) is not None} for own in parameters]
    if not any(found):
        raise LossError("loss_fn depends on none of the model's trainable parameters, so there is nothing to update.")
    gradients = [{name: dense_wide(value, variable) for name, (variable, value) in own.items()} for own in found]
    return _Scaled(loss, _map_present(lambda leaf: tf.convert_to_tensor(raw(leaf)), aux), gradients)


def _present(tree: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def _map_present(function: Callable[[Any], Any], tree: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), tree)


def _bound(states: States) -> Any:
    models = tuple(BoundModel(state.model, state.recipe.policy) for state in states)
    return models[0] if len(models) == 1 else models
