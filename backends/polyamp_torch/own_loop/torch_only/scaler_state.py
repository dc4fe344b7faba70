"""State of `GradScaler` in the form of torch's own scaler: its private attributes, `state_dict`, and pickling.

torch's attributes (`_scale`, `_growth_tracker`, `_growth_factor`, ...) keep their names, because libraries read and
write them. polyamp's own are the constants as a `LossScaler`, and the loss-scale state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Final

import numpy as np
import torch
from torch.amp.grad_scaler import OptState

from polyamp.array_namespace import PYTHON, ArrayNamespace, array_namespace
from polyamp.errors import UnsupportedError
from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp_torch.arrays import can_read_without_sync, scalar_like
from polyamp_torch.compat import new_optimizer_record
from polyamp_torch.own_loop.torch_only.loop_monitor import LoopMonitor
from polyamp_torch.own_loop.torch_only.loop_record import LoopRecord
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError

STATE_DICT_KEYS: Final = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""Keys of `torch.amp.GradScaler.state_dict()`."""


def _namespace_with_cache() -> ArrayNamespace:
    """Return torch's namespace with the rule's constants cached, which saves ten small allocations per update."""
    constants: dict[Any, Any] = {}

    def asarray(value: Any, like: Any) -> Any:
        key = (value, like.dtype, like.device)
        if key not in constants:
            constants[key] = scalar_like(value, like)
        return constants[key]

    return array_namespace(torch, asarray, power=torch.pow)


def _constant(name: str, *, is_factor: bool = True) -> Any:
    """Create a property for a constant of the scaler. The factors of a fixed scale are 1.0."""

    def read(self: ScalerState) -> Any:
        return 1.0 if is_factor and self._scaler.kind != "dynamic" else getattr(self._scaler, name)

    def write(self: ScalerState, value: Any) -> None:
        value = float(value) if is_factor else value
        if self._scaler.kind != "dynamic":
            raise GradScalerError(
                f"{name} cannot change: LossScaler(kind={self._scaler.kind!r}) has a fixed scale. Received: {value}."
            )
        self._scaler = self._scaler.replace(**{name: value})

    return property(read, write)


class ScalerState(torch.cuda.amp.GradScaler):
    """Loss scale that is interchangeable with `torch.amp.GradScaler`; see `GradScaler` for the arguments.

    It derives from `torch.cuda.amp.GradScaler`, itself a `torch.amp.GradScaler`, so that both isinstance checks pass.
    """

    _per_optimizer_states: dict[int, dict[str, Any]]

    def __init__(self, scaler: LossScaler, device: str | None, *, enabled: bool) -> None:
        # torch's __init__ would disable the scaler without a CUDA device, and set attributes that are properties here
        self._scaler = scaler
        self._enabled = enabled and scaler.checks
        self._device_name = device
        self._begin = LossScaleState(scaler.init_scale, 0, scaler.hysteresis, 0, 0)
        self._reset()

    def _reset(self) -> None:
        """Create the attributes that are not saved."""
        self._state: LossScaleState | None = None
        self._xp: ArrayNamespace = _namespace_with_cache()
        self._per_optimizer_states = defaultdict(new_optimizer_record)
        self._loop = LoopRecord(least=self._begin.scale)
        self._monitoring: LoopMonitor | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scaler!r}, enabled={self._enabled})"

    @property
    def loss_scaler(self) -> LossScaler:
        """The constants in use, as a `LossScaler`."""
        return self._scaler

    @property
    def loss_scale_state(self) -> LossScaleState | None:
        """The five scalars of the loss scale on their device; None before the first `scale()`."""
        return self._state

    def _require_state(self, method: str) -> LossScaleState:
        if self._state is None:
            raise GradScalerError(
                f"{method}() was called but scale() never was. Multiply the loss first: scaler.scale(loss).backward()."
            )
        return self._state

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._require_state(funcname)
        self._loop.mark_shared()  # subclasses write to it
        return state.scale, state.good_steps

    def _scale_of_gradients(self) -> torch.Tensor:
        loop = self._loop
        return self._require_state("step").scale if loop.shared or loop.scaled is None else loop.scaled

    def _may_grow(self) -> bool:
        """Return whether dividing by the scale may make gradients larger; False only if known without waiting."""
        scale = self._scale_of_gradients()
        return (
            scale.item() < 1.0
            if can_read_without_sync(scale.device)
            else self._loop.shared or self._loop.scaled_least < 1.0
        )

    def _is_unscaled(self, optimizer: Any) -> bool:
        optimizer_state = self._per_optimizer_states.get(id(optimizer))
        return optimizer_state is not None and optimizer_state["stage"] is OptState.UNSCALED

    def _next_state(self, state: LossScaleState, found: torch.Tensor) -> LossScaleState:
        """Return the state after rule S15; `found` is above 0 if a gradient was not finite.

        The scale is written in place, as in torch: a captured CUDA graph multiplies by that tensor.
        """
        if not can_read_without_sync(state.scale.device):
            after = self._scaler.next_state(state, found == 0.0, self._xp)
            self._loop.preserve_scale(state.scale)
            return after._replace(scale=state.scale.copy_(after.scale))
        numbers = LossScaleState(np.float32(state.scale.item()), *[value.item() for value in state[1:]])
        after = self._scaler.next_state(numbers, found.item() == 0.0, PYTHON)
        if after.scale != numbers.scale:
            self._loop.preserve_scale(state.scale)
        for tensor, old, new in zip(state, numbers, after, strict=True):
            if new != old:
                tensor.fill_(float(new))
        return state

    # Attributes and methods under torch's names.

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        self._start(dev)  # some libraries call it, and multiply by `_scale` instead of calling `scale()`

    def _start(self, dev: Any) -> LossScaleState:
        """Make the state's tensors on a device."""
        device = torch.device(dev)
        if device.type == "meta":
            raise UnsupportedError(
                "a loss scale cannot live on the meta device, which holds no numbers. Materialize the model first, "
                'with model.to_empty(device="cpu").'
            )
        kinds = (torch.float32, torch.int32, torch.int32, torch.int32, torch.int32)
        pairs = zip(self._begin, kinds, strict=True)
        self._state = LossScaleState(*[torch.full((), value, dtype=kind, device=device) for value, kind in pairs])
        return self._state

    def get_scale(self) -> float:
        """Return the scale that the next loss is multiplied by, 1.0 if disabled; waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._state is None else float(self._state.scale.item())

    @property
    def _scale(self) -> torch.Tensor | None:
        if self._state is None:
            return None
        self._loop.mark_shared()
        scale: torch.Tensor = self._state.scale
        return scale

    @_scale.setter
    def _scale(self, value: torch.Tensor | None) -> None:
        self._state = None if value is None else (self._state or self._start(value.device))._replace(scale=value)
        self._loop.mark_shared()

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        return None if self._state is None else self._state.good_steps

    @_growth_tracker.setter
    def _growth_tracker(self, value: torch.Tensor | None) -> None:
        self._state = None if value is None else (self._state or self._start(value.device))._replace(good_steps=value)

    @property
    def _init_scale(self) -> float:
        return float(self._begin.scale)

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        self._begin = self._begin._replace(scale=self._check_bounds("_init_scale", value))

    @property
    def _init_growth_tracker(self) -> int:
        return int(self._begin.good_steps)

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        self._begin = self._begin._replace(good_steps=int(value))

    _growth_factor = _constant("growth_factor")
    _backoff_factor = _constant("backoff_factor")
    _growth_interval = _constant("growth_interval", is_factor=False)

    @property
    def _device(self) -> str:
        if self._state is not None:
            return str(self._state.scale.device.type)
        return self._device_name or ("cuda" if torch.cuda.is_available() else "cpu")

    @_device.setter
    def _device(self, value: str) -> None:
        self._device_name = value

    def _check_bounds(self, name: str, value: Any) -> float:
        """Return a scale given by the user, if rule S17 allows it."""
        low, high = self._scaler.min_scale, self._scaler.max_scale
        number = float(value)
        if not (math.isfinite(number) and low <= number <= high):
            raise GradScalerError(
                f"{name} must lie between min_scale={low:g} and max_scale={high:g}. Received: {number:g}. A "
                "LossScaler with another min_scale or max_scale moves the bounds; a scale of 0, inf or NaN comes from "
                "a run that had collapsed, and has to be replaced by hand."
            )
        return number

    def _checked_scale(self, value: Any, like: torch.Tensor) -> torch.Tensor:
        """Return a user's scale as a tensor: a number is checked against the bounds, a tensor clamped on its device."""
        if not isinstance(value, torch.Tensor):
            return torch.full_like(like, self._check_bounds("new_scale", value))
        if value.numel() != 1 or value.requires_grad:
            raise GradScalerError(
                "new_scale must be a number or a tensor of one element without a gradient. Received: a tensor of "
                f"shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
            )
        number = value.detach().reshape(()).to(like.device, torch.float32, copy=True)
        bounded = number.clamp(self._scaler.min_scale, self._scaler.max_scale)
        return torch.where(torch.isnan(number), like, bounded)

    # Exchange.

    def _host_state(self) -> LossScaleState:
        """Return the state as Python numbers; waits for the device."""
        return self._begin if self._state is None else LossScaleState(*[value.item() for value in self._state])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as numbers: torch's five keys, and the fields that torch lacks under "polyamp".

        A `torch.amp.GradScaler` can load it; a fixed scale has factors of 1. The exported count of good steps is kept
        below the interval: torch compares with `==` and would never grow the scale from above it. A `growth_delay`, or
        a smaller interval set later, can take polyamp's count beyond it. Empty if disabled.

        Example:
            >>> import polyamp, torch
            >>> from polyamp_torch import GradScaler
            >>> theirs = torch.amp.GradScaler("cpu")
            >>> theirs.load_state_dict(GradScaler(polyamp.LossScaler(init_scale=1024.0)).state_dict())
            >>> theirs.get_scale()
            1024.0
        """
        if not self._enabled:
            return {}
        now = self._host_state()
        own = now._asdict()
        del own["scale"]  # stored under torch's key
        return {
            "scale": now.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._exported_good_steps(now.good_steps),
            "polyamp": {**own, "scaler": self._scaler.to_dict()},
        }

    def _exported_good_steps(self, good_steps: int) -> int:
        """Return the count of good steps that is exported to torch."""
        return min(good_steps, int(self._growth_interval) - 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` of this class or of torch's, constants included, as in torch.

        Settings that torch's lacks (floor, ceiling, hysteresis) keep this scaler's values. A disabled scaler ignores
        the call.

        Raises:
            GradScalerError: keys are missing, or the scale is outside of the floor and the ceiling.
        """
        if not self._enabled:
            return
        if missing := [key for key in STATE_DICT_KEYS if key not in state_dict]:
            raise GradScalerError(
                f"state_dict must hold {', '.join(STATE_DICT_KEYS)}. Missing: {', '.join(missing)}. An empty one comes "
                "from a scaler that was disabled."
            )
        own = state_dict.get("polyamp", {})
        settings = dict(own.get("scaler") or self._scaler.to_dict())
        if settings["kind"] == "dynamic":
            settings.update({name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")})
        before, self._scaler = self._scaler, LossScaler(**settings)
        try:
            scale = self._check_bounds('state_dict["scale"]', state_dict["scale"])
        except GradScalerError:
            self._scaler = before
            raise
        good, known = int(state_dict["_growth_tracker"]), int(own.get("good_steps", 0))
        self._begin = LossScaleState(
            scale=scale,
            good_steps=known if self._exported_good_steps(known) == good else good,
            hysteresis=int(own.get("hysteresis", self._scaler.hysteresis)),
            skipped=int(own.get("skipped", 0)),
            stuck=int(own.get("stuck", 0)),
        )
        if self._state is not None:
            self._loop.preserve_scale(self._state.scale)
            for tensor, value in zip(self._state, self._begin, strict=True):
                tensor.fill_(value)
        self._loop.least = self._begin.scale

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise GradScalerError("a GradScaler can be copied or pickled only between iterations. Call update() first.")
        unsaved = ("_state", "_xp", "_per_optimizer_states", "_loop", "_monitoring")
        return {**{k: v for k, v in self.__dict__.items() if k not in unsaved}, "_begin": self._host_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
