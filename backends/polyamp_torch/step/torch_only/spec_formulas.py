"""Optimizers of specs in torch: their native class and state arrays, and polyamp's formulas over multi-tensor kernels.

The formulas run where torch has no kernel that accepts the finite flag, and select by the flag on the device.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from polyamp.array_namespace import PYTHON
from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizer_spec import NativeOptimizer, Spec
from polyamp.recipe.optimizers import SPECS
from polyamp_torch.arrays import HALF_TENSOR_DTYPES
from polyamp_torch.compat import foreach_add, foreach_add_, foreach_copy_
from polyamp_torch.step.grad_stats import bucket_by_device_and_dtype, can_read_without_sync
from polyamp_torch.step.torch_only.multi_tensor import TENSOR_LIST_XP, TensorList

_TORCH_SLOT_NAMES: Final = {
    own: name for spec in SPECS for native in spec.native.get("torch", ()) for name, own in native.slots.items()
}
"""Slot name in polyamp's formulas -> torch's name, if they differ."""
_FORMULA_SPECS: Final = tuple(
    spec for spec in SPECS if not any(native.is_fused for native in spec.native.get("torch", ()))
)
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


def has_formula(spec: Any) -> bool:
    """Return whether a spec uses polyamp's formula, because torch's kernels for it accept no flag."""
    return isinstance(spec, _FORMULA_SPECS)


def initialize_parameter(
    optimizer: torch.optim.Optimizer, spec: Any, p: torch.Tensor, device: Any, count: torch.Tensor | None = None
) -> None:
    """Create the state arrays of one parameter, with its step count on `device`."""
    state = optimizer.state[p]
    if keeps_counts(spec):
        state["step"] = torch.zeros((), dtype=torch.float32, device=device) if count is None else count
    for slot in spec.slots:
        value: complex = spec.initial(slot)
        if slot in spec.slot_shapes:
            real = torch.promote_types(p.dtype.to_real(), torch.float32)
            shape = spec.slot_shape(slot, tuple(p.shape))
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


def run_formula(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    spec: Any,
    rate: Any,
    count: Any,
    finite: torch.Tensor | None,
) -> None:
    """Run a spec's formula over one group, in at least float32; select results by `finite` unless it is None."""
    for parameters in _parameter_chunks([p for p in group["params"] if p.grad is not None]):
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
