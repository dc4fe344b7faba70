"""Loss-scale rules of other libraries, transcribed by hand from their sources: the oracles of S16's table.

Each is a generator function of the flags (True: the gradients overflowed) that yields the scale after every step. They
share no code with polyamp's rule or each other, so that no mistake is common to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

FLOAT32_MAX: Final = (2.0 - 2.0**-23) * 2.0**127
PublishedRule = Callable[..., Iterator[float]]


def torch(flags: Sequence[bool], *, scale: float, interval: int) -> Iterator[float]:
    """pytorch 2.13, aten/src/ATen/native/cuda/AmpKernels.cu, `amp_update_scale_cuda_kernel`; factors 2 and 0.5."""
    tracker = 0
    for overflow in flags:
        if overflow:
            scale, tracker = scale * 0.5, 0
        elif tracker + 1 == interval:
            doubled = scale * 2.0
            scale, tracker = (doubled if doubled <= FLOAT32_MAX else scale), 0
        else:
            tracker += 1
        yield scale


def apex_hysteresis(flags: Sequence[bool], *, scale: float, interval: int, hysteresis: int) -> Iterator[float]:
    """NVIDIA/apex 6424da3b, csrc/update_scale_hysteresis.cu (NeMo and Lightning call it)."""
    growth_tracker, hysteresis_tracker = 0, hysteresis
    for overflow in flags:
        if overflow:
            hysteresis_tracker -= 1
            growth_tracker = 0
            if hysteresis_tracker <= 0:
                scale *= 0.5
        else:
            growth_tracker += 1
            if growth_tracker == interval:
                scale, growth_tracker = (scale if math.isinf(scale * 2.0) else scale * 2.0), 0
            hysteresis_tracker = hysteresis
        yield scale


def deepspeed(
    flags: Sequence[bool],
    *,
    scale: float,
    interval: int,
    hysteresis: int,
    consecutive: bool = False,
    floor: float = 1.0,
) -> Iterator[float]:
    """DeepSpeed 0.19.6, deepspeed/runtime/fp16/loss_scaler.py, `DynamicLossScaler.update_scale` (ZeRO).

    Ends where the source raises: at an overflow at the floor.
    """
    last_overflow, shifts_left = -1, hysteresis
    for iteration, overflow in enumerate(flags):
        if overflow:
            if hysteresis == 1 or shifts_left == 1:
                if scale == floor:
                    return
                scale = max(scale / 2.0, floor)
            else:
                shifts_left -= 1
            last_overflow = iteration
        else:
            if consecutive:
                shifts_left = hysteresis
            stable = iteration - last_overflow - 1
            if stable > 0 and stable % interval == 0:
                shifts_left = hysteresis
                scale *= 2.0
        yield scale


def megatron(
    flags: Sequence[bool], *, scale: float, interval: int, hysteresis: int, floor: float = 1.0
) -> Iterator[float]:
    """Megatron-LM d98e8a64dd, megatron/core/optimizer/grad_scaler.py, `DynamicGradScaler.update`; factors 2, 0.5."""
    growth, left = 0, hysteresis
    for overflow in flags:
        if overflow:
            growth = 0
            left -= 1
            if left <= 0:
                scale = max(scale * 0.5, floor)
        else:
            growth += 1
            if growth == interval:
                growth, left = 0, hysteresis
                scale = scale * 2.0
        yield scale


def flax(flags: Sequence[bool], *, scale: float, interval: int, floor: float = 2.0**-126) -> Iterator[float]:
    """flax 0.12.8, flax/training/dynamic_scale.py, `DynamicScale.value_and_grad`: the count before the step decides."""
    fin_steps = 0
    for overflow in flags:
        grow = fin_steps == interval
        if overflow:
            scale = max(scale * 0.5, floor)
        elif grow:
            scale = min(scale * 2.0, FLOAT32_MAX)
        fin_steps = 0 if grow or overflow else fin_steps + 1
        yield scale


OVERFLOWS: Final = [1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
"""The flags of S16's table, 1 for an overflow."""


class PublishedScaler(NamedTuple):
    """One row of S16's table.

    Attributes:
        rule: the transcription.
        arguments: its constants, besides the table's interval of 4 and initial scale of 16.
        settings: those of the scaler, likewise.
    """

    rule: PublishedRule
    arguments: dict[str, Any]
    settings: dict[str, Any]

    def scales(self) -> list[float]:
        """Return the scale after each of the table's steps."""
        return list(self.rule([bool(flag) for flag in OVERFLOWS], scale=16.0, interval=4, **self.arguments))


_WITH_HYSTERESIS: Final[dict[str, Any]] = {"hysteresis": 2}
_CONSECUTIVE: Final[dict[str, Any]] = {"hysteresis": 2, "consecutive_hysteresis": True}
PUBLISHED_SCALERS: Final[dict[str, PublishedScaler]] = {
    "torch": PublishedScaler(torch, {}, {}),
    "megatron": PublishedScaler(megatron, _WITH_HYSTERESIS, _WITH_HYSTERESIS),
    "consecutive": PublishedScaler(apex_hysteresis, _WITH_HYSTERESIS, _CONSECUTIVE),
    "deepspeed": PublishedScaler(deepspeed, _WITH_HYSTERESIS, {**_WITH_HYSTERESIS, "growth_delay": "after_overflow"}),
    "flax": PublishedScaler(flax, {}, {"growth_delay": "always"}),
}
"""First word of a row of S16's table -> its source, and the scaler with the same sequence."""
