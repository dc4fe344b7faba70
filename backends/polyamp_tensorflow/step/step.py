"""The whole training step of one state as graph code, and models that their first batch builds.

    differentiate: loss * scale -> gradients, summed over micro-batches -> / (scale * N)          (S6 to S8)
    update:        norm and finite flag -> clip -> optimizer under tf.cond -> scale adjustment    (S9 to S15)

Called by the backend, which has `graph` trace it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp.results import LossFunction, StepResult
from polyamp.rules.weights import WeightFunction
from polyamp_tensorflow.step.differentiate import bound, check_rows, differentiate, present
from polyamp_tensorflow.step.state import States
from polyamp_tensorflow.step.update import update


def build_models(states: States, loss_fn: LossFunction, batch: Any) -> None:
    """Create the variables of models that are not built, by tracing `loss_fn` once and running nothing."""
    if all(state.is_ready for state in states):
        return

    def trace(batch: Any) -> None:
        check_rows(batch)
        loss_fn(bound(states), batch)

    tf.function(trace, autograph=False).get_concrete_function(batch)
    for state in states:
        if not state.is_ready:
            state.finish_building()


def full_step(states: States, loss_fn: LossFunction, batch: Any, weight: WeightFunction | None = None) -> StepResult:
    """Both halves for one state."""
    loss, aux, gradients = differentiate(states, loss_fn, batch, states[0].recipe.accumulate_steps, weight)
    with tf.control_dependencies(_what_may_fail(loss, aux)):
        (result,) = update(states, gradients, "all")
    return result._replace(loss=loss, aux=aux)


def _what_may_fail(loss: Any, aux: Any) -> list[Any]:
    """What an update waits for beside the gradients, which may be known before `loss_fn` has failed: its results, and
    assertions and other operations that nothing depends on."""
    if tf.executing_eagerly():
        return []
    stateful = [op for op in tf.compat.v1.get_default_graph().get_operations() if op.op_def.is_stateful]
    return [tf.group(loss, *present(aux), *stateful)]
