"""transformers: runs of its `Trainer`."""

from tests.downstream.package import Package

PACKAGE = Package(
    "transformers",
    "5.23.0",
    "torch",
    "`Trainer` runs of small GPT-2 and Llama models in bfloat16",
    ("accelerate.Accelerator",),
    program="transformers_trainer.py",
    requires=("accelerate==1.15.0",),
)
