"""Loss scales of other JAX libraries: flax's `DynamicScale` and jmp's classes.

They are recognised by their fields, so that neither library is imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyamp.errors import ArgumentError, describe_value


class ScalerFields(NamedTuple):
    """A loss scale of another library, in polyamp's terms.

    Attributes:
        preset: the name of its rule in `LossScaler.like`.
        constants: fields of a `LossScaler`.
        state: fields of a `LossScaleState`, as NumPy scalars.
        replace: function from new values of those fields to the library's object with them.
    """

    preset: str
    constants: Mapping[str, Any]
    state: Mapping[str, Any]
    replace: Callable[[Mapping[str, float]], Any]


def scaler_fields(scaler: Any) -> ScalerFields | None:
    """Return the fields of a loss scale; None if there is none, or if it does not scale.

    Raises:
        ArgumentError: the object is no known loss scale.

    Example:
        >>> from flax.training.dynamic_scale import DynamicScale
        >>> found = scaler_fields(DynamicScale(growth_interval=10, scale=1024.0, fin_steps=3))
        >>> found.preset, found.constants["growth_interval"], int(found.state["good_steps"])
        ('flax', 10, 3)
    """
    if scaler is None or type(scaler).__name__ == "NoOpLossScale":
        return None
    if all(hasattr(scaler, name) for name in ("fin_steps", "growth_interval", "minimum_scale")):
        return _flax_fields(scaler)
    if all(hasattr(scaler, name) for name in ("loss_scale", "counter", "period", "factor")):
        return _jmp_fields(scaler)
    if dataclasses.is_dataclass(scaler) and hasattr(scaler, "loss_scale"):
        scale = float(getattr(scaler, "loss_scale"))  # noqa: B009  # a class that nobody imports here
        return ScalerFields(
            "jmp",
            {"kind": "static", "init_scale": scale, "min_scale": scale, "max_scale": scale},
            {"scale": np.float32(scale)},
            lambda new: _replace_jmp_fields(scaler, new),
        )
    raise ArgumentError(
        "training(model, optimizer, scaler): over JAX the scaler is flax.training.dynamic_scale.DynamicScale, or jmp's "
        f"DynamicLossScale, StaticLossScale or NoOpLossScale, or None. Received: {describe_value(scaler)}."
    )


def _flax_fields(scaler: Any) -> ScalerFields:
    least = {} if scaler.minimum_scale is None else {"min_scale": max(float(scaler.minimum_scale), 2.0**-126)}

    def replace(new: Mapping[str, float]) -> Any:
        # flax compares the count with the interval by ==, so a larger count would never grow the scale again
        return scaler.replace(
            scale=jnp.float32(new["scale"]), fin_steps=jnp.int32(min(new["good_steps"], scaler.growth_interval))
        )

    return ScalerFields(
        "flax",
        {
            "growth_factor": float(scaler.growth_factor),
            "backoff_factor": float(scaler.backoff_factor),
            "growth_interval": int(scaler.growth_interval),
            **least,
        },
        {"scale": np.float32(scaler.scale), "good_steps": np.int32(scaler.fin_steps)},
        replace,
    )


def _jmp_fields(scaler: Any) -> ScalerFields:
    def replace(new: Mapping[str, float]) -> Any:
        counter = np.asarray(min(new["good_steps"], int(scaler.period) - 1), np.asarray(scaler.counter).dtype)
        return dataclasses.replace(_replace_jmp_fields(scaler, new), counter=jnp.asarray(counter))

    return ScalerFields(
        "jmp",
        {
            "growth_factor": float(scaler.factor),
            "backoff_factor": 1.0 / float(scaler.factor),
            "growth_interval": int(scaler.period),
            "min_scale": float(scaler.min_loss_scale),
        },
        {"scale": np.float32(scaler.loss_scale), "good_steps": np.int32(scaler.counter)},
        replace,
    )


def _replace_jmp_fields(scaler: Any, new: Mapping[str, float]) -> Any:
    dtype = getattr(scaler.loss_scale, "dtype", np.float32)
    return dataclasses.replace(scaler, loss_scale=jnp.asarray(new["scale"], dtype))
