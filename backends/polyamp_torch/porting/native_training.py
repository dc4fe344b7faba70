"""`TorchTraining`, a model trained with `torch.optim` without polyamp, with its loss scale in `torch.amp.GradScaler`.

`polyamp.porting.training` describes such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from polyamp.errors import ArgumentError, describe_value
from polyamp.porting.states.optimizer_layout import OptimizerLayout
from polyamp.recipe.optimizers import SPECS
from polyamp.recipe.scaler import PRESETS, LossScaleState
from polyamp_torch.arrays import from_numpy, to_numpy
from polyamp_torch.own_loop.torch_only.scaler_state import STATE_DICT_KEYS
from polyamp_torch.porting.optimizer_layout import read_optimizer_layout
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function
from polyamp_torch.step.torch_only import optimizer_state
from polyamp_torch.step.torch_only.spec_formulas import native_class, torch_native

Array = np.ndarray[Any, Any]

_CALL: Final = "training(model, optimizer, scaler)"
_TRACKER: Final = STATE_DICT_KEYS[-1]
"""torch's key for the number of finite steps since the scale grew."""


class TorchTraining:
    """`polyamp.porting.states.optimizer_layout.NativeTraining` for torch. Model, optimizer and scaler are the user's
    own.

    Attributes:
        model: the module.
        optimizer: a `torch.optim` optimizer of its trainable parameters, or its `state_dict()`.
        loss_scaler: a `torch.amp.GradScaler`, or its `state_dict()`; None where there is none.
    """

    def __init__(self, model: nn.Module, optimizer: Any, loss_scaler: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_scaler = loss_scaler
        self._path = path_function(model)
        self._paths = {id(p): self._path(name) for name, p in model.named_parameters() if p.requires_grad}
        self._own = _make_optimizer(model, optimizer)
        held = [id(p) for group in self._own.param_groups for p in group["params"]]
        if not set(self._paths) <= set(held):
            lost = next(path for key, path in self._paths.items() if key not in held)
            raise ArgumentError(
                f"{_CALL}: the optimizer does not hold the model's parameter {lost!r}. Give the optimizer of this "
                "model, or freeze what is not trained: parameter.requires_grad_(False)."
            )
        self._scale = _scaler_state(loss_scaler)

    @property
    def layout(self) -> OptimizerLayout:
        return read_optimizer_layout(self._own, self._paths)

    @property
    def scaler(self) -> Mapping[str, Any]:
        if self._scale is None:
            return {}
        if "polyamp" in self._scale:  # of polyamp_torch.GradScaler, which saves more than torch's
            own: dict[str, Any] = self._scale["polyamp"]["scaler"]
            return own
        constants = {name: self._scale[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        return {**PRESETS["torch"], "min_scale": 2.0**-126, **constants}

    def arrays(self) -> dict[str, Array]:
        arrays = {f"model/{self._path(name)}": to_numpy(p) for name, p in self.model.named_parameters()}
        arrays |= {f"running/{self._path(name)}": to_numpy(b) for name, b in self.model.named_buffers()}
        exported = optimizer_state.export_optimizer(self._own, self._names(), None)
        arrays |= {f"optimizer/{name}": array for name, array in exported.items()}
        if self._scale is not None:
            arrays["loss_scale/scale"] = np.asarray(self._scale["scale"], np.float32)
            known = {"good_steps": self._scale[_TRACKER], **self._scale.get("polyamp", {})}
            counters = [name for name in LossScaleState._fields[1:] if name in known]
            arrays |= {f"loss_scale/{name}": np.asarray(known[name], np.int32) for name in counters}
        return arrays

    def replaced(self, arrays: Mapping[str, Array]) -> TorchTraining:
        if isinstance(self.optimizer, Mapping) or isinstance(self.loss_scaler, Mapping):
            raise ArgumentError(
                f"{_CALL}: what is filled is the optimizer and the GradScaler themselves. Received: a state_dict. "
                "Make them, and take optimizer.state_dict() afterwards."
            )
        with torch.no_grad():
            for kind, named in (("model", self.model.named_parameters()), ("running", self.model.named_buffers())):
                for name, tensor in named:
                    tensor.copy_(from_numpy(arrays[f"{kind}/{self._path(name)}"]))
        prefix = "optimizer/"
        own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        optimizer_state.load_optimizer(self._own, self._names(), own)
        if self._scale is not None:
            # torch compares the tracker with the interval by ==: a larger tracker would never grow the scale again
            tracker = min(int(arrays["loss_scale/good_steps"]), int(self._scale["growth_interval"]) - 1)
            scale = float(arrays["loss_scale/scale"])
            new = {**self._scale, "scale": scale, _TRACKER: tracker}
            if "polyamp" in new:
                counters = {name: int(arrays[f"loss_scale/{name}"]) for name in LossScaleState._fields[1:]}
                new["polyamp"] = {**new["polyamp"], **counters}
            self.loss_scaler.load_state_dict(new)
        return self

    def _names(self) -> list[str]:
        """Return paths in the optimizer's order, with generated names for parameters that are not trained here."""
        held = [p for group in self._own.param_groups for p in group["params"]]
        return [self._paths.get(id(p), f"#{number}") for number, p in enumerate(held)]


def _make_optimizer(model: nn.Module, given: Any) -> torch.optim.Optimizer:
    """Return the optimizer, created from its `state_dict()` if that was passed.

    Raises:
        ArgumentError: neither of these, or a state_dict that does not identify its optimizer.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise ArgumentError(
            f"{_CALL}: over torch the optimizer is a torch.optim.Optimizer or its state_dict(). Received: optimizer="
            f"{describe_value(given)}."
        )
    groups = given["param_groups"]
    natives = [native for native in map(torch_native, SPECS) if native is not None and native.mark]
    kind: Any = next((native_class(native) for native in natives if native.mark in groups[0]), None)
    if kind is None or len(groups) != 1:
        what = "does not tell which optimizer it is of" if kind is None else f"has {len(groups)} parameter groups"
        raise ArgumentError(
            f"{_CALL}: this state_dict {what}. Make the optimizer as in your training, optimizer.load_state_dict(...) "
            "it, and give the optimizer."
        )
    if kind is torch.optim.Adam and groups[0].get("decoupled_weight_decay"):
        kind = torch.optim.AdamW
    parameters = [p for p in model.parameters() if p.requires_grad]
    every = list(model.parameters())
    parameters = every if len(groups[0]["params"]) == len(every) else parameters
    if len(groups[0]["params"]) != len(parameters):
        raise ArgumentError(
            f"{_CALL}: this state_dict is of {len(groups[0]['params'])} parameters, and the model has "
            f"{len(parameters)}."
        )
    made: torch.optim.Optimizer = kind(parameters, lr=1.0)
    made.load_state_dict(dict(given))
    return made


def _scaler_state(given: Any) -> dict[str, Any] | None:
    """Return `GradScaler.state_dict()`, or None without a scaler.

    Raises:
        ArgumentError: neither a scaler nor its state_dict.
    """
    if given is None:
        return None
    state = given.state_dict() if isinstance(given, torch.amp.GradScaler) else given
    if isinstance(state, Mapping) and not state:  # the state of a disabled scaler is empty
        return None
    if not isinstance(state, Mapping) or not set(STATE_DICT_KEYS) <= set(state):
        raise ArgumentError(
            f"{_CALL}: over torch the scaler is a torch.amp.GradScaler or its state_dict(). Received: scaler="
            f"{describe_value(given)}."
        )
    return dict(state)
