"""pytorch-ignite: its tests of the trainer that scales the loss."""

from tests.downstream.package import Package

PACKAGE = Package(
    "pytorch-ignite",
    "0.5.5",
    "torch",
    "tests of `create_supervised_trainer` and of the evaluator",
    ("torch.autocast", "torch.amp.GradScaler"),
    ("tests/ignite/engine/test_create_supervised.py",),
)
