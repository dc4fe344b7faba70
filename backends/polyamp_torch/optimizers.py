"""From optimizer specs to `torch.optim`, and one step of any torch optimizer under a finite flag.

SGD, Adam and AdamW use torch's fused kernels, which take the flag themselves: no host synchronisation. The others, and
native optimizers without such kernels, read the flag once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch

from polyamp.errors import UnsupportedError
from polyamp.optimizers import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, is_spec
from polyamp_torch.arrays import XP, from_numpy, to_numpy

Parameters = list[torch.nn.Parameter]
_NUMBERS: Final[tuple[type[float], ...]] = (float, int, bool)


class LionOptimizer(torch.optim.Optimizer):
    """Lion (arxiv.org/abs/2302.06675) with decoupled decay; torch.optim has none."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update with multi-tensor kernels."""
        if closure is not None:
            raise UnsupportedError("Lion takes no closure.")
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            grads = [p.grad for p in parameters]
            for p in parameters:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            averages = [self.state[p]["exp_avg"] for p in parameters]
            beta1, beta2 = group["betas"]
            direction = torch._foreach_lerp(averages, grads, 1.0 - beta1)
            torch._foreach_sign_(direction)
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, direction, alpha=-group["lr"])
            torch._foreach_lerp_(averages, grads, 1.0 - beta2)
        return None


def build(optimizer: Any, parameters: Parameters) -> torch.optim.Optimizer:
    """The torch optimizer for a spec, with its state arrays made; a native one is checked and returned.

    Raises:
        UnsupportedError: a native object that is not an optimizer over exactly these parameters.
    """
    if is_spec(optimizer):
        return _from_spec(optimizer, parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            "optimizer must be one of polyamp's specs or a torch.optim.Optimizer over the model's parameters. "
            f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times a step through a closure, which one finite flag and one scale "
            "cannot cover. Use another optimizer, or a float32 loop of your own."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(p) for p in parameters}:
        raise UnsupportedError(
            "optimizer must hold exactly the model's trainable parameters. Build it from "
            "[p for p in model.parameters() if p.requires_grad]."
        )
    return optimizer


def _from_spec(spec: Any, parameters: Parameters) -> torch.optim.Optimizer:
    rate = spec.learning_rate if not callable(spec.learning_rate) else float(spec.learning_rate(0))
    fused = all(p.dtype == torch.float32 for p in parameters)  # fused SGD drops 16-bit SIMD blocks on the CPU
    common: dict[str, Any] = {"lr": rate, "weight_decay": spec.weight_decay}
    made: torch.optim.Optimizer
    slots: tuple[str, ...] = ()
    match spec:
        case SGD():
            made = torch.optim.SGD(parameters, **common, momentum=spec.momentum, nesterov=spec.nesterov, fused=fused)
            slots = ("momentum_buffer",) if spec.momentum else ()
        case Adam() | AdamW():
            kind = torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam
            made = kind(parameters, **common, betas=spec.betas, eps=spec.eps, fused=fused)
            slots = ("step", "exp_avg", "exp_avg_sq")
        case RMSprop():
            made = torch.optim.RMSprop(
                parameters, **common, alpha=spec.alpha, eps=spec.eps, momentum=spec.momentum, centered=spec.centered
            )
            slots = ("step", "square_avg", *(("momentum_buffer",) if spec.momentum else ()),
                     *(("grad_avg",) if spec.centered else ()))  # fmt: skip
        case Adagrad():
            made = torch.optim.Adagrad(
                parameters,
                **common,
                lr_decay=spec.lr_decay,
                initial_accumulator_value=spec.initial_accumulator_value,
                eps=spec.eps,
            )
        case Lion():
            made = LionOptimizer(parameters, **common, betas=spec.betas)
            slots = ("exp_avg",)
        case _:
            raise UnsupportedError(f"the torch backend has no optimizer for {type(spec).__name__}.")
    _fill(made, parameters, slots, fused)
    return made


def _fill(optimizer: torch.optim.Optimizer, parameters: Parameters, slots: tuple[str, ...], fused: bool) -> None:
    """Make the state arrays now: a checkpoint then always holds them, and fused SGD, whose momentum is left
    uninitialised when its very first step is skipped, never sees a missing one."""
    for p in parameters:
        for slot in slots:
            if slot == "step":
                device = p.device if fused else torch.device("cpu")
                optimizer.state[p][slot] = torch.zeros((), dtype=torch.float32, device=device)
            else:
                optimizer.state[p][slot] = torch.zeros_like(p, memory_format=torch.preserve_format)


def takes_flag(optimizer: torch.optim.Optimizer) -> bool:
    """True when the optimizer's kernels take the flag: fused, and with every state array already there."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        return True
    return all(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"])


def apply(optimizer: torch.optim.Optimizer, spec: Any, applied: torch.Tensor, finite: torch.Tensor | None) -> None:
    """Step the optimizer if `finite` (None: unchecked), with the learning rate of the applied-update count (S13)."""
    scheduled = is_spec(spec) and callable(spec.learning_rate)
    if takes_flag(optimizer):
        if scheduled:
            _set_rate(optimizer, spec.rate(applied, XP))
        fused: Any = optimizer
        if finite is not None:
            fused.found_inf = (~finite).float()
            fused.grad_scale = None
        try:
            optimizer.step()
        finally:
            if finite is not None:
                del fused.found_inf, fused.grad_scale
    elif finite is None or bool(finite):
        if scheduled:
            _set_rate(optimizer, float(spec.learning_rate(int(applied))))
        optimizer.step()


def _set_rate(optimizer: torch.optim.Optimizer, rate: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def export(optimizer: torch.optim.Optimizer, names: list[str], spec: Any) -> dict[str, np.ndarray[Any, Any]]:
    """State arrays by `state/<parameter>/<slot>`, and the numbers in each group by `groups/<index>/<option>`.

    Python numbers are marked by `#number`, those inside a tuple by their position. The learning rate of a schedule is
    left out: it follows from the applied-update count.

    Raises:
        UnsupportedError: the optimizer keeps something else than tensors and numbers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, p in zip(names, parameters, strict=True):
        for slot, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, torch.Tensor | int | float | None):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} in its state ({slot!r}), which a "
                    "checkpoint cannot hold: it holds tensors and numbers."
                )
            arrays.update(_encoded(f"state/{name}/{slot}", value))
    if not any(optimizer.state.get(p) for p in parameters) and not _stateless(optimizer):
        arrays["state/*"] = np.zeros(0, np.uint8)  # made by the optimizer at its first step; see polyamp.checkpoint
    scheduled = is_spec(spec) and callable(spec.learning_rate)
    for index, group in enumerate(optimizer.param_groups):
        for option, value in group.items():
            if option != "params" and not (scheduled and option == "lr"):
                arrays.update(_encoded(f"groups/{index}/{option}", value))
    return arrays


def _encoded(name: str, value: Any) -> dict[str, np.ndarray[Any, Any]]:
    if isinstance(value, torch.Tensor):
        return {name: to_numpy(value)}
    if isinstance(value, int | float):
        return {f"{name}#number": _boxed(value)}
    if isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value):
        return {f"{name}#{position}": _boxed(item) for position, item in enumerate(value)}
    return {}


def _boxed(value: float) -> np.ndarray[Any, Any]:
    """A Python number with its type, in one shape and dtype whatever the type is."""
    return np.array([_NUMBERS.index(type(value)), value], np.float64)


def _unboxed(array: np.ndarray[Any, Any]) -> float:
    kind, value = array.tolist()
    return _NUMBERS[int(kind)](value)


def _stateless(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def load(optimizer: torch.optim.Optimizer, names: list[str], arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Put exported arrays back, each tensor on the device and in the memory layout that the kernels expect."""
    if "state/*" in arrays:
        optimizer.state.clear()
    by_owner: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for key, array in arrays.items():
        owner, _, slot = key.rpartition("/")
        by_owner.setdefault(owner, {})[slot] = array
    remaining = iter(names)
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            for slot, array in by_owner.get(f"state/{next(remaining)}", {}).items():
                if slot.endswith("#number"):
                    optimizer.state[p][slot.removesuffix("#number")] = _unboxed(array)
                else:
                    optimizer.state[p][slot] = _placed(slot, array, p, group)
        for option, array in by_owner.get(f"groups/{index}", {}).items():
            _set_option(group, option, array)


def _placed(slot: str, array: np.ndarray[Any, Any], p: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A slot's tensor: laid out like its parameter if it has its shape; a step count is on the device for kernels that
    read it there, on the CPU for the others."""
    value = from_numpy(array)
    if slot == "step":
        return value.to(p.device) if group.get("fused") or group.get("capturable") else value
    if value.shape == p.shape:
        return torch.empty_like(p, dtype=value.dtype).copy_(value)
    return value.to(p.device)


def _set_option(group: dict[str, Any], option: str, array: np.ndarray[Any, Any]) -> None:
    name, _, mark = option.partition("#")
    if mark == "number":
        group[name] = _unboxed(array)
    elif mark:
        items = list(group[name])
        items[int(mark)] = _unboxed(array)
        group[name] = tuple(items) if isinstance(group[name], tuple) else items
    else:
        old = group.get(name)
        group[name] = from_numpy(array).to(old.device if isinstance(old, torch.Tensor) else "cpu")
