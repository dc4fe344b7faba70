"""pytorch-ignite: its tests of the trainer that scales the loss."""

from tests.downstream.package import Package

PACKAGE = Package(
    "pytorch-ignite",
    "0.5.5",
    "torch",
    "tests of `create_supervised_trainer` and of the evaluator",
    ("torch.autocast", "torch.amp.GradScaler"),
    ("tests/ignite/engine/test_create_supervised.py",),
    differences={
        "test_create_supervised_trainer_scaler_not_amp": "The test takes the scaler's text for a regular "
        "expression. The text of polyamp's has its settings between parentheses."
    },
)
