"""Keras: its own tests of the loss-scale optimizer and of what wraps one, on TensorFlow."""

from tests.downstream.package import Package

_BY_HAND = (
    *("apply_with_no_vars", "downscaling_stateful", "finite_step_stateful", "infinite_step_stateful"),
    *("iterations_update_stateful", "upscaling_stateful"),
)
_REASONS = {
    "finite_step_with_inner_loss_scale_stateful": "polyamp refuses a `loss_scale_factor` inside the wrapper: the loss "
    "would be scaled twice.",
    "finite_step_with_overwrite_stateful": "polyamp refuses variables that their gradient overwrites, as float8 layers "
    "have.",
    "init_dynamic_arg": "Both refuse `dynamic=False`. polyamp's message names its own way to a constant scale.",
    "serialization": "The configuration holds polyamp's settings too, and the test counts its entries.",
    **dict.fromkeys(
        _BY_HAND,
        "The tests scale gradients by hand. polyamp's `apply` refuses gradients of a loss that `scale_loss` did not "
        "scale.",
    ),
}

PACKAGE = Package(
    "keras",
    "3.15.1",
    "tensorflow",
    "tests of the loss-scale optimizer, and those of the trainer and of averaged weights that use it",
    ("keras.optimizers.LossScaleOptimizer",),
    (
        "keras/src/optimizers/loss_scale_optimizer_test.py",
        "keras/src/callbacks/swap_ema_weights_test.py",
        "keras/src/trainers/trainer_test.py::TestTrainer::test_adds_loss_scaling_optimizer",
    ),
    environment={"KERAS_BACKEND": "tensorflow"},
    differences={f"LossScaleOptimizerTest::test_{name}": reason for name, reason in _REASONS.items()},
)
