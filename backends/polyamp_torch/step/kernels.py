"""torch's fused SGD, Adam and AdamW without the walk over the parameters that `optimizer.step()` makes every time.

For the optimizers that polyamp makes from its specs; called by `optimizers`. The lists that the kernels take are kept,
and `torch.optim`'s functional form is called with them. Whoever watches `optimizer.step` (hooks, torch's learning-rate
schedulers) is not passed over: then, and for an update that leaves parameters out, `run` declines.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from polyamp_torch.compat import step_is_watched

Lists = dict[str, list[Any]]


class Kernels:
    """One optimizer's kernel with its lists.

    Args:
        optimizer: a fused SGD, Adam or AdamW with one group, whose state arrays are made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[torch.Tensor] = optimizer.param_groups[0]["params"]
        self._lists: Lists = {}
        self._gathered_from: list[Any] = []

    def run(self, grads: list[torch.Tensor], found_inf: torch.Tensor | None, by: torch.Tensor | None) -> bool:
        """Update the parameters from gradients in their order; False if `optimizer.step()` must do it.

        Args:
            grads: one per parameter.
            found_inf: float32 scalar, 1 to skip; or None.
            by: float32 scalar that the gradients are divided by, in place; or None.
        """
        one_group = len(self._optimizer.param_groups) == 1
        if len(grads) != len(self._parameters) or not one_group or step_is_watched(self._optimizer):
            return False
        if not self._are_current():
            self._lists, self._gathered_from = self._gathered(), self._contents()
        group, lists = self._optimizer.param_groups[0], self._lists
        slots = ("momentum_buffer",) if "momentum" in group else ("exp_avg", "exp_avg_sq", "step")
        if not all(slot in lists for slot in slots) and group.get("momentum", 1.0):
            return False
        common = {"lr": group["lr"], "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
        amp: dict[str, Any] = {"foreach": False, "fused": True, "grad_scale": by, "found_inf": found_inf}
        with torch.no_grad():
            if isinstance(self._optimizer, torch.optim.SGD):
                moments = lists.get("momentum_buffer") or [None] * len(grads)
                rest = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
                sgd(self._parameters, grads, moments, has_sparse_grad=False, **amp, **common, **rest)  # type: ignore[no-untyped-call, unused-ignore]  # as torch annotates it
                return True
            kernel = adamw if isinstance(self._optimizer, torch.optim.AdamW) else adam
            beta1, beta2 = group["betas"]
            kernel(
                self._parameters,
                grads,
                lists["exp_avg"],
                lists["exp_avg_sq"],
                [],
                lists["step"],
                **amp,
                **common,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
            )
        return True

    def _gathered(self) -> Lists:
        states = [self._optimizer.state[p] for p in self._parameters]
        return {slot: [state[slot] for state in states] for slot in states[0]}

    def _contents(self) -> list[Any]:
        """Every parameter and every state array, in the order in which the optimizer holds them."""
        state = self._optimizer.state
        return [*self._parameters, *state, *(item for slots in state.values() for item in slots.values())]

    def _are_current(self) -> bool:
        """False if a parameter or a state array was replaced, as `load_state_dict` does, or by hand."""
        held, known = self._contents(), self._gathered_from
        return len(held) == len(known) and all(map(operator.is_, held, known))
