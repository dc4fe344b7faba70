"""S27 in torch: groups that train after a number of updates, compiled, in fused kernels, and as torch freezes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp import Group, schedules
from polyamp_torch.step.optimizers import apply_optimizer
from tests.backends.torch.step.test_groups import batch, loss_fn, network

COSINE = schedules.warmup_cosine(0.05, 2, 10)
LATE = Group("0", trainable_after=3, learning_rate_scale=0.5, clip_norm=0.05)
SPECS = [polyamp.sgd(0.1, momentum=0.9), polyamp.adamw(COSINE, weight_decay=0.1), polyamp.lion(0.01)]


def end(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().ravel() for p in model.parameters()])


def test_s27_a_late_group_is_requires_grad_and_add_param_group() -> None:
    """What torch does with a layer that is frozen for three updates and then gets a group of its own."""
    late = [Group("0", trainable_after=3)]
    made = polyamp.Recipe(optimizer=polyamp.adamw(0.01, weight_decay=0.1, groups=late), clip_norm=0.5, clip_eps=1e-6)
    one, other = network(), network()
    state, step = polyamp.init(one, made), polyamp.train_step(loss_fn, made)
    other[0].requires_grad_(False)
    options: Any = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
    theirs = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], **options)
    for seed in range(6):
        if seed == 3:
            other[0].requires_grad_(True)
            theirs.add_param_group({"params": list(other[0].parameters())})
        state, result = step(state, batch(seed))
        x, y = map(torch.from_numpy, batch(seed))
        theirs.zero_grad()
        nn.functional.mse_loss(other(x), y).backward()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(end(one), end(other), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_s27_a_late_group_compiled(spec: Any) -> None:
    """One graph before and after the start."""
    made = polyamp.Recipe(optimizer=spec.replace(groups=[LATE]), clip_norm=0.5)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    ends = []
    for compile_ in (False, {"backend": backend}):
        state: Any = polyamp.init(network(), made)
        before = state.model[0].weight.detach().clone()
        step = polyamp.train_step(loss_fn, made, compile=compile_)
        for seed in range(6):
            assert torch.equal(state.model[0].weight, before) is (seed <= 3)
            state, _ = step(state, batch(seed))
        ends.append(end(state.model))
    assert len(graphs) == 1
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("found_inf", [False, True])
def test_s27_fused_kernels_leave_a_waiting_group_alone(spec: Any, found_inf: bool) -> None:
    """As on a device, where the host knows neither of the flags: the slots and the counts of the group stay."""
    spec = spec.replace(learning_rate=0.05)
    made = polyamp.Recipe(optimizer=spec.replace(groups=[LATE]))
    state: Any = polyamp.init(network(), made)
    twin: Any = polyamp.init(network(), made)
    for each in (state, twin):
        for p in each.parameters.values():
            p.grad = torch.ones_like(p)
    assert [member.start for member in state.groups.distinct] == [3, 0]
    grads = [p.grad for p in state.parameters.values()]
    assert state.kernels.run(grads, torch.ones(()) if found_inf else None, None, [torch.ones(()), None])
    if not found_inf:
        for p in twin.model[0].parameters():
            p.grad = None
        apply_optimizer(twin.optimizer, spec, twin.step, None)
    assert torch.equal(end(state.model), end(twin.model))
    for own, theirs in zip(state.parameters.values(), twin.parameters.values(), strict=True):
        for slot, value in state.optimizer.state[own].items():
            assert torch.equal(value, twin.optimizer.state[theirs][slot])
