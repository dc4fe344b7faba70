"""S27 in torch: real parameter groups, as torch.optim with the same ones has them; shared and wrapped modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp import Group, ModelError, no_decay, schedules

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
CASES: dict[str, tuple[Any, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (polyamp.sgd(0.1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (polyamp.adam(0.01, **ADAM), torch.optim.Adam, {**ADAM, "fused": True}),
    "adamw": (polyamp.adamw(0.01, **ADAM), torch.optim.AdamW, {**ADAM, "fused": True}),
}
COSINE = schedules.warmup_cosine(0.05, 2, 10)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def batch(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def grouped(spec: Any) -> Any:
    """Four sets of hyperparameters."""
    groups = [*no_decay("bias", "norm"), Group("0", learning_rate_scale=0.5), Group("2/bias", learning_rate=0.2)]
    return spec.replace(weight_decay=0.3, groups=groups)


def by_hand(model: Any, kind: Any, options: dict[str, Any], rate: float) -> Any:
    """torch's optimizer with the groups that `grouped` means; the first three follow `rate`."""
    groups = [
        {"params": [model[0].weight], "lr": 0.5 * rate, "weight_decay": 0.3},
        {"params": [model[0].bias], "lr": 0.5 * rate, "weight_decay": 0.0},
        {"params": [model[1].weight, model[1].bias], "lr": rate, "weight_decay": 0.0},
        {"params": [model[2].weight], "lr": rate, "weight_decay": 0.3},
        {"params": [model[2].bias], "lr": 0.2, "weight_decay": 0.0},
    ]
    return kind(groups, lr=rate, **options)


def stepped_by_hand(model: Any, optimizer: Any, seed: int) -> None:
    x, y = map(torch.from_numpy, batch(seed))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_s27_bit_for_bit_as_torch_has_parameter_groups(name: str, scheduled: bool) -> None:
    spec, kind, options = CASES[name]
    made = polyamp.Recipe(optimizer=grouped(spec.replace(learning_rate=COSINE) if scheduled else spec))
    one, other = network(), network()
    state = polyamp.init(one, made)
    step = polyamp.train_step(loss_fn, made)
    theirs = by_hand(other, kind, options, spec.learning_rate)
    for seed in range(4):
        state, _ = step(state, batch(seed))
        if scheduled:
            for group, scale in zip(theirs.param_groups[:4], (0.5, 0.5, 1.0, 1.0), strict=True):
                group["lr"] = COSINE(seed) * scale
        stepped_by_hand(other, theirs, seed)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_s27_the_fast_way_and_torchs_own_step_agree(name: str) -> None:
    """One fused call a set of hyperparameters, and no walk of `optimizer.step()` over the parameters."""
    made = polyamp.Recipe(optimizer=grouped(CASES[name][0].replace(learning_rate=COSINE)), clip_norm=0.5)
    ends = []
    for fast in (True, False):
        state: Any = polyamp.init(network(), made)
        taken: list[bool] = []
        run = state.kernels.run
        state.kernels.run = lambda *args, own=run, seen=taken: seen.append(own(*args)) or seen[-1]
        if not fast:
            state.kernels = None
        for seed in range(3):
            state, _ = polyamp.train_step(loss_fn, made)(state, batch(seed))
        assert taken == [True] * 3 * fast
        ends.append(torch.cat([p.detach().ravel() for p in state.model.parameters()]))
    assert torch.equal(ends[0], ends[1])


def test_s27_compiled() -> None:
    """Also with a schedule, an absolute rate beside it, and a rate written into a group between two steps."""
    made = polyamp.Recipe(optimizer=grouped(CASES["adamw"][0].replace(learning_rate=COSINE)), clip_norm=1.0)
    ends = []
    for compile_ in (False, {"backend": "aot_eager"}):
        state: Any = polyamp.init(network(), made)
        step = polyamp.train_step(loss_fn, made, compile=compile_)
        for seed in range(4):
            if seed == 2:
                state.optimizer.param_groups[0]["lr_scale"] = 0.25
                state.optimizer.param_groups[-1]["lr"] = 0.01
            state, _ = step(state, batch(seed))
        ends.append(torch.cat([p.detach().ravel() for p in state.model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=2e-6)


def test_s27_shared_wrapped_and_reparametrized_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 6, bias=False)
            self.wte = nn.Embedding(6, 4)
            self.head.weight = self.wte.weight
            self.conv = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.norm = nn.RMSNorm(4)

    def decayed(model: nn.Module, *groups: Group) -> set[str]:
        state = polyamp.init(model, polyamp.Recipe(optimizer=polyamp.adamw(weight_decay=0.5, groups=groups)))
        assert state.groups is not None
        return {path for path in state.groups.numbers if state.groups.of(path).spec.weight_decay}

    every = {"head/weight", "conv/bias", *(f"conv/parametrizations/weight/original{n}" for n in (0, 1)), "norm/weight"}
    assert decayed(Tied(), Group("wte", eps=1.0)) == every
    assert decayed(Tied(), Group("wte/weight", weight_decay=0.0)) == every - {"head/weight"}
    assert decayed(Tied(), *no_decay("embedding")) == every - {"head/weight"}
    assert decayed(Tied(), *no_decay("norm")) == every - {"norm/weight"}
    assert decayed(Tied(), Group("conv/weight", weight_decay=0.0)) == {"head/weight", "conv/bias", "norm/weight"}
    parallel: Any = nn.DataParallel(Tied())
    rest = {f"module/{path}" for path in every - {"norm/weight"}}
    for glob in ("norm/**", "module/norm/**"):  # overrides leave the wrapper's prefix out, checkpoints have it
        assert decayed(parallel, Group(glob, weight_decay=0.0)) == rest


def test_s27_groups_of_the_recipe_are_not_divided_by_hand() -> None:
    made = polyamp.Recipe(optimizer=grouped(polyamp.adamw(0.1)))
    state: Any = polyamp.init(network(), made)
    first, second = state.optimizer.param_groups[:2]
    first["params"].append(second["params"].pop())
    with pytest.raises(ModelError, match="they are those of the recipe"):
        polyamp.train_step(loss_fn, made)(state, batch(0))


def test_s05_an_alias_may_be_of_a_frozen_module_or_of_one_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    made = polyamp.Recipe(
        policy=polyamp.Policy("mixed_bfloat16", overrides={"scores": "float32"}),
        optimizer=polyamp.adamw(0.1, groups=no_decay("bias")),
        aliases={"body": {"torch": "0"}, "scores": {"torch": "1"}},
    )
    state = polyamp.init(model, made)
    assert state.groups is not None
    assert list(state.groups.numbers) == ["2/weight", "2/bias"]


def test_s11_a_group_clips_gradients_whose_factor_leaves_float32() -> None:
    """A norm 1e40 times the limit: the gradients are scaled down, and not made 0."""
    model = nn.Linear(3, 2, bias=False)
    made = polyamp.Recipe(optimizer=polyamp.sgd(1.0, groups=[Group("weight", clip_norm=1e-4)]))
    state, before = polyamp.init(model, made), model.weight.detach().clone()
    polyamp.train_step(lambda m, x: m(x).sum() * 1e36, made)(state, torch.ones(4, 3))
    with torch.no_grad():
        moved = (model.weight - before).double().norm()
    torch.testing.assert_close(float(moved), 1e-4, rtol=1e-3, atol=0)
