"""Accelerate: its own tests, all in bfloat16."""

from tests.downstream.package import Package

PACKAGE = Package(
    "accelerate",
    "1.15.0",
    "torch",
    "tests of the accelerator, its checkpoints, optimizer and schedules, in bfloat16",
    ("accelerate.Accelerator",),
    tuple(f"tests/test_{name}.py" for name in ("accelerator", "optimizer", "scheduler", "state_checkpointing")),
    requires=("parameterized==0.9.0",),
    differences={
        "AcceleratorTester::test_can_unwrap_model": "The test passes `mixed_precision='no'`, and the environment of "
        "these runs asks for bf16. polyamp refuses two requests that contradict each other."
    },
    environment={"ACCELERATE_MIXED_PRECISION": "bf16"},
)
