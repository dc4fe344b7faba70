"""timm: the loop of its train.py, with its `NativeScaler`. The script itself is in no distribution."""

from tests.downstream.package import Package

PACKAGE = Package(
    "timm",
    "1.0.31",
    "torch",
    "the loop of its train.py in float16, with its scaler, optimizers, clipping, schedule and average",
    ("torch.autocast", "torch.amp.GradScaler"),
    program="timm_training.py",
    requires=("torchvision==0.28.0",),  # the release for torch 2.13
)
