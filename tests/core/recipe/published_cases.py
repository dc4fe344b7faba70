"""The presets of S16 and the published rules with the same sequences, those of the conformance suite among them.

The transcriptions follow `polyamp.conformance.published_scalers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from polyamp.conformance import published_scalers
from polyamp.conformance.published_scalers import FLOAT32_MAX, PublishedRule


def keras(flags: Sequence[bool], *, scale: float, interval: int) -> Iterator[float]:
    """Keras 3.15, keras/src/optimizers/loss_scale_optimizer.py, `_stateful_handle_finite_grads` and its counterpart."""
    step_counter = 0
    for overflow in flags:
        if overflow:
            step_counter = 0
            scale *= 0.5
        elif step_counter == interval - 1:
            step_counter = 0
            scale *= 2.0
        else:
            step_counter += 1
        yield scale


def apex(flags: Sequence[bool], *, scale: float, interval: int, ceiling: float = 2.0**24) -> Iterator[float]:
    """NVIDIA/apex before commit cb65b8ed, apex/amp/scaler.py, `LossScaler.update_scale`, no `min_loss_scale`."""
    unskipped = 0
    for overflow in flags:
        scale, unskipped = (scale / 2.0, 0) if overflow else (scale, unskipped + 1)
        if unskipped == interval:
            scale, unskipped = min(ceiling, scale * 2.0), 0
        yield scale


def deepspeed_fused(flags: Sequence[bool], *, scale: float, interval: int, floor: float = 1.0) -> Iterator[float]:
    """DeepSpeed 0.19.6, deepspeed/runtime/fp16/fused_optimizer.py, `FP16_Optimizer._update_scale`: no hysteresis."""
    last_overflow = -1
    for iteration, overflow in enumerate(flags):
        stable = iteration - last_overflow - 1
        if overflow:
            scale, last_overflow = max(scale / 2.0, floor), iteration
        elif stable > 0 and stable % interval == 0:
            scale *= 2.0
        yield scale


def jmp(flags: Sequence[bool], *, scale: float, interval: int, floor: float = 1.0) -> Iterator[float]:
    """jmp 0.0.4, jmp/_src/loss_scale.py, `DynamicLossScale.adjust`."""
    counter = 0
    for overflow in flags:
        if overflow:
            scale = max(floor, scale / 2)
        elif counter == interval - 1:
            scale = scale * 2 if scale * 2 <= FLOAT32_MAX else scale
        counter = 0 if overflow else (counter + 1) % interval
        yield scale


class PublishedCase(NamedTuple):
    """One source with one setting, and the scaler with the same sequences.

    Attributes:
        rule: the transcription.
        arguments: its constants.
        preset: the name that `LossScaler.like` takes.
        changes: further arguments of `LossScaler.like`.
    """

    rule: PublishedRule
    arguments: dict[str, Any]
    preset: str
    changes: dict[str, Any]


def _cases() -> list[PublishedCase]:
    cases = []
    plain: tuple[tuple[PublishedRule, str, dict[str, Any]], ...] = (
        (published_scalers.torch, "torch", {}),
        (keras, "keras", {}),
        (apex, "apex", {}),
        (jmp, "jmp", {}),
        (published_scalers.flax, "flax", {}),
        (deepspeed_fused, "deepspeed", {"hysteresis": 1}),
    )
    for interval in (1, 2, 3):
        for scale in (2.0, 16.0):
            given, own = {"scale": scale, "interval": interval}, {"init_scale": scale, "growth_interval": interval}
            cases += [PublishedCase(rule, given, preset, {**own, **changes}) for rule, preset, changes in plain]
            for hysteresis in (1, 2, 3):
                more, theirs = {**given, "hysteresis": hysteresis}, {**own, "hysteresis": hysteresis}
                refilled = {**theirs, "consecutive_hysteresis": True}
                cases += [
                    PublishedCase(published_scalers.megatron, more, "megatron", theirs),
                    PublishedCase(published_scalers.deepspeed, more, "deepspeed", theirs),
                    PublishedCase(published_scalers.deepspeed, {**more, "consecutive": True}, "deepspeed", refilled),
                    PublishedCase(published_scalers.apex_hysteresis, more, "torch", refilled),
                ]
    cases.append(
        PublishedCase(apex, {"scale": 2.0**23, "interval": 1}, "apex", {"init_scale": 2.0**23, "growth_interval": 1})
    )
    return cases


CASES: Final = _cases()
