"""Known defects and surprises of TensorFlow and Keras in mixed precision, for the doctor. Versions are TensorFlow's.
The tests reproduce those of the CPU."""

from __future__ import annotations

from typing import Final

from polyamp.doctor.measurements import KnownTrap

TRAPS: Final = (
    KnownTrap(
        summary="keras.mixed_precision.LossScaleOptimizer has neither a smallest nor a largest scale: overflows take "
        "it to 0, and the next step writes inf or NaN into the weights; growth takes it to inf, and updates become 0.",
        advice="polyamp_tensorflow.LossScaleOptimizer keeps the scale within limits and raises (S10, S17).",
        source="https://keras.io/api/mixed_precision/loss_scale_optimizer/",
        first="2.19",
        last="2.21",
    ),
    KnownTrap(
        summary="compile() adds loss scaling only if the model's own policy is mixed_float16: with float16 in some "
        "layers alone gradients are not scaled, and nothing says so.",
        advice="polyamp.init chooses the scaler by the policy of all layers.",
        source="https://keras.io/api/mixed_precision/policy/",
        first="2.19",
        last="2.21",
    ),
    KnownTrap(
        summary="Products of float32 tensors run in TF32 on GPUs that have it.",
        advice="For float32 baselines: tf.config.experimental.enable_tensor_float_32_execution(False).",
        source="https://www.tensorflow.org/api_docs/python/tf/config/experimental/enable_tensor_float_32_execution",
        first="2.19",
        last="2.21",
        devices=("gpu",),
    ),
)
