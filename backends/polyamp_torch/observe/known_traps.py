"""Known defects and surprises of torch in mixed precision, for the doctor. The tests reproduce those of the CPU."""

from __future__ import annotations

from typing import Final

from polyamp.doctor.measurements import KnownTrap

TRAPS: Final = (
    KnownTrap(
        summary="torch.autocast leaves sum, softmax, layer_norm, exp and others in 16 bits on a CPU: a float16 sum of "
        "128,000 is inf. On CUDA they run in float32.",
        advice="polyamp's policies run them in float32 on every device (S4).",
        source="https://docs.pytorch.org/docs/stable/amp.html#cpu-op-specific-behavior",
        first="2.7",
        last="2.13",
        devices=("cpu",),
    ),
    KnownTrap(
        summary="torch.autocast caches the casts of weights until its block ends: a loop of steps inside one block "
        "trains on the first step's weights.",
        advice="Open a block for each forward pass, as polyamp's steps do.",
        source="https://docs.pytorch.org/docs/stable/amp.html#torch.autocast",
        first="2.7",
        last="2.13",
    ),
    KnownTrap(
        summary="torch.amp.GradScaler has no smallest scale: after about 170 overflows in a row it is 0, and the next "
        "finite step writes NaN into the weights.",
        advice="polyamp_torch.GradScaler keeps the scale above a floor and raises (S10, S17).",
        source="https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py",
        first="2.7",
        last="2.13",
    ),
    KnownTrap(
        summary="SGD(fused=True) does not update whole vectors of 16-bit parameters on a CPU.",
        advice="Keep parameters in float32, as mixed policies do, or leave fused=True out.",
        source="https://github.com/pytorch/pytorch/issues/191763",
        first="2.13",
        last="2.13",
        devices=("cpu",),
    ),
    KnownTrap(
        summary="torch.cuda.is_bf16_supported() is True on GPUs that emulate bfloat16.",
        advice="Ask with including_emulation=False, or read the verdict here.",
        source="https://github.com/pytorch/pytorch/pull/148322",
        first="2.7",
        last="2.13",
        devices=("cuda",),
    ),
)
