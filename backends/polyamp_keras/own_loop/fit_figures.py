"""`FitFigures`: what a `LossScaleOptimizer` collects in `fit` for a monitor, in variables on the device (S35)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import keras
import numpy as np

from polyamp.monitor.slots import (
    EXPONENT_FIELDS,
    MonitorSelection,
    MonitorSlots,
    SlotFunctions,
    add_update_norms,
    collect_slots,
)
from polyamp.results import StepResult
from polyamp_keras.arrays import native_variable, read_value, variable_key
from polyamp_keras.engine import ENGINE
from polyamp_keras.own_loop.scaler_state import ApplyCall, is_last_micro_batch, weight_sum


class KerasSlots:
    """`SlotFunctions` of Keras's current backend, on torch and JAX. A parameter is whole in each process."""

    def exponent_counts(self, name: str, array: Any) -> Any:
        """Return how many elements have each exponent field."""
        wide = keras.ops.cast(keras.ops.reshape(array, (-1,)), "float32")
        fields = keras.ops.right_shift(ENGINE.bitcast(wide, "int32"), 23)
        fields = keras.ops.bitwise_and(fields, EXPONENT_FIELDS - 1)
        return keras.ops.cast(ENGINE.value_counts(fields, EXPONENT_FIELDS), "int32")

    def squares(self, name: str, array: Any) -> Any:
        """Return the sum of squares."""
        return keras.ops.sum(keras.ops.square(keras.ops.cast(array, "float32")))

    def stack(self, values: Sequence[Any]) -> Any:
        """Stack tensors."""
        return keras.ops.stack(values)

    def square_root(self, values: Any) -> Any:
        """Return the square root."""
        return keras.ops.sqrt(values)


class FitFigures:
    """Figures of the last update that was run, or traced, with them.

    Args:
        parameters: path -> trainable variable of the model.
        selection: what is collected.
    """

    functions: ClassVar[SlotFunctions] = KerasSlots()

    def __init__(self, parameters: Mapping[str, Any], selection: MonitorSelection) -> None:
        self.parameters = parameters
        self.selection = selection
        self._names = {variable_key(variable): name for name, variable in parameters.items()}
        self._losses = threading.local()  # each replica is traced in a thread of its own
        self._calls: list[UpdateFigures] = []
        self._variables = {
            name: keras.Variable(np.zeros(shape, dtype), dtype=dtype, trainable=False, name=f"monitor_{name}")
            for name, (shape, dtype) in _figure_shapes(selection, list(parameters)).items()
        }

    @property
    def variables(self) -> list[Any]:
        """The variables that hold the figures; also the sum of an accumulation's losses so far."""
        return list(self._variables.values())

    def see_loss(self, loss: Any) -> None:
        """Take this replica's loss of a micro-batch, before it is scaled; of a vector, its sum. Not called where no
        value of the pass reaches `apply`: there `write_losses` gets it."""
        wide = keras.ops.cast(keras.ops.stop_gradient(native_variable(loss)), "float32")
        self._losses.value = keras.ops.sum(wide)

    def begin(self, call: ApplyCall, gradients: Sequence[Any], result: StepResult) -> UpdateFigures:
        """Measure the unscaled gradients of a call's variables, in each replica, before anything is written."""
        return UpdateFigures(self, call, gradients, result)

    def take_loss(self) -> Any:
        """Return the loss that `see_loss` took, summed over the replicas; NaN if it took none."""
        loss = vars(self._losses).pop("value", None)
        return np.float32(np.nan) if loss is None else self.sum_over_replicas(loss)

    def named_gradients(self, call: ApplyCall, gradients: Sequence[Any]) -> dict[str, Any]:
        """Return path -> gradient of the call's variables that have one."""
        unused = set(map(variable_key, call.unused))
        keys = [variable_key(variable) for variable in call.variables]
        pairs = zip(keys, gradients, strict=True)
        return {self._names[key]: each for key, each in pairs if key in self._names and key not in unused}

    def earlier_losses(self) -> Any:
        """Return the weighted sum of the losses of the accumulation's earlier micro-batches."""
        return read_value(self._variables["loss_sum"])

    def write(self, values: Mapping[str, Any], completes: Any) -> None:
        """Write figures by name, which all replicas have alike: those of each call, and if `completes` is true, or
        None, those of an update."""
        self.assign({name: value for name, value in values.items() if name in _OF_EACH_CALL})
        self.assign_if(completes, {name: value for name, value in values.items() if name not in _OF_EACH_CALL})

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign values to variables by name."""
        for name, value in values.items():
            self._variables[name].assign(value)

    def assign_if(self, flag: Any, values: Mapping[str, Any]) -> None:
        """Assign values to variables by name if a flag is true; None for always."""
        if flag is not None:
            values = {n: keras.ops.where(flag, new, native_variable(self._variables[n])) for n, new in values.items()}
        self.assign(values)

    def sum_over_replicas(self, loss: Any) -> Any:
        """Return the sum of a loss over the replicas; of one, the loss itself."""
        return loss

    def add_call(self, call: UpdateFigures) -> None:
        """Keep a call whose loss `write_losses` gets."""
        self._calls.append(call)

    def write_losses(self, losses: Sequence[Any]) -> None:
        """Write the losses of the calls since the last time, one each; NaN if they are not as many."""
        calls, self._calls = self._calls, []
        known = len(losses) == len(calls)
        for number, call in enumerate(calls):
            loss = keras.ops.cast(losses[number], "float32") if known else np.float32(np.nan)
            self.write(call.loss_values(loss), call.completes)

    def read(self) -> StepResult:
        """Return the figures as the result of a step, in tensors on the device that later updates do not change."""
        values = {name: keras.ops.copy(read_value(variable)) for name, variable in self._variables.items()}
        del values["loss_sum"]
        return StepResult(
            loss=values.pop("loss"),
            aux=None,
            grad_norm=values.pop("grad_norm"),
            scale=values.pop("next_scale"),
            skipped=values.pop("skipped") > 0,
            step=values.pop("step"),
            monitor=MonitorSlots(read=np.True_, carried=np.float32(1.0), **values),
        )


class UpdateFigures:
    """Figures of one call of `apply` in one replica; made before anything is written, written after it.

    Args:
        figures: where they are written.
        call: the call.
        gradients: unscaled gradients of its variables.
        result: what was decided.

    Attributes:
        completes: whether the call completes an accumulation, boolean scalar; None without accumulation.
    """

    def __init__(self, figures: FitFigures, call: ApplyCall, gradients: Sequence[Any], result: StepResult) -> None:
        state, weight = call.state, weight_sum(call)
        self._figures = figures
        self._share = call.share
        self._is_first = keras.ops.equal(native_variable(state.micro_step), 0) if state.sums else None
        self._divisor = keras.ops.where(weight > 0.0, weight, 1.0) if state.sums else 1.0
        self.completes = is_last_micro_batch(call) if state.sums else None
        self._values = {
            "grad_norm": keras.ops.cast(result.grad_norm, "float32"),
            "next_scale": keras.ops.copy(result.scale),
            "skipped": keras.ops.cast(keras.ops.convert_to_tensor(result.skipped), "int32"),
            "step": keras.ops.cast(result.step, "int32"),
        }
        if ENGINE.LOSS_REACHES_APPLY:
            self._values.update(self.loss_values(figures.take_loss()))
        self._old = self._parameters()
        self._slots = collect_slots(
            figures.selection._replace(updates=False),
            figures.functions,
            figures.named_gradients(call, gradients),
            self._old,
            {},
            read=None,
            scale=keras.ops.copy(read_value(state.scale.scale)),
            carried=None,
        )

    def loss_values(self, loss: Any) -> dict[str, Any]:
        """Return the accumulation's sum of losses with that of this call, and their mean."""
        total = loss if self._share is None else loss * self._share.weight
        if self._is_first is not None:
            earlier = self._figures.earlier_losses() * (1.0 if self._share is None else self._share.earlier)
            total = total + keras.ops.where(self._is_first, keras.ops.zeros_like(earlier), earlier)
        return {"loss_sum": total, "loss": total / self._divisor}

    def write(self) -> None:
        """Write the figures, after the update."""
        slots, selection = self._slots, self._figures.selection
        if selection.updates:
            slots = add_update_norms(slots, selection, self._figures.functions, self._old, self._parameters())
        found = {name: value for name, value in slots._asdict().items() if value is not None}
        self._figures.write({**self._values, **found}, self.completes)
        if not ENGINE.LOSS_REACHES_APPLY:
            self._figures.add_call(self)

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters' values now; copies if they are compared with later ones."""
        copy = keras.ops.copy if self._figures.selection.updates else (lambda value: value)
        return {name: copy(read_value(variable)) for name, variable in self._figures.parameters.items()}


_OF_EACH_CALL: Final = ("loss_sum",)
"""Figures that each micro-batch writes."""


def _figure_shapes(selection: MonitorSelection, parameters: Sequence[str]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every figure by name."""
    count = len(selection.modules_of(parameters))
    counts, norms = ((count, EXPONENT_FIELDS), "int32"), ((count,), "float32")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        **dict.fromkeys(("loss_sum", "loss", "grad_norm", "scale", "next_scale"), ((), "float32")),
        **dict.fromkeys(("skipped", "step"), ((), "int32")),
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
