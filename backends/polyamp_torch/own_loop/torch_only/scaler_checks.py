"""Errors of `GradScaler`, its constructor arguments in torch's and polyamp's form, and unsupported optimizers."""

from __future__ import annotations

from typing import Any, Final

import torch

from polyamp.errors import LossScaleError, UnsupportedError, did_you_mean
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import PRESETS, LossScaler
from polyamp_torch.precision.torch_only.float32_islands import DEVICE_TYPES

_SCALER_NAMES: Final = ("dynamic", "off", *PRESETS)
"""Scaler names that a recipe accepts."""


class GradScalerError(LossScaleError, RuntimeError):
    """Misuse of a `GradScaler`. Also a RuntimeError, as torch's scaler raises."""


def scaler_from_arguments(scaler: Any, device: Any, constants: dict[str, Any]) -> tuple[LossScaler, str | None]:
    """Return the `LossScaler` and the device type for arguments of `GradScaler`, in polyamp's or torch's form.

    Raises:
        GradScalerError: contradictory arguments, or a word that is neither a device type nor a preset.
    """
    constants = {name: value for name, value in constants.items() if value is not None}
    if isinstance(scaler, str) and scaler in _SCALER_NAMES:
        scaler = Recipe(scaler=scaler).loss_scaler
    if isinstance(scaler, str | torch.device):
        if device is not None:
            raise GradScalerError(f"the device is given twice. Received: {scaler!r} and device={device!r}.")
        scaler, device = None, scaler
    if scaler is not None and not isinstance(scaler, LossScaler):
        raise GradScalerError(
            "the first argument must be a polyamp.LossScaler or, as in torch.amp, a device type such as 'cuda'. "
            f"Received: {scaler!r}. An initial scale is given by name: init_scale=..."
        )
    if scaler is not None and constants:
        raise GradScalerError(f"{', '.join(constants)} must be set in the LossScaler that is given as well.")
    if constants.get("growth_factor", 2.0) < 1.0 < constants.get("backoff_factor", 0.5):
        raise GradScalerError(
            "growth_factor comes before backoff_factor, as in torch.amp.GradScaler; torch's ShardedGradScaler has them "
            f"the other way round. Give them by name. Received: growth_factor={constants['growth_factor']}, "
            f"backoff_factor={constants['backoff_factor']}."
        )
    found = scaler if scaler is not None else LossScaler.like("torch", **constants)
    return found, None if device is None else _device_type(device)


def _device_type(device: Any) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise GradScalerError(
            f"a device type such as 'cuda' or 'cpu', or a scaler ({', '.join(_SCALER_NAMES)}), is expected. Received: "
            f"{device!r}.{did_you_mean(str(device), [*DEVICE_TYPES, *_SCALER_NAMES])}"
        ) from error


def refuse_lbfgs(optimizer: Any) -> None:
    """Reject torch's LBFGS."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times a step through a closure, which one finite flag and one scale "
            "cannot cover. Use another optimizer, or GradScaler(enabled=False)."
        )


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reject a closure among the arguments of `step`; None is accepted."""
    if callable(kwargs.get("closure", args[0] if args else None)):
        raise UnsupportedError(
            "step() takes no closure, by position or by name: it would run backward after the gradients were unscaled "
            "and checked. Call scaler.scale(loss).backward() before step()."
        )
