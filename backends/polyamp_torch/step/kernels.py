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
    """One optimizer's kernel with its lists, called once for each set of hyperparameters.

    Args:
        optimizer: a fused SGD, Adam or AdamW whose state arrays are made.
        parameters: in the order in which gradients will come.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._parts: list[list[torch.Tensor]] = [group["params"] for group in optimizer.param_groups]
        self._parameters = [p for part in self._parts for p in part]
        place = {id(p): number for number, p in enumerate(parameters)}
        self._places = [[place[id(p)] for p in part] for part in self._parts]
        self._alike = len({(p.device, p.dtype) for p in self._parameters}) == 1
        self._lists: list[Lists] = []
        self._steps: list[torch.Tensor] = []
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
        groups = optimizer.param_groups
        if len(grads) != len(self._parameters) or len(groups) != len(self._parts) or not self._alike:
            return False
        if step_is_watched(optimizer):
            return False
        device = grads[0].device
        if any(isinstance(group["lr"], torch.Tensor) and group["lr"].device != device for group in groups):
            return False
        if not all(map(operator.is_, self._contents(), self._gathered_from)):
            self._gather()
        sgd = isinstance(optimizer, torch.optim.SGD)
        if not all(map(self._sgd_fits if sgd else self._adam_fits, groups, self._lists)):
            return False
        with torch.no_grad():
            if not sgd:
                self._count(1.0)
            for number, (group, lists, part) in enumerate(zip(groups, self._lists, self._parts, strict=True)):
                own = grads if len(groups) == 1 else [grads[place] for place in self._places[number]]
                options = {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
                (self._sgd if sgd else self._adam)(
                    group, part, own, lists, {**options, "grad_scale": by, "found_inf": found_inf}
                )
            if not sgd and found_inf is not None:
                self._count(found_inf)
        return True

    def _sgd_fits(self, group: dict[str, Any], lists: Lists) -> bool:
        return bool(group["momentum"]) == bool(lists.get("momentum_buffer"))

    def _adam_fits(self, group: dict[str, Any], lists: Lists) -> bool:
        return {"exp_avg", "exp_avg_sq", "step"} <= lists.keys() and isinstance(group["betas"][0], float | int)

    def _sgd(
        self,
        group: dict[str, Any],
        part: list[torch.Tensor],
        grads: list[torch.Tensor],
        lists: Lists,
        options: dict[str, Any],
    ) -> None:
        rest = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        fused_sgd_(part, grads, lists.get("momentum_buffer", []), is_first_step=False, **options, **rest)

    def _adam(
        self,
        group: dict[str, Any],
        part: list[torch.Tensor],
        grads: list[torch.Tensor],
        lists: Lists,
        options: dict[str, Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        kernel = fused_adamw_ if isinstance(self._optimizer, torch.optim.AdamW) else fused_adam_
        moments: tuple[list[Any], ...] = (lists["exp_avg"], lists["exp_avg_sq"], [])
        betas = {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        kernel(part, grads, *moments, lists["step"], amsgrad=False, **betas, **options)

    def _count(self, found_inf: float | torch.Tensor) -> None:
        """One more update of every parameter, or one taken back where `found_inf` is a tensor that says so."""
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
        self._counts = side_by_side(self._steps)
        self._gathered_from = list(self._contents())

    def _contents(self) -> Iterator[Any]:
        """Every parameter and every state array, in the order in which the optimizer holds them, and a mark of the end:
        compared as objects they tell a parameter or an array that was replaced, as `load_state_dict` does, or by hand.
        """
        state = self._optimizer.state
        held = itertools.chain.from_iterable(map(dict.values, state.values()))
        return itertools.chain(itertools.chain.from_iterable(self._parts), state, held, (_END,))


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
