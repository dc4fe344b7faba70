"""`inspect_setup`: measures a training of Keras's that does not use polyamp (`InspectsSetups`).

The pass and the update run on the model itself, whose variables are put back; the update is that of a copy of the
optimizer.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from polyamp.contract.casting_report import OperationCount
from polyamp.errors import ArgumentError, describe_value
from polyamp.float_formats import HALF_DTYPES
from polyamp.linter.setup_figures import SensitiveOperation, SetupFigures, TrainingSetup, WeightFigures
from polyamp.rules.step_checks import check_loss, split_loss_and_aux
from polyamp_keras.arrays import dtype_name, native_variable
from polyamp_keras.engines.tensorflow import to_dense
from polyamp_keras.models.layers import check_is_model, is_built, list_layers, replace_calls
from polyamp_keras.models.variables import model_variables
from polyamp_tensorflow.arrays import to_numpy
from polyamp_tensorflow.observe.capture import run_eagerly
from polyamp_tensorflow.observe.model_copy import model_copy
from polyamp_tensorflow.observe.op_dtypes import OpDtypeRecorder

_SOFTMAXES: Final = frozenset(
    {"Softmax", "LogSoftmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
)
_NORMS: Final = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "LRN", "EuclideanNorm"})
_STATISTICS: Final = frozenset({"Mean", "Sum", "SquaredDifference", "Square", "Pow", "Sqrt", "Rsqrt"})
"""What a normalisation layer is made of."""
_HALVINGS: Final = 40
"""How often a scale whose gradients overflow is halved, from 2^24 to 2^-16."""


def inspect_setup(setup: TrainingSetup) -> SetupFigures:
    """Measure a set-up (`InspectsSetups.inspect_setup`)."""
    optimizer, scaler = _checked(setup)
    parameters = model_variables(setup.model).parameters
    figures = SetupFigures(
        backend="tensorflow",
        weights=[
            WeightFigures(name=name, dtype=dtype_name(variable), moments=_moments(optimizer, variable))
            for name, variable in parameters.items()
        ],
        scales=scaler is not None,
        scaler_name="keras.optimizers.LossScaleOptimizer",
    )
    if optimizer is not None:  # what the layers' policies say, without a pass
        computes = {str(each.layer.compute_dtype) for each in list_layers(setup.model) if each.layer.weights}
        figures = msgspec.structs.replace(figures, dtypes=sorted(computes))
    if not setup.runs:
        return figures
    with model_copy(setup.model, wide=False, inference=False) as model, run_eagerly():
        return _measure_pass(figures, setup, model, list(parameters.values()), optimizer, scaler)


def _checked(setup: TrainingSetup) -> tuple[Any, Any]:
    """Return the optimizer that updates, and what scales the loss, or raise for what Keras does not take."""
    check_is_model(setup.model)
    if not is_built(setup.model):
        raise ArgumentError("lint: model must be built. Call it once on a batch, or model.build(shape), before.")
    if setup.step is not None or setup.opt_state is not None:
        name, value = ("step", "torch") if setup.step is not None else ("opt_state", "JAX")
        raise ArgumentError(f"lint: {name} is for {value}. Leave {name}= out.")
    optimizer = setup.optimizer if setup.optimizer is not None else getattr(setup.model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ArgumentError(f"lint: optimizer must be a Keras optimizer. Received: {describe_value(optimizer)}.")
    scaler = setup.scaler if setup.scaler is not None else optimizer
    if setup.scaler is not None and not isinstance(scaler, keras.optimizers.LossScaleOptimizer):
        raise ArgumentError(
            f"lint: scaler must be a keras.optimizers.LossScaleOptimizer. Received: {describe_value(scaler)}."
        )
    scaler = scaler if isinstance(scaler, keras.optimizers.LossScaleOptimizer) else None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer, scaler


def _moments(optimizer: Any, variable: Any) -> dict[str, str]:
    """Return the dtypes of the optimizer's variables that are named after a parameter and have its shape."""
    if optimizer is None or not isinstance(variable, keras.Variable):
        return {}
    prefix = f"{variable.path.replace('/', '_')}_"
    return {
        each.name.removeprefix(prefix): dtype_name(each)
        for each in optimizer.variables
        if each.name.startswith(prefix) and each.shape == variable.shape
    }


class _ForwardPass(NamedTuple):
    """A pass. Attributes: operations; the tape, which is persistent; the loss in float32."""

    rows: list[OperationCount]
    tape: Any
    loss: Any


def _measure_pass(
    figures: SetupFigures, setup: TrainingSetup, model: Any, parameters: list[Any], optimizer: Any, scaler: Any
) -> SetupFigures:
    """Return the figures with those of a pass, and of an update if there is an optimizer."""
    done = _forward(setup, model)
    layers = {each.stable_path: each.layer for each in list_layers(model)}
    operations = [
        SensitiveOperation(row.module, row.name, row.dtype, kind)
        for row in done.rows
        if set(row.dtype.split(", ")) <= set(HALF_DTYPES) and (kind := _kind(row, layers)) is not None
    ]
    last = next((row.module for row in reversed(done.rows) if row.rule == "compute"), "")
    weights = [each for each in layers[last].weights if len(each.shape) > 1] if last in layers and last else []
    figures = msgspec.structs.replace(
        figures,
        operations=operations,
        dtypes=sorted({dtype for row in done.rows for dtype in row.dtype.split(", ")}),
        head={f"{last}/{each.name}": dtype_name(each) for each in weights} or None,
    )
    gradients = None if optimizer is None else _gradients(done, parameters, _scale(scaler))
    if gradients is None:
        return figures
    return msgspec.structs.replace(figures, weights=_measure_update(figures.weights, optimizer, parameters, gradients))


def _forward(setup: TrainingSetup, model: Any) -> _ForwardPass:
    recorder = OpDtypeRecorder(enabled=True)
    calls = ((each.layer, recorder.wrap_call(each.layer, each.stable_path)) for each in list_layers(model))
    with replace_calls(calls), tf.GradientTape(persistent=True) as tape:
        with recorder.record_ops():
            loss, _ = split_loss_and_aux(setup.loss_fn(model, setup.batch))
        check_loss(tuple(loss.shape), dtype_name(loss))
        loss = tf.cast(tf.reshape(loss, ()), tf.float32)
    return _ForwardPass(recorder.rows(), tape, loss)


def _kind(row: OperationCount, layers: dict[str, Any]) -> Any:
    """Return which kind of `SensitiveOperation` a row is, or None."""
    if row.name in _SOFTMAXES:
        return "softmax"
    named = "norm" in type(layers.get(row.module)).__name__.lower()
    return "norm" if row.name in _NORMS or (named and row.name in _STATISTICS) else None


def _scale(scaler: Any) -> float:
    if scaler is None:
        return 1.0
    return float(to_numpy(scaler.dynamic_scale)) if scaler.built else float(scaler.initial_scale)


def _gradients(done: _ForwardPass, parameters: list[Any], scale: float) -> list[Any] | None:
    """Return unscaled gradients, None for a parameter without one; None if no scale makes them finite."""
    native = [native_variable(each) for each in parameters]
    for _ in range(_HALVINGS):
        found = [
            None if each is None else to_dense(each, variable)
            for each, variable in zip(
                done.tape.gradient(done.loss, native, output_gradients=tf.constant(scale)), native, strict=True
            )
        ]
        if all(each is None or bool(tf.reduce_all(tf.math.is_finite(each))) for each in found):
            return [None if each is None else tf.cast(tf.cast(each, tf.float32) / scale, each.dtype) for each in found]
        if scale == 1.0:
            return None
        scale = max(scale / 2, 1.0)
    return None


def _measure_update(
    weights: list[WeightFigures], optimizer: Any, parameters: list[Any], gradients: list[Any]
) -> list[WeightFigures]:
    """Return the figures with what one update of a copy of the optimizer moves.

    With a learning rate of zero, as in the first step of a warmup, none counts as measured.
    """
    before = [np.array(to_numpy(each)) for each in parameters]  # an array may share memory with its variable
    try:
        other = type(optimizer).from_config(optimizer.get_config())
        other.build(parameters)
        if optimizer.built:
            for mine, own in zip(other.variables, optimizer.variables, strict=True):
                mine.assign(native_variable(own))
        rate = float(to_numpy(other.learning_rate))
        pairs = [pair for pair in zip(gradients, parameters, strict=True) if pair[0] is not None]
        other.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])
    except Exception as error:
        raise ArgumentError(
            f"lint: one step of a copy of the optimizer raises {type(error).__name__}: {error}. Leave optimizer= out, "
            "of an uncompiled model."
        ) from error
    measured = []
    for each, variable, old, gradient in zip(weights, parameters, before, gradients, strict=True):
        if gradient is not None and rate:
            acts = to_numpy(gradient) != 0
            unmoved = int(np.count_nonzero(acts & (to_numpy(variable) == old)))
            each = msgspec.structs.replace(
                each, moments=_moments(other, variable), with_gradient=int(np.count_nonzero(acts)), unmoved=unmoved
            )
        measured.append(each)
    return measured
