"""Direct calls of torch's fused SGD, Adam and AdamW kernels, without the parameter loop of `optimizer.step()`.

For optimizers that polyamp creates from its specs. The tensor lists for the kernels are cached. Adam's step counts of
all parameters are adjacent in memory (`make_step_counts`), so that one addition increments all of them. `run` returns
False, and `optimizer.step()` must run instead, in these cases:

- `optimizer.step` has hooks, or a learning-rate scheduler of torch's;
- some parameters have no gradient;
- the parameters are on several devices.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from polyamp_torch.arrays import memory_address
from polyamp_torch.compat import foreach_add_, foreach_sub_, fused_adam_, fused_adamw_, fused_sgd_, has_step_hooks

KernelLists = dict[str, list[Any]]
_END_MARK: Final = object()
_OPTIONS: Final = ("lr", "weight_decay", "maximize")
_SGD_OPTIONS: Final = ("momentum", "dampening", "nesterov")
_ADAM_OPTIONS: Final = ("amsgrad", "eps")
"""Entries of a parameter group that the kernels take under the same name."""


class FusedKernels:
    """Fused kernel of an optimizer with its cached lists, called once for each set of hyperparameters.

    Args:
        optimizer: a fused SGD, Adam or AdamW whose state arrays exist.
        parameters: the parameters in the order of the gradients passed to `run`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._options = (*_OPTIONS, *(_SGD_OPTIONS if self._is_sgd else _ADAM_OPTIONS))
        self._read_options = operator.itemgetter(*self._options)
        self._parts: list[list[torch.Tensor]] = [group["params"] for group in optimizer.param_groups]
        self._parameters = [p for part in self._parts for p in part]
        place = {id(p): number for number, p in enumerate(parameters)}
        self._places = [[place[id(p)] for p in part] for part in self._parts]
        self._alike = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self._lists: list[KernelLists] = []
        self._steps: list[torch.Tensor] = []
        self._counts: torch.Tensor | None = None
        self._gathered_from: list[Any] = [None]

    def run(
        self,
        grads: list[torch.Tensor],
        found_inf: torch.Tensor | None,
        by: torch.Tensor | None,
        waits: Sequence[torch.Tensor | None] | None = None,
    ) -> bool:
        """Update the parameters from gradients in their order; False if `optimizer.step()` must do it.

        Args:
            grads: one per parameter.
            found_inf: float32 scalar, 1 to skip; or None.
            by: float32 scalar divisor of the gradients, applied in place; or None.
            waits: for each parameter group 1 to leave it as it is, float32 scalar, or None for 0 (S27); or None.
        """
        optimizer = self._optimizer
        groups = optimizer.param_groups
        if len(grads) != len(self._parameters) or len(groups) != len(self._parts) or not self._alike:
            return False
        if has_step_hooks(optimizer):
            return False
        device = grads[0].device
        for group in groups:
            if isinstance(group["lr"], torch.Tensor) and group["lr"].device != device:
                return False
        if not all(map(operator.is_, self._contents(), self._gathered_from)):
            self._gather()
        if not all(map(self._has_slots, groups, self._lists)):
            return False
        with torch.no_grad():
            if not self._is_sgd:
                self._count(1.0)
            for number, (group, lists, part) in enumerate(zip(groups, self._lists, self._parts, strict=True)):
                own = grads if len(groups) == 1 else [grads[place] for place in self._places[number]]
                kernel, slots, options = self._kernel(group, lists)
                flag = found_inf if waits is None else _either(found_inf, waits[number])
                kernel(part, own, *slots, **options, grad_scale=by, found_inf=flag)
                if waits is not None and flag is not None and not self._is_sgd:
                    foreach_sub_(lists["step"], [flag] * len(lists["step"]))
            if not self._is_sgd and found_inf is not None and waits is None:
                self._count(found_inf)
        return True

    def _has_slots(self, group: dict[str, Any], lists: KernelLists) -> bool:
        """Return whether the state arrays that the kernel needs with these options exist."""
        if self._is_sgd:
            return bool(group["momentum"]) == bool(lists.get("momentum_buffer"))
        needed = {"exp_avg", "exp_avg_sq", "step", *(("max_exp_avg_sq",) if group["amsgrad"] else ())}
        return needed <= lists.keys() and isinstance(group["betas"][0], float | int)

    def _kernel(self, group: dict[str, Any], lists: KernelLists) -> tuple[Any, tuple[list[Any], ...], dict[str, Any]]:
        """Return a group's kernel, its lists of state arrays, and its options."""
        options = dict(zip(self._options, self._read_options(group), strict=True))
        if self._is_sgd:
            return fused_sgd_, (lists.get("momentum_buffer", []),), {"is_first_step": False, **options}
        beta1, beta2 = group["betas"]
        kernel = fused_adamw_ if isinstance(self._optimizer, torch.optim.AdamW) else fused_adam_
        largest = lists["max_exp_avg_sq"] if group["amsgrad"] else []
        slots: tuple[list[Any], ...] = (lists["exp_avg"], lists["exp_avg_sq"], largest, lists["step"])
        return kernel, slots, {"beta1": beta1, "beta2": beta2, **options}

    def _count(self, found_inf: float | torch.Tensor) -> None:
        """Add a number to every step count; if `found_inf` is a tensor, subtract it to undo a skipped update."""
        if isinstance(found_inf, float):
            if self._counts is not None:
                self._counts.add_(found_inf)
            else:
                foreach_add_(self._steps, found_inf)
        elif self._counts is not None:
            self._counts.sub_(found_inf)
        else:
            foreach_sub_(self._steps, [found_inf] * len(self._steps))

    def _gather(self) -> None:
        self._lists = []
        for part in self._parts:
            states = [self._optimizer.state[p] for p in part]
            self._lists.append({slot: [state[slot] for state in states] for slot in states[0]})
        self._steps = [count for lists in self._lists for count in lists.get("step", [])]
        self._counts = adjacent_vector(self._steps)
        self._gathered_from = list(self._contents())

    def _contents(self) -> Iterator[Any]:
        """Yield every parameter and state array in the optimizer's order, then an end mark.

        Compared by identity, they reveal replaced ones, for example after `load_state_dict`.
        """
        state = self._optimizer.state
        held = itertools.chain.from_iterable(map(dict.values, state.values()))
        return itertools.chain(itertools.chain.from_iterable(self._parts), state, held, (_END_MARK,))


def _either(found_inf: torch.Tensor | None, wait: torch.Tensor | None) -> torch.Tensor | None:
    """Return 1 if one of two numbers is 1, of which None is 0."""
    if found_inf is None or wait is None:
        return found_inf if wait is None else wait
    return torch.maximum(found_inf, wait)


def make_step_counts(number: int, device: torch.device) -> list[torch.Tensor]:
    """Return step counts of 0: float32 scalars adjacent in memory."""
    return list(torch.zeros(number, dtype=torch.float32, device=device).unbind())


def adjacent_vector(counts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the vector whose elements, in order, are these scalars; None if they are not adjacent in memory."""
    if not counts:
        return None
    first = counts[0]
    memory, begin = memory_address(first), int(first.storage_offset())
    for number, count in enumerate(counts, begin):
        same = count.dtype == first.dtype and not count.dim() and count.storage_offset() == number
        if not same or memory_address(count) != memory:
            return None
    with torch.no_grad():
        return first.as_strided((len(counts),), (1,))
