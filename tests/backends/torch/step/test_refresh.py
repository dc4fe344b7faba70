"""S28 in torch: LoRA, new heads, progressive unfreezing, beside loops by hand in which the moments are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import polyamp
from polyamp.errors import ModelError, StateError

TRACED: dict[str, Any] = {"backend": "aot_eager"}
LION = polyamp.lion(0.02, weight_decay=0.1, groups=polyamp.no_decay("norm"))


class LoRA(nn.Module):
    """A frozen layer and a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return out


class Added(nn.Module):
    """The same as a parametrization of the weight, which moves the weight itself to another path."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(weight.shape[0], 1)), nn.Parameter(torch.zeros(weight.shape[1]))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.left * self.right


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def item(seed: int, outputs: int = 3) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, 6)).astype("f4"), rng.normal(size=(8, outputs)).astype("f4")


def add_lora(model: Any) -> None:
    model[0] = LoRA(model[0])


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model[2], "weight", Added(model[2].weight))


def new_head(model: Any) -> None:
    torch.manual_seed(3)
    model[4] = nn.Linear(8, 3)


def freeze_first(model: Any) -> None:
    model[0].requires_grad_(False)


def thaw(model: Any) -> None:
    model.requires_grad_(True)


def by_hand(changes: list[Callable[[Any], None]], make: Callable[[Any], Any]) -> nn.Module:
    """Two steps, a change, two steps; a new optimizer after each change, with the state of what stayed."""
    model = network()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for number in range(len(changes) + 1):
        for seed in (2 * number, 2 * number + 1):
            x, y = map(torch.from_numpy, item(seed))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if number < len(changes):
            changes[number](model)
            kept, optimizer = optimizer.state, make([p for p in model.parameters() if p.requires_grad])
            for p in optimizer.param_groups[0]["params"]:
                if p in kept:
                    optimizer.state[p] = kept[p]
    return model


MAKERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.02, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
}
SPECS = {"adamw": polyamp.adamw(0.02, weight_decay=0.1), "sgd": polyamp.sgd(0.05, momentum=0.9)}
CHANGES: dict[str, list[Callable[[Any], None]]] = {
    "lora": [add_lora],
    "parametrized": [parametrized],
    "head of the same shape": [new_head],
    "frozen and thawed": [freeze_first, thaw],
}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "native adamw", "native sgd"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_s28_a_loop_by_hand_in_which_the_moments_are_kept(changes: list[Callable[[Any], None]], kind: str) -> None:
    name = kind.removeprefix("native ")
    wanted = by_hand(changes, MAKERS[name])
    model = network()
    optimizer: Any = MAKERS[name](model.parameters()) if kind != name else SPECS[name]
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer, scaler=polyamp.LossScaler(init_scale=64.0))
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for number in range(len(changes) + 1):
        for seed in (2 * number, 2 * number + 1):
            state, _ = step(state, item(seed))
        if number < len(changes):
            changes[number](model)
            with pytest.raises(ModelError, match=r"polyamp\.refresh\(state\)"):
                step(state, item(0))
            before, state = state, polyamp.refresh(state)
            with pytest.raises(StateError, match="this state was refreshed"):
                step(before, item(0))
    assert int(state.step) == 2 * len(changes) + 2
    for (path, one), other in zip(wanted.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6, msg=path)


def test_s28_a_compiled_step_compiles_once_more() -> None:
    ends = []
    for how in (False, TRACED):
        torch._dynamo.reset()
        model = network()
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.02))
        state = polyamp.init(model, recipe)
        step = polyamp.train_step(loss_fn, recipe, compile=how)
        for seed in range(4):
            if seed == 2:
                add_lora(model)
                state = polyamp.refresh(state)
            state, _ = step(state, item(seed))
        ends.append(torch.cat([p.detach().ravel() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=2e-5, atol=1e-6)


def grouped(model: Any) -> torch.optim.Optimizer:
    parts = [{"params": model[:4].parameters()}, {"params": model[4].parameters(), "lr": 0.1}]
    return torch.optim.SGD(parts, 0.05, momentum=0.9)


def test_s28_of_several_groups_a_new_parameter_is_put_into_one_by_the_user() -> None:
    model = network()
    optimizer = grouped(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    scheduler.step()
    new_head(model)
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    with pytest.raises(ModelError, match=r"'4/weight' is new, and the optimizer has 2 parameter groups.*add_param_gr"):
        polyamp.refresh(state)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == held
    moments = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    optimizer.param_groups[1]["params"] = list(model[4].parameters())
    state = polyamp.refresh(state)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.05]
    assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], moments)
    assert model[4].weight not in optimizer.state
    state, _ = step(state, item(1))
    scheduler.step()


def test_s28_keep_and_fresh_say_otherwise() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.02))
    model = network()
    state = polyamp.init(model, recipe)
    state, _ = polyamp.train_step(loss_fn, recipe)(state, item(0))
    slots = state.backend.export_state(state)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)  # other objects with the same values
    state = polyamp.refresh(state, keep="**", fresh=["4"])
    for name, array in state.backend.export_state(state).items():
        if name.startswith("optimizer/state"):
            anew = name.startswith("optimizer/state/4/")
            assert np.array_equal(array, np.zeros_like(array) if anew else slots[name]), name


def test_s28_options_written_into_the_groups_stay_and_a_schedule_goes_on() -> None:
    rate = polyamp.schedules.step(0.1, every=1, factor=0.5)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(rate, momentum=0.5))
    model = network()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state.optimizer.param_groups[0]["lr_scale"] = 0.1
    state.optimizer.param_groups[0]["momentum"] = 0.25
    state, _ = step(state, item(0))
    add_lora(model)
    state = polyamp.refresh(state)
    group = state.optimizer.param_groups[0]
    assert (group["lr_scale"], group["momentum"], len(group["params"])) == (0.1, 0.25, 6)
    state, _ = step(state, item(1))
    assert group["lr"] == pytest.approx(0.1 * 0.5 * 0.1)


def test_s28_groups_and_overrides_are_resolved_again() -> None:
    """The adapters have a group of their own, which matches nothing before they are there; so the recipe names both."""
    groups = [polyamp.Group(["0/**"], learning_rate=0.5)]
    policy = polyamp.Policy("mixed_bfloat16", overrides={"0": "float32"})
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.05, groups=groups))
    model = network()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    add_lora(model)
    state = polyamp.refresh(state)
    assert state.plan.at("0/base").dtype == "float32"
    rates = {id(p): group["lr"] for group in state.optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in (model[0].up, model[0].down, model[2].weight)] == [0.5, 0.5, 0.05]
    step(state, item(1))


def test_s28_a_parameter_with_gaps_in_memory_ends_the_fused_kernels() -> None:
    """They would write between its elements."""
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.02, weight_decay=0.5))
    model = network()
    state: Any = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    memory = torch.ones(3, 16)
    model[4].weight = nn.Parameter(memory[:, ::2])
    state = polyamp.refresh(state)
    assert [group["fused"] for group in state.optimizer.param_groups] == [False]
    state, _ = step(state, item(1))
    assert torch.equal(memory[:, 1::2], torch.ones(3, 8))
    assert not torch.equal(memory[:, ::2], torch.ones(3, 8))


def test_s28_groups_divided_by_hand_and_then_by_the_recipe_are_refused() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=LION)
    model = network()
    state: Any = polyamp.init(model, recipe)
    (group,) = state.optimizer.param_groups
    state.optimizer.param_groups.append({**group, "params": [group["params"].pop()]})
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    tanh, model[1] = model[1], nn.LayerNorm(8)
    with pytest.raises(ModelError, match="divided by hand, and the recipe's groups now divide"):
        polyamp.refresh(state)
    model[1] = tanh
    _, result = step(state, item(1))
    assert int(result.step) == 2


def test_s28_a_refused_model_leaves_the_state_as_it_was() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.02))
    model = network()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe)
    head, model[4] = model[4], nn.Linear(8, 3, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"'4/weight' is stored as float64"):
        polyamp.refresh(state)
    model[4] = head
    _, result = step(state, item(0))
    assert int(result.step) == 1


def test_s28_a_scheduler_of_torchs_goes_on_with_a_specs_optimizer() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1, momentum=0.5))
    model = network()
    state: Any = polyamp.init(model, recipe)
    scheduler = torch.optim.lr_scheduler.StepLR(state.optimizer, 1, 0.5)
    step = polyamp.train_step(loss_fn, recipe)
    state, _ = step(state, item(0))
    scheduler.step()
    add_lora(model)
    state = polyamp.refresh(state)
    state, _ = step(state, item(1))
    scheduler.step()
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    before = model[4].bias.detach().clone()
    moments = state.optimizer.state[model[4].bias]["momentum_buffer"].clone()
    x, y = map(torch.from_numpy, item(2))
    (grad,) = torch.autograd.grad(torch.nn.functional.mse_loss(model(x), y), [model[4].bias])
    step(state, item(2))
    torch.testing.assert_close(model[4].bias, before - 0.025 * (0.5 * moments + grad), rtol=1e-5, atol=1e-6)


def test_the_guide_runs() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "growing_models.md").read_text(encoding="utf-8")
    section = guide.split("\n## torch\n")[1].split("\n## ")[0]
    exec(compile(section.split("```python\n")[1].split("```")[0], "docs/guides/growing_models.md", "exec"), {})
