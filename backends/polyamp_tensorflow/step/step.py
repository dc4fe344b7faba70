"""Training step of one state as graph code, and building of models by their first batch.

accumulate_gradients: loss * scale -> gradients, summed over micro-batches -> / (scale * N)          (S6 to S8)
update:        norm and finite flag -> clip -> optimizer under tf.cond -> scale adjustment    (S9 to S15)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.monitor.slots import MonitorSelection
from polyamp.results import LossFunction, StepResult
from polyamp.rules.loss_weights import WeightFunction
from polyamp_tensorflow.step.accumulation import accumulate_gradients
from polyamp_tensorflow.step.forward_backward import check_rows, policy_modules, present_leaves
from polyamp_tensorflow.step.output_figures import watch_pass, with_figures
from polyamp_tensorflow.step.state import States
from polyamp_tensorflow.step.update import update_states


def build_models(states: States, loss_fn: LossFunction, batch: Any) -> None:
    """Create the variables of unbuilt models by tracing `loss_fn` once, without running it."""
    if all(state.is_ready for state in states):
        return

    def trace(batch: Any) -> None:
        check_rows(batch)
        loss_fn(policy_modules(states), batch)

    tf.function(trace, autograph=False).get_concrete_function(batch)
    for state in states:
        if not state.is_ready:
            state.finish_building()


def train_step(
    states: States,
    loss_fn: LossFunction,
    batch: Any,
    weight: WeightFunction | None = None,
    monitor: MonitorSelection | None = None,
) -> StepResult:
    """Run both halves of the step for one state."""
    watches = monitor is not None and bool(monitor.activations or monitor.products)
    if monitor is not None and watches:
        loss_fn = watch_pass(states[0].model, loss_fn, monitor)
    loss, aux, gradients = accumulate_gradients(states, loss_fn, batch, states[0].recipe.accumulate_steps, weight)
    with tf.control_dependencies(_failure_dependencies(loss, aux)):
        (result,) = update_states(states, gradients, "all", monitor)
    if monitor is not None and watches:
        slots, aux = with_figures(result.monitor, aux, monitor)
        result = result._replace(monitor=slots)
    return result._replace(loss=loss, aux=aux)


def _failure_dependencies(loss: Any, aux: Any) -> list[Any]:
    """Return the operations that an update waits for, since gradients may be computed before `loss_fn` fails: its
    results, and assertions and other stateful operations."""
    if tf.executing_eagerly():
        return []
    stateful = [op for op in tf.compat.v1.get_default_graph().get_operations() if op.op_def.is_stateful]
    return [tf.group(loss, *present_leaves(aux), *stateful)]
