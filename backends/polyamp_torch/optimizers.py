"""From optimizer specs to `torch.optim`, and one step of any torch optimizer under a finite flag.

SGD, Adam and AdamW use torch's fused kernels, which take the flag and the divisor themselves. RMSprop, Adagrad and Lion
run polyamp's own formulas over multi-tensor kernels, and select by the flag on the device. Neither synchronises with
the host. Native optimizers without fused kernels read the flag once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch

from polyamp.errors import UnsupportedError
from polyamp.optimizers import SGD, Adagrad, Adam, AdamW, Lion, RMSprop, is_spec
from polyamp_torch.arrays import XP, from_numpy, to_numpy
from polyamp_torch.fused import Kernels
from polyamp_torch.gradients import buckets, looks
from polyamp_torch.many import MANY, Many

Parameters = list[torch.nn.Parameter]
_NUMBERS: Final[tuple[type[float], ...]] = (float, int, bool)
_SLOTS: Final = {"momentum": "momentum_buffer"}
"""torch's names for the slots of polyamp's formulas, where they differ."""
_AT_ONCE: Final = 2**25
"""Elements that a formula runs over at once, which bounds the memory of its intermediate results."""


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
            for p in group["params"]:
                if p.grad is not None and "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            spec = Lion(group["lr"], betas=group["betas"], weight_decay=group["weight_decay"])
            _run_formula(self, group, spec, group["lr"], 0, None)
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
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            _refuse_narrow_fused_sgd(group)
    return optimizer


def _refuse_narrow_fused_sgd(group: dict[str, Any]) -> None:
    narrow = [p for p in group["params"] if p.device.type == "cpu" and p.dtype in (torch.float16, torch.bfloat16)]
    if group["fused"] and narrow:
        raise UnsupportedError(
            "torch's fused SGD leaves whole blocks of 16-bit parameters as they were on the CPU "
            f"(github.com/pytorch/pytorch/issues/191763). Received: fused=True with {narrow[0].dtype}. Use fused=False."
        )


def _from_spec(spec: Any, parameters: Parameters) -> torch.optim.Optimizer:
    rate = spec.learning_rate if not callable(spec.learning_rate) else float(spec.learning_rate(0))
    wide = (torch.float32, torch.float64)
    fused = all(p.dtype in wide or p.device.type == "cuda" for p in parameters)  # see _refuse_narrow_fused_sgd
    common: dict[str, Any] = {"lr": rate, "weight_decay": spec.weight_decay}
    made: torch.optim.Optimizer
    match spec:
        case SGD():
            made = torch.optim.SGD(parameters, **common, momentum=spec.momentum, nesterov=spec.nesterov, fused=fused)
        case Adam() | AdamW():
            kind = torch.optim.AdamW if isinstance(spec, AdamW) else torch.optim.Adam
            made = kind(parameters, **common, betas=spec.betas, eps=spec.eps, fused=fused)
        case RMSprop():
            made = torch.optim.RMSprop(
                parameters, **common, alpha=spec.alpha, eps=spec.eps, momentum=spec.momentum, centered=spec.centered
            )
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
        case _:
            raise UnsupportedError(f"the torch backend has no optimizer for {type(spec).__name__}.")
    _fill(made, spec, parameters, fused)
    return made


def _fill(optimizer: torch.optim.Optimizer, spec: Any, parameters: Parameters, fused: bool) -> None:
    """Make the state arrays now: a checkpoint then always holds them, and fused SGD, whose momentum is left
    uninitialised when its very first step is skipped, never sees a missing one."""
    counts = isinstance(spec, Adam | AdamW | RMSprop | Adagrad)
    for p in parameters:
        if counts:
            device = p.device if fused or runs_formula(spec) else torch.device("cpu")
            optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for slot in spec.slots:
            value = spec.initial(slot)
            optimizer.state[p][slot_name(slot)] = torch.full_like(p, value, memory_format=torch.preserve_format)


def slot_name(slot: str) -> str:
    """torch's name of a formula's slot."""
    return _SLOTS.get(slot, slot)


def runs_formula(spec: Any) -> bool:
    """True for the specs whose formula runs here, because torch's kernels for them take no flag."""
    return isinstance(spec, RMSprop | Adagrad | Lion)


def takes_divisor(optimizer: torch.optim.Optimizer) -> bool:
    """True when the optimizer's kernels divide the gradients by `grad_scale` themselves: fused ones, in float32."""
    return _is_fused(optimizer) and all(
        group["params"][0].dtype == torch.float32 for group in optimizer.param_groups if group["params"]
    )


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    amp = getattr(optimizer, "_step_supports_amp_scaling", False)
    return amp and all(group.get("fused") for group in optimizer.param_groups)


def _takes_flag(optimizer: torch.optim.Optimizer, spec: Any) -> bool:
    """True when the optimizer's kernels take the flag: fused, and with every state array already there."""
    if not _is_fused(optimizer):
        return False
    if is_spec(spec) or _stateless(optimizer):
        return True
    return all(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"])


def apply(
    optimizer: torch.optim.Optimizer,
    spec: Any,
    applied: torch.Tensor,
    finite: torch.Tensor | None,
    by: torch.Tensor | None = None,
    grads: list[torch.Tensor] | None = None,
    kernels: Kernels | None = None,
) -> None:
    """Step the optimizer over the parameters' `.grad` if `finite`, at the rate of the applied-update count (S13).

    Args:
        optimizer: what `build` returned.
        spec: the recipe's optimizer, a spec or native.
        applied: number of updates so far; its device says where the flag may be read.
        finite: the flag, or None for one that is not checked.
        by: a float32 scalar that the kernels divide the gradients by, writing the quotients back; only for an
            optimizer that `takes_divisor`.
        grads: the gradients again, as a list; and
        kernels: what `kernels_of` returned, which takes them.
    """
    if finite is not None and looks(applied.device):
        if not bool(finite):
            return
        finite = None
    scheduled = is_spec(spec) and callable(spec.learning_rate)
    if runs_formula(spec):
        rate = _rate(spec, applied) if scheduled else None
        count = int(applied) + 1 if looks(applied.device) else applied + 1.0
        for group in optimizer.param_groups:
            own = current(spec, group)
            _run_formula(optimizer, group, own, group["lr"] if rate is None else rate, count, finite)
        return
    if finite is not None and not _takes_flag(optimizer, spec):
        if not bool(finite):  # the one synchronisation: this optimizer cannot be told on the device
            return
        finite = None
    if scheduled:
        _set_rate(optimizer, _rate(spec, applied))
    found_inf = None if finite is None else (~finite).float()
    if kernels is None or grads is None or not kernels.run(grads, found_inf, by):
        _step(optimizer, found_inf, by)


def kernels_of(optimizer: torch.optim.Optimizer, spec: Any) -> Kernels | None:
    """The optimizer's fused kernels, to be run without `optimizer.step()`; None for what is native or not fused."""
    return Kernels(optimizer) if is_spec(spec) and _is_fused(optimizer) else None


def _rate(spec: Any, applied: torch.Tensor) -> Any:
    """The scheduled rate: a number on the CPU, elsewhere a scalar on the device."""
    return float(spec.learning_rate(int(applied))) if looks(applied.device) else spec.rate(applied, XP)


def _step(optimizer: Any, found_inf: torch.Tensor | None, by: torch.Tensor | None) -> None:
    """`optimizer.step()`, its kernels given the flag and the divisor."""
    if found_inf is None and by is None:
        optimizer.step()
        return
    optimizer.found_inf = found_inf
    optimizer.grad_scale = by
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def _run_formula(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    spec: Any,
    rate: Any,
    count: Any,
    finite: torch.Tensor | None,
) -> None:
    """A spec's own formula over one group, in float32 at least; selected by `finite` unless that is None."""
    for parameters in _portions([p for p in group["params"] if p.grad is not None]):
        device = parameters[0].device
        states = [optimizer.state[p] for p in parameters]
        old = {slot: [state[slot_name(slot)] for state in states] for slot in spec.slots}
        own = None if finite is None else finite.to(device)
        with torch.no_grad():
            new, slots = spec.update(
                MANY,
                _wide(parameters),
                _wide([p.grad for p in parameters]),
                {slot: _wide(tensors) for slot, tensors in old.items()},
                _on(rate, device),
                _on(count, device),
            )
            for before, after in [(parameters, new), *((old[slot], slots[slot]) for slot in old)]:
                chosen = after if own is None else MANY.where(own, after, Many(list(before)))
                torch._foreach_copy_(list(before), chosen.tensors)
            steps = [state["step"] for state in states if "step" in state]
            if steps:
                if own is None:
                    torch._foreach_add_(steps, 1.0)
                else:
                    torch._foreach_add_(steps, own.float(), alpha=1.0)  # without alpha torch reads the tensor


def current(spec: Any, group: dict[str, Any]) -> Any:
    """The spec with the options that were written into the group by hand.

    Raises:
        UnsupportedError: they ask for other state arrays, or for `maximize`, which the formulas do not have.
        RecipeError: an impossible value.
    """
    options = {name: group.get(name, getattr(spec, name)) for name in spec.__struct_fields__[1:]}
    if group.get("maximize"):
        raise UnsupportedError(f"maximize=True: {type(spec).__name__} minimises. Return the negative loss instead.")
    if all(value == getattr(spec, name) for name, value in options.items()):
        return spec
    changed = type(spec)(spec.learning_rate, **options)
    if changed.slots != spec.slots:
        raise UnsupportedError(
            f"the optimizer's state arrays are {', '.join(spec.slots)}; the options in its param_groups now ask for "
            f"{', '.join(changed.slots)}. Call polyamp.init with such a recipe."
        )
    return changed


def _wide(tensors: list[Any]) -> Many:
    if tensors[0].dtype in (torch.float16, torch.bfloat16):
        return Many([tensor.float() for tensor in tensors])
    return Many(tensors)


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _portions(parameters: list[Any]) -> Iterator[list[Any]]:
    """Parameters of one device and dtype, `_AT_ONCE` elements at a time."""
    for bucket in buckets(parameters):
        portion: list[Any] = []
        size = 0
        for p in bucket:
            if portion and size + p.numel() > _AT_ONCE:
                yield portion
                portion, size = [], 0
            portion.append(p)
            size += p.numel()
        yield portion


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
                    optimizer.state[p][slot] = _placed(slot, array, p, group, optimizer.state[p].get(slot))
        for option, array in by_owner.get(f"groups/{index}", {}).items():
            _set_option(group, option, array)


def _placed(slot: str, array: np.ndarray[Any, Any], p: torch.Tensor, group: dict[str, Any], old: Any) -> torch.Tensor:
    """A slot's tensor: laid out like its parameter if it has its shape; a step count where it was, or else on the
    device for kernels that read it there, on the CPU for the others."""
    value = from_numpy(array)
    if slot == "step":
        if isinstance(old, torch.Tensor):
            return value.to(old.device)
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
