"""torch's fused SGD, Adam and AdamW without the walk over the parameters that `optimizer.step()` makes every time.

For the optimizers that polyamp makes from its specs; called by `optimizers`. The lists that the kernels take are kept,
and the kernels are called with them. The step counts that Adam keeps for each parameter lie side by side in memory
(`counts_for`), so that one addition moves all of them. Whoever watches `optimizer.step` (hooks, torch's learning-rate
schedulers) is not passed over: then, for an update that leaves parameters out, and for parameters on several devices,
`run` declines.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from polyamp_torch.compat import (
    foreach_add_,
    foreach_sub_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
    step_is_watched,
)

Lists = dict[str, list[Any]]
_END: Final = object()


class Kernels:
    """One optimizer's kernel with its lists.

    Args:
        optimizer: a fused SGD, Adam or AdamW with one group, whose state arrays are made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[torch.Tensor] = optimizer.param_groups[0]["params"]
        self._alike = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self._lists: Lists = {}
        self._counts: torch.Tensor | None = None
        self._gathered_from: list[Any] = [None]

    def run(self, grads: list[torch.Tensor], found_inf: torch.Tensor | None, by: torch.Tensor | None) -> bool:
        """Update the parameters from gradients in their order; False if `optimizer.step()` must do it.

        Args:
            grads: one per parameter.
            found_inf: float32 scalar, 1 to skip; or None.
            by: float32 scalar that the gradients are divided by, in place; or None.
        """
        optimizer = self._optimizer
        if len(grads) != len(self._parameters) or len(optimizer.param_groups) != 1 or not self._alike:
            return False
        group = optimizer.param_groups[0]
        rate = group["lr"]
        if step_is_watched(optimizer) or (isinstance(rate, torch.Tensor) and rate.device != grads[0].device):
            return False
        if not all(map(operator.is_, self._contents(), self._gathered_from)):
            self._gather()
        amp = {"maximize": group["maximize"], "grad_scale": by, "found_inf": found_inf}
        common = {"lr": rate, "weight_decay": group["weight_decay"], **amp}
        with torch.no_grad():
            if isinstance(optimizer, torch.optim.SGD):
                return self._sgd(group, grads, common)
            return self._adam(group, grads, common)

    def _sgd(self, group: dict[str, Any], grads: list[torch.Tensor], common: dict[str, Any]) -> bool:
        moments = self._lists.get("momentum_buffer", [])
        if bool(group["momentum"]) != bool(moments):
            return False
        rest = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        fused_sgd_(self._parameters, grads, moments, is_first_step=False, **common, **rest)
        return True

    def _adam(self, group: dict[str, Any], grads: list[torch.Tensor], common: dict[str, Any]) -> bool:
        lists, (beta1, beta2), counts = self._lists, group["betas"], self._counts
        if not {"exp_avg", "exp_avg_sq", "step"} <= lists.keys() or not isinstance(beta1, float | int):
            return False
        steps = lists["step"]
        if counts is not None:
            counts.add_(1.0)
        else:
            foreach_add_(steps, 1.0)
        kernel = fused_adamw_ if isinstance(self._optimizer, torch.optim.AdamW) else fused_adam_
        moments: tuple[list[Any], ...] = (lists["exp_avg"], lists["exp_avg_sq"], [])
        betas = {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        kernel(self._parameters, grads, *moments, steps, amsgrad=False, **betas, **common)
        found_inf = common["found_inf"]
        if found_inf is not None and counts is not None:
            counts.sub_(found_inf)
        elif found_inf is not None:
            foreach_sub_(steps, [found_inf] * len(steps))
        return True

    def _gather(self) -> None:
        states = [self._optimizer.state[p] for p in self._parameters]
        self._lists = {slot: [state[slot] for state in states] for slot in states[0]}
        self._counts = side_by_side(self._lists.get("step", []))
        self._gathered_from = list(self._contents())

    def _contents(self) -> Iterator[Any]:
        """Every parameter and every state array, in the order in which the optimizer holds them, and a mark of the end:
        compared as objects they tell a parameter or an array that was replaced, as `load_state_dict` does, or by hand.
        """
        state = self._optimizer.state
        held = itertools.chain.from_iterable(map(dict.values, state.values()))
        return itertools.chain(self._parameters, state, held, (_END,))


def counts_for(number: int, device: torch.device) -> list[torch.Tensor]:
    """Step counts of 0, float32 scalars that lie side by side."""
    return list(torch.zeros(number, dtype=torch.float32, device=device).unbind())


def side_by_side(counts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The one vector that these scalars are the elements of, in order; None where they are not."""
    if not counts:
        return None
    first = counts[0]
    memory, begin = first.untyped_storage().data_ptr(), int(first.storage_offset())
    for number, count in enumerate(counts, begin):
        same = count.dtype == first.dtype and not count.dim() and count.storage_offset() == number
        if not same or count.untyped_storage().data_ptr() != memory:
            return None
    with torch.no_grad():
        return first.as_strided((len(counts),), (1,))
