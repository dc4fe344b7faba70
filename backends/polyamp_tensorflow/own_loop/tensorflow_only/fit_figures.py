"""`FitFigures`: what a `LossScaleOptimizer` collects in `fit` for a monitor, in variables on the device (S35)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.monitor.slots import EXPONENT_FIELDS, MonitorSelection, MonitorSlots
from polyamp.results import StepResult
from polyamp_keras.arrays import native_variable
from polyamp_keras.own_loop.scaler_state import ApplyCall, is_last_micro_batch, weight_sum
from polyamp_tensorflow.arrays import assign_values
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sum
from polyamp_tensorflow.step.monitor_slots import MonitoredUpdate


class _ReplicaFigures(NamedTuple):
    """Values of one replica for the variables of all.

    Attributes:
        loss_sum: the weighted sum of the accumulation's losses so far.
        completes: whether this call completes the accumulation; None without accumulation.
        values: name -> value, of the figures of an update.
    """

    loss_sum: Any
    completes: Any
    values: dict[str, Any]


class FitFigures:
    """Figures of the last update that was traced with them; made in the scope of the model's strategy.

    Args:
        parameters: path -> trainable variable of the model.
        selection: what is collected.
    """

    def __init__(self, parameters: Mapping[str, Any], selection: MonitorSelection) -> None:
        self.parameters = parameters
        self._selection = selection
        self._names = {id(native_variable(variable)): name for name, variable in parameters.items()}
        self._losses = threading.local()  # each replica is traced in a thread of its own
        self._loss_sum = tf.Variable(0.0, trainable=False)
        self._variables = {
            name: tf.Variable(tf.zeros(shape, dtype), trainable=False)
            for name, (shape, dtype) in _figure_shapes(selection, list(parameters)).items()
        }

    def see_loss(self, loss: Any, weight: Any) -> None:
        """Take this replica's loss, before it is scaled, and its micro-batch's weight; of a vector, its sum."""
        total = tf.reduce_sum(tf.cast(native_variable(loss), tf.float32))
        self._losses.value = total if weight is None else total * weight

    def begin(self, call: ApplyCall, gradients: Sequence[Any], result: StepResult) -> UpdateFigures:
        """Measure the unscaled gradients of a call's variables, in each replica, before anything is written."""
        return UpdateFigures(self, call, gradients, result)

    def sum_losses(self, call: ApplyCall) -> Any:
        """Return the weighted sum of the accumulation's losses with this call's; NaN if `scale_loss` saw none."""
        loss = vars(self._losses).pop("value", None)
        if loss is None:
            return tf.constant(float("nan"))
        (loss,) = all_reduce_sum([loss])
        if not call.state.sums:
            return loss
        before = native_variable(self._loss_sum) * (1.0 if call.share is None else call.share.earlier)
        return loss + tf.where(tf.equal(native_variable(call.state.micro_step), 0), 0.0, before)

    def measure(self, call: ApplyCall, gradients: Sequence[Any], scale: Any) -> MonitoredUpdate:
        """Return the collector of the slots of an update."""
        unused = set(map(id, call.unused))
        named = {
            self._names[id(native_variable(variable))]: gradient
            for variable, gradient in zip(call.variables, gradients, strict=True)
            if id(native_variable(variable)) in self._names and id(variable) not in unused
        }
        return MonitoredUpdate(self._selection, self.parameters, named, scale)

    def write(self, found: _ReplicaFigures) -> None:
        """Write the figures of all replicas, which are equal; those of an update when it is complete."""
        replicas.merge_replica_calls(self._write, found)

    def _write(self, _: replicas.ReplicaRun, found: _ReplicaFigures) -> None:
        self._loss_sum.assign(replicas.read_shared(found.loss_sum))
        values = {name: replicas.read_shared(value) for name, value in found.values.items()}

        def assign() -> None:
            assign_values([self._variables[name] for name in values], values.values())

        if found.completes is None:
            assign()
        else:
            tf.cond(replicas.read_shared(found.completes), assign, lambda: None)

    def read(self) -> StepResult:
        """Return the figures as the result of a step, in tensors on the device."""
        values = {name: tf.convert_to_tensor(variable) for name, variable in self._variables.items()}
        return StepResult(
            loss=values.pop("loss"),
            aux=None,
            grad_norm=values.pop("grad_norm"),
            scale=values.pop("next_scale"),
            skipped=values.pop("skipped") > 0,
            step=values.pop("step"),
            monitor=MonitorSlots(read=tf.constant(True), carried=tf.constant(1.0), **values),
        )


class UpdateFigures:
    """Figures of one call of `apply` in one replica; made before anything is written, written after it.

    Args:
        figures: where they are written.
        call: the call.
        gradients: unscaled gradients of its variables.
        result: what was decided.
    """

    def __init__(self, figures: FitFigures, call: ApplyCall, gradients: Sequence[Any], result: StepResult) -> None:
        self._figures = figures
        self._loss_sum = figures.sum_losses(call)
        self._completes = is_last_micro_batch(call) if call.state.sums else None
        weight = weight_sum(call)
        self._values = {
            "loss": self._loss_sum / (tf.where(weight > 0.0, weight, 1.0) if call.state.sums else 1.0),
            "grad_norm": tf.cast(result.grad_norm, tf.float32),
            "next_scale": tf.identity(result.scale),
            "skipped": tf.cast(result.skipped, tf.int32),
            "step": tf.cast(result.step, tf.int32),
        }
        self._slots = figures.measure(call, gradients, call.optimizer.scale_state.scale)

    def write(self) -> None:
        """Write the figures, after the update."""
        slots = self._slots.finish()._asdict()
        kept = {name: value for name, value in slots.items() if value is not None and name not in ("read", "carried")}
        self._figures.write(_ReplicaFigures(self._loss_sum, self._completes, {**self._values, **kept}))


def _figure_shapes(selection: MonitorSelection, parameters: Sequence[str]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shape and dtype of every figure of an update by name."""
    count = len(selection.modules_of(parameters))
    counts, norms = ((count, EXPONENT_FIELDS), tf.int32), ((count,), tf.float32)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        **dict.fromkeys(("loss", "grad_norm", "scale", "next_scale"), ((), tf.float32)),
        **dict.fromkeys(("skipped", "step"), ((), tf.int32)),
    }
    if count and selection.gradients:
        shapes.update(gradients=counts, gradient_norms=norms)
    if count and selection.weights:
        shapes["weights"] = counts
    if count and (selection.weights or selection.updates):
        shapes["weight_norms"] = norms
    if count and selection.updates:
        shapes["update_norms"] = norms
    return shapes
