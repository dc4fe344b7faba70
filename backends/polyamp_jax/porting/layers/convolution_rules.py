"""Conventions of JAX's convolutions that several libraries share: settings per axis, masks, padding "SAME"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp_jax.porting.layers.refusal import RefusedError


def check_unmasked(settings: Mapping[str, Any]) -> None:
    """Raise `RefusedError` if the kernel is multiplied with a mask."""
    if settings.get("mask") is not None:
        raise RefusedError("its kernel is multiplied with mask=")


def per_axis(value: Any, rank: int) -> list[int]:
    """Return a setting as one int per axis, from one int for all axes or one for each; None is 1."""
    return [value or 1] * rank if value is None or isinstance(value, int) else [int(item) for item in value]


def same_output_crop(reach: int, stride: int) -> list[int]:
    """Return what padding "SAME" of `jax.lax.conv_transpose` crops at the start and end of an axis of the full output.

    Args:
        reach: the number of elements by which the kernel reaches beyond the dilated input on each side.
        stride: the stride.
    """
    total = reach + stride - 1
    before = reach if stride > reach else -(-total // 2)
    return [reach - before, reach - (total - before)]
