"""Optimizers of specs in torch: their native class and state arrays, and polyamp's formulas over multi-tensor kernels.

The formulas run where torch has no kernel that accepts the finite flag, and select by the flag on the device.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch

from polyamp.array_namespace import PYTHON, array_namespace
from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizer_spec import NativeOptimizer, Spec
from polyamp.recipe.optimizers import SPECS
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, XP, can_read_without_sync
from polyamp_torch.compat import (
    foreach_add,
    foreach_add_,
    foreach_copy_,
    foreach_cos,
    foreach_div,
    foreach_expm1,
    foreach_floor,
    foreach_maximum,
    foreach_minimum,
    foreach_mul,
    foreach_neg,
    foreach_pow,
    foreach_sign,
    foreach_sqrt,
    foreach_sub,
)
from polyamp_torch.step.grad_stats import bucket_by_device_and_dtype

_TORCH_SLOT_NAMES: Final = {
    own: name for spec in SPECS for native in spec.native.get("torch", ()) for name, own in native.slots.items()
}
"""Slot name in polyamp's formulas -> torch's name, if they differ."""
_MAX_ELEMENTS_AT_ONCE: Final = 2**25
"""Maximum number of elements per call of a formula; bounds the memory of its intermediate results."""


def torch_native(spec_class: type[Spec]) -> NativeOptimizer | None:
    """Return the description of the class of `torch.optim` for a spec; None if there is none."""
    return next(iter(spec_class.native.get("torch", ())), None)


def native_class(native: NativeOptimizer) -> Any:
    """Return the class that a spec names."""
    return pkgutil.resolve_name(native.name)


def keeps_counts(spec: Spec) -> bool:
    """Return whether the torch optimizer of a spec counts the updates of each parameter."""
    native = torch_native(type(spec))
    return spec.counts_updates if native is None else native.counts


def slot_name(slot: str) -> str:
    """Return torch's name of a formula's slot."""
    return _TORCH_SLOT_NAMES.get(slot, slot)


def initialize_parameter(
    optimizer: torch.optim.Optimizer, spec: Any, p: torch.Tensor, device: Any, count: torch.Tensor | None = None
) -> None:
    """Create the state arrays of one parameter, with its step count on `device`."""
    state = optimizer.state[p]
    if keeps_counts(spec):
        state["step"] = torch.zeros((), dtype=torch.float32, device=device) if count is None else count
    for slot in spec.slots:
        value: complex = spec.initial(slot)
        shape = spec.slot_shape(slot, tuple(p.shape))
        if slot in spec.slot_shapes and (shape != tuple(p.shape) or p.is_complex()):
            real = torch.promote_types(p.dtype.to_real(), torch.float32)
            state[slot_name(slot)] = torch.full(shape, value, dtype=real, device=p.device)
        else:
            value = complex(value, value) if p.is_complex() else value  # real and imaginary part
            state[slot_name(slot)] = torch.full_like(p, value, memory_format=torch.preserve_format)


class FormulaOptimizer(torch.optim.Optimizer):
    """Optimizer that runs the formula of a spec for which torch.optim has no class, such as Lion.

    Args:
        params: parameters, or parameter groups with options.
        spec_class: class of the spec.
        options: the spec's hyperparameters, and its learning rate as `lr`.
    """

    def __init__(self, params: Iterable[Any], spec_class: type[Spec], **options: Any) -> None:
        super().__init__(params, options)
        self.spec_class = spec_class

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Run one update with multi-tensor kernels."""
        if closure is not None:
            raise UnsupportedError(f"{self.spec_class.__name__} takes no closure.")
        for group in self.param_groups:
            named = {name: group[name] for name in self.spec_class.field_names if name in group}
            spec = self.spec_class(group["lr"], **named)
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    initialize_parameter(self, spec, p, p.device)
            run_formula(self, group, spec, group["lr"], 0, None)
        return None


Operand = Any
"""`TensorList`, a number, or a 0-dim tensor on the device of the lists."""


class TensorList:
    """List of tensors of one device and dtype with the operations of the formulas; each operation makes new tensors.

    >>> import torch
    >>> pair = TensorList([torch.ones(2), torch.ones(3)])
    >>> (1.0 - pair * 0.25).tensors[1]
    tensor([0.7500, 0.7500, 0.7500])
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __add__(self, other: Operand) -> TensorList:
        if isinstance(other, torch.Tensor):  # without alpha torch reads the tensor on the host
            return TensorList(list(foreach_add(self.tensors, other, alpha=1.0)))
        return _apply_foreach(foreach_add, self, other)

    def __sub__(self, other: Operand) -> TensorList:
        if isinstance(other, torch.Tensor):
            return self.__add__(torch.neg(other))
        return _apply_foreach(foreach_sub, self, other)

    def __mul__(self, other: Operand) -> TensorList:
        return _apply_foreach(foreach_mul, self, other)

    def __truediv__(self, other: Operand) -> TensorList:
        return _apply_foreach(foreach_div, self, other)

    def __rtruediv__(self, other: Operand) -> TensorList:
        return TensorList([other / tensor for tensor in self.tensors])

    def __neg__(self) -> TensorList:
        return TensorList(list(foreach_neg(self.tensors)))

    def __rsub__(self, other: Operand) -> TensorList:
        return self.__neg__().__add__(other)

    __radd__ = __add__
    __rmul__ = __mul__


def _apply_foreach(kernel: Callable[..., Any], many: TensorList, *others: Operand) -> TensorList:
    operands = (other.tensors if isinstance(other, TensorList) else other for other in others)
    return TensorList(list(kernel(many.tensors, *operands)))


def _where(condition: Any, x: TensorList, y: TensorList) -> TensorList:
    return TensorList([torch.where(condition, one, other) for one, other in zip(x.tensors, y.tensors, strict=True)])


def _asarray(value: Any, like: TensorList) -> TensorList:
    return TensorList([torch.full_like(tensor, value) for tensor in like.tensors])


_KERNELS: Final = {
    "minimum": foreach_minimum,
    "maximum": foreach_maximum,
    "sqrt": foreach_sqrt,
    "sign": foreach_sign,
    "cos": foreach_cos,
    "floor": foreach_floor,
    "power": foreach_pow,
    "expm1": foreach_expm1,
}
TENSOR_LIST_XP: Final = array_namespace(
    torch,
    _asarray,
    where=_where,
    **{name: functools.partial(_apply_foreach, kernel) for name, kernel in _KERNELS.items()},
)
"""The array namespace of tensor lists."""


def run_formula(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    spec: Any,
    rate: Any,
    count: Any,
    finite: torch.Tensor | None,
) -> None:
    """Run a spec's formula over one group, in at least float32; select results by `finite` unless it is None.

    A formula that is not elementwise runs on each parameter, of which a shard is gathered where the formula asks for
    the whole.
    """
    with_gradient = [p for p in group["params"] if p.grad is not None]
    if not spec.is_elementwise:
        for p in with_gradient:
            _run_whole(optimizer.state[p], p, spec, rate, count, finite)
        return
    for parameters in _parameter_chunks(with_gradient):
        device = parameters[0].device
        states = [optimizer.state[p] for p in parameters]
        old = {slot: [state[slot_name(slot)] for state in states] for slot in spec.slots}
        own = None if finite is None else finite.to(device)
        with torch.no_grad():
            new, slots = spec.update(
                TENSOR_LIST_XP,
                _to_float32(parameters),
                _to_float32([p.grad for p in parameters]),
                {slot: _to_float32(tensors) for slot, tensors in old.items()},
                _move_to_device(rate, device),
                _update_number(spec, _move_to_device(rate, device), states, _move_to_device(count, device)),
            )
            for before, after in [(parameters, new), *((old[slot], slots[slot]) for slot in old)]:
                chosen = after if own is None else TENSOR_LIST_XP.where(own, after, TensorList(list(before)))
                foreach_copy_(list(before), chosen.tensors)
            steps = [state["step"] for state in states if "step" in state]
            if steps:
                if own is None:
                    foreach_add_(steps, 1.0)
                else:
                    foreach_add_(steps, own.float(), alpha=1.0)  # without alpha torch reads the tensor


@torch.no_grad()
def _run_whole(state: dict[str, Any], p: Any, spec: Spec, rate: Any, count: Any, finite: torch.Tensor | None) -> None:
    """Run a formula on one parameter as a whole."""
    own, device = None if finite is None else finite.to(p.device), p.device
    old = {slot: state[slot_name(slot)] for slot in spec.slots}
    rate = _move_to_device(rate, device)
    number = _update_number(spec, rate, [state], _move_to_device(count, device))
    if isinstance(number, TensorList):
        (number,) = number.tensors
    wide = _wide(p)
    new, slots = spec.update(XP, wide, _wide(p.grad), {slot: _wide(x) for slot, x in old.items()}, rate, number)
    for before, after in [(p, new), *((old[slot], slots[slot]) for slot in old)]:
        before.copy_(after if own is None else torch.where(own, after, before))
    if "step" in state:
        state["step"].add_(1.0 if own is None else own.to(state["step"].device).float())


def _wide(tensor: Any) -> Any:
    return tensor.float() if tensor.dtype in HALF_TENSOR_DTYPES else tensor


def _update_number(spec: Spec, rate: Any, states: list[dict[str, Any]], shared: Any) -> Any:
    """Return the number of this update for a formula, or its corrections; per parameter if counts differ (S23)."""
    number = shared
    if spec.counts_updates:
        taken = [state["step"] for state in states]
        if can_read_without_sync(taken[0].device) and len(numbers := {count.item() for count in taken}) == 1:
            number = numbers.pop() + 1.0
        else:
            if states[0][slot_name(spec.slots[0])].dtype == torch.float64:
                taken = [count.double() for count in taken]
            number = TensorList(list(foreach_add(taken, 1.0)))
    return spec.corrections(PYTHON, rate, number) if isinstance(number, int | float) else number


def _to_float32(tensors: list[Any]) -> TensorList:
    if tensors[0].dtype in HALF_TENSOR_DTYPES:
        return TensorList([tensor.float() for tensor in tensors])
    return TensorList(tensors)


def _move_to_device(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _parameter_chunks(parameters: list[Any]) -> Iterator[list[Any]]:
    """Yield lists of parameters of one device and dtype, of up to `_MAX_ELEMENTS_AT_ONCE` elements each."""
    for bucket in bucket_by_device_and_dtype(parameters):
        portion: list[Any] = []
        size = 0
        for p in bucket:
            if portion and size + p.numel() > _MAX_ELEMENTS_AT_ONCE:
                yield portion
                portion, size = [], 0
            portion.append(p)
            size += p.numel()
        yield portion
