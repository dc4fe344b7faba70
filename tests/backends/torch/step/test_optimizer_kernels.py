"""Fused kernels called with kept lists: the bits of `optimizer.step()`, wherever the step counts lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp_torch.step import optimizers
from polyamp_torch.step.grad_stats import global_norm_and_finite
from polyamp_torch.step.torch_only.optimizer_kernels import adjacent_vector, make_step_counts

SPECS = {
    "adam": (polyamp.adam(0.01, weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (polyamp.adamw(0.01), torch.optim.AdamW, {"weight_decay": polyamp.adamw(0.01).weight_decay}),
    "sgd": (polyamp.sgd(0.01), torch.optim.SGD, {}),
    "momentum": (polyamp.sgd(0.01, momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
BATCH = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_fn(net: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = net(x).square().mean()
    return loss


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_s13_the_kernels_give_the_bits_of_optimizer_step(name: str, apart: bool) -> None:
    spec, kind, options = SPECS[name]
    recipe = polyamp.Recipe(policy="float32", optimizer=spec)
    state, step = polyamp.init(model(), recipe), polyamp.train_step(loss_fn, recipe)
    if apart:
        optimizers.separate_step_counts(state.optimizer)
    net = model()
    optimizer = kind(net.parameters(), lr=0.01, fused=True, **options)
    for _ in range(4):
        state, _ = step(state, BATCH)
        optimizer.zero_grad()
        loss_fn(net, BATCH).backward()
        optimizer.step()
    for own, theirs in zip(state.model.parameters(), net.parameters(), strict=True):
        assert torch.equal(own, theirs)
    if name.startswith("adam"):
        counts = [slots["step"] for slots in state.optimizer.state.values()]
        assert [count.item() for count in counts] == [4.0] * 4
        assert (adjacent_vector(counts) is None) is apart


def test_s22_counts_stay_side_by_side_over_a_restore(tmp_path: Any) -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.01))
    state, step = polyamp.init(model(), recipe), polyamp.train_step(loss_fn, recipe)
    for _ in range(3):
        state, _ = step(state, BATCH)
    polyamp.save(state, tmp_path / "saved")
    other = polyamp.restore(polyamp.init(model(), recipe), tmp_path / "saved")
    counts = [slots["step"] for slots in other.optimizer.state.values()]
    together = adjacent_vector(counts)
    assert together is not None
    assert together.tolist() == [3.0] * 4


def test_counts_that_only_look_alike_are_not_side_by_side() -> None:
    counts = make_step_counts(3, torch.device("cpu"))
    assert adjacent_vector(counts) is not None
    assert adjacent_vector([]) is None
    assert adjacent_vector([counts[0], counts[2], counts[1]]) is None
    assert adjacent_vector([counts[0], torch.zeros(3)[1], counts[2]]) is None
    assert adjacent_vector(counts[1:]) is not None


@pytest.mark.parametrize(
    "sizes", [[3], [0, 0], [5, 70_000, 6, 3000, 7], [2048] * 70, [2000, 100_000, 2000, 0], [16384 * 5 + 3]]
)
def test_s11_the_norm_of_every_mix_of_sizes(sizes: list[int]) -> None:
    """Tiny ones are laid end to end, by a plan that a list of sizes has once."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    exact = np.sqrt(sum(float(np.sum(np.square(array.astype(np.float64)))) for array in arrays))
    for _ in range(2):
        norm, finite = global_norm_and_finite([torch.from_numpy(array) for array in arrays])
        np.testing.assert_allclose(norm.item(), exact, rtol=1e-6)
        assert bool(finite)
    if sizes[-1]:
        arrays[-1][-1] = np.inf
        assert not bool(global_norm_and_finite([torch.from_numpy(array) for array in arrays]).finite)
