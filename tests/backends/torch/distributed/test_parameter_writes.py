"""S12 on several ranks: a parameter that the forward pass writes to, under DistributedDataParallel and fully_shard."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.step.torch_only import parameter_write_broadcast
from tests import ranks
from tests.backends.torch.distributed.training import ENGINES, ROWS, collectives, mlp

INF = float("inf")


class Constrained(nn.Module):
    """A max-norm constraint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.w = nn.Linear(6, 3), nn.Parameter(torch.full((3,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.w.clamp_(max=2.0)
        out: torch.Tensor = self.layer(x) * self.w
        return out


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = (model(batch["x"]).float().square().mean(1) * batch["gain"]).mean()
    return loss


def constrained(rank: int, world: int) -> dict[str, Any]:
    """The weights behind a skipped and an applied step, and what is refused."""
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(2 + rank)
    x = torch.randn(ROWS // world, 6, generator=generator)
    for mode in ("autocast", "cast"):
        policy = polyamp.Policy("mixed_bfloat16", mode=mode)
        scaler = polyamp.LossScaler(init_scale=8.0)
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.0), scaler=scaler, accumulate_steps=2)
        model = Constrained()
        state: Any = polyamp.init(ENGINES["ddp"](model, world), recipe)
        step = polyamp.train_step(loss_fn, recipe)
        skipped = []
        for gain in (INF if rank == 0 else 1.0, 1.0):
            _, result = step(state, {"x": x, "gain": torch.full((x.shape[0],), gain)})
            skipped.append((bool(result.skipped), model.w.tolist()))
        found[mode] = skipped
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(fully_shard(Constrained(), mesh=init_device_mesh("cpu", (world,))), recipe)
    before = [value.tobytes() for value in state.export().values()]
    try:
        polyamp.train_step(loss_fn, recipe)(state, {"x": x, "gain": torch.ones(x.shape[0])})
    except UnsupportedError as error:
        found["refused"] = str(error)
    found["as it was"] = before == [value.tobytes() for value in state.export().values()]
    return found


def test_s12_a_write_in_the_forward_pass_on_two_ranks() -> None:
    found = ranks.run(constrained, 2, 2)
    assert found[0] == found[1]
    for mode in ("autocast", "cast"):
        assert found[0][mode] == [(True, [3.0] * 3), (False, [2.0] * 3)]
    assert "writes to the parameter 'w', which fully_shard gathers" in found[0]["refused"]
    assert found[0]["as it was"]


class Statistics(nn.Module):
    """Running statistics that are frozen parameters, as some meta-learning code keeps them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.gain, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.var = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.batch_norm(self.first(x), self.mean, self.var, self.gain, self.bias, training=True)
        out: torch.Tensor = self.last(functional.relu(x))
        return out


class Codebook(nn.Module):
    """A trained codebook, one row of which each pass replaces by the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.code = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        self.replace(z.detach().mean(0))
        out: torch.Tensor = self.last(z + 0.1 * self.code.mean(0))
        return out

    def replace(self, row: torch.Tensor) -> None:
        """Write the first row."""
        with torch.no_grad():
            self.code[0] = row


class Silent(Codebook):
    """Writes without a trace in the version counter."""

    def replace(self, row: torch.Tensor) -> None:
        """Write the first row."""
        self.code.data[0] = row


class Chosen(nn.Module):
    """Writes where its batch says so, as data-dependent constraints do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.w = nn.Linear(6, 3), nn.Parameter(torch.ones(3))
        self.other = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, write: str) -> torch.Tensor:
        with torch.no_grad():
            if write:
                self.get_parameter(write).add_(x.detach().float().mean())
        out: torch.Tensor = self.layer(x) * self.w * self.other.clone()
        return out


def rows(rank: int, number: int, gain: float = 1.0) -> dict[str, torch.Tensor]:
    """A rank's batch, unlike the other's."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank)) + 3.0 * rank
    return {"x": x, "gain": torch.full((4,), gain)}


def values(model: nn.Module) -> dict[str, list[Any]]:
    """Every parameter, frozen ones included."""
    return {name: p.tolist() for name, p in model.named_parameters()}


POLICIES = {
    "float32": polyamp.Policy("float32"),
    "bfloat16": polyamp.Policy("mixed_bfloat16"),
    "cast": polyamp.Policy("mixed_bfloat16", mode="cast"),
}


def recipe_of(policy: str, rate: float, count: int) -> polyamp.Recipe:
    """One that skips steps, and scales nothing."""
    return polyamp.Recipe(
        policy=POLICIES[policy],
        optimizer=polyamp.sgd(rate),
        scaler=polyamp.LossScaler(init_scale=1.0),
        accumulate_steps=count,
    )


def by_halves(state: Any, batch: Any) -> tuple[Any, Any]:
    """A step by `value_and_grad` and `apply_gradients`."""
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch)
    return polyamp.apply_gradients(state, gradients)


def written(rank: int, world: int) -> dict[str, Any]:
    """The parameters before and behind every step, the first and the fourth of which are skipped; and those of rank 0
    by itself, without updates."""
    found: dict[str, Any] = {}
    for make in (Statistics, Codebook, Silent):
        for policy in POLICIES:
            for count in (0, 1, 2):
                for rate in (0.0, 0.1):
                    recipe = recipe_of(policy, rate, count or 1)
                    model, alone = make(), make()
                    state = polyamp.init(ENGINES["ddp"](model, world), recipe)
                    state_alone = polyamp.init(alone, recipe)
                    step: Any = polyamp.train_step(loss_fn, recipe) if count else by_halves
                    step_alone: Any = polyamp.train_step(loss_fn, recipe)
                    said = [(True, values(model))]
                    for number, gain in enumerate((INF, 1.0, 1.0, INF, 1.0)):
                        state, result = step(state, rows(rank, number, gain if rank else 1.0))
                        if gain == 1.0:
                            state_alone, _ = step_alone(state_alone, rows(0, number))
                        said.append((bool(result.skipped), values(model)))
                    same = rate > 0.0 or values(model) == values(alone)
                    found[f"{make.__name__} {policy} {count} {rate}"] = (said, int(state.step), same)
    return found


def test_s09_what_a_pass_writes_to_a_parameter_is_rank_0s_on_every_rank() -> None:
    one, other = ranks.run(written, 2, 2)
    for name, (said, steps, same) in one.items():
        assert other[name] == (said, steps, same), name
        assert [skipped for skipped, _ in said] == [True, True, False, False, True, False], name
        assert said[0] == said[1], name
        assert said[3][1] == said[4][1], name
        assert said[1][1] != said[2][1] != said[3][1] != said[5][1], name
        assert (steps, same) == (3, True), name


def updated(rank: int, world: int) -> float:
    """How far a codebook is from the mean gradient's update of what rank 0's pass wrote."""
    model = Codebook()
    state = polyamp.init(ENGINES["ddp"](model, world), recipe_of("float32", 0.5, 1))
    polyamp.train_step(loss_fn, state.recipe)(state, rows(rank, 0))
    each = []
    for other in range(world):
        alone = Codebook()
        torch.autograd.backward(loss_fn(alone, rows(other, 0)))
        each.append((alone.code.detach().clone(), alone.code.grad))
    gradient = torch.stack([grad for _, grad in each if grad is not None]).mean(0)
    assert not torch.equal(each[0][0], each[1][0])
    return float((model.code - (each[0][0] - 0.5 * gradient)).abs().max())


def test_s12_the_update_is_of_what_was_written() -> None:
    assert max(ranks.run(updated, 2, 2)) < 1e-6


def chosen_loss(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch["x"], batch["write"]).float().square().mean()
    return loss


def some(rank: int, world: int) -> dict[str, Any]:
    """Writes that come on one rank only, in the first step or later, and on each rank to another parameter."""
    found: dict[str, Any] = {}
    plans = {
        "rank 1 first": [("", "other"), ("", ""), ("", "")],
        "rank 0 first": [("other", ""), ("", ""), ("", "other")],
        "rank 0 later": [("", ""), ("other", ""), ("", "")],
        "rank 1 later": [("", ""), ("", "w"), ("", "")],
        "unlike": [("w", "other"), ("", ""), ("other", "w")],
    }
    for name, plan in plans.items():
        for halves in (False, True):
            model = Chosen()
            state = polyamp.init(ENGINES["ddp"](model, world), recipe_of("float32", 0.0, 1))
            alone = Chosen()
            step: Any = polyamp.train_step(chosen_loss, state.recipe)
            for number, write in enumerate(plan[: 1 if halves else 3]):  # value_and_grad refuses later first writes
                batch = {**rows(rank, number), "write": write[rank]}
                if halves:
                    _, gradients = polyamp.value_and_grad(chosen_loss)(state, batch)
                    state, _ = polyamp.apply_gradients(state, gradients)
                else:
                    state, _ = step(state, batch)
                alone(rows(0, number)["x"], write[0])
            found[f"{name} {halves}"] = (values(model), values(alone))
    return found


def test_s09_a_write_on_some_ranks_ends_with_what_rank_0_has() -> None:
    found = ranks.run(some, 2, 2)
    assert found[0] == found[1]
    for name, (has, expected) in found[0].items():
        assert has == expected, name


def sent(rank: int, world: int) -> dict[str, list[tuple[int, int]]]:
    """Reductions and broadcasts of each step, from the first one on."""
    found = {}
    for name, make in (("plain", mlp), ("statistics", Statistics), ("codebook", Codebook)):
        for count in (0, 1, 2):
            state = polyamp.init(ENGINES["ddp"](make(), world), recipe_of("bfloat16", 0.1, count or 1))
            step: Any = polyamp.train_step(loss_fn, state.recipe) if count else by_halves
            each = [collectives(functools.partial(step, state, rows(rank, number))) for number in range(4)]
            found[f"{name} {count}"] = [(one["gloo:all_reduce"], one["gloo:broadcast"]) for one in each]
    return found


def test_s09_a_model_that_writes_to_no_parameter_sends_nothing_for_it() -> None:
    """One that does sends one message more with each step, and in the first step says what."""
    found = ranks.run(sent, 2, 2)
    assert found[0] == found[1]
    for count in (0, 1, 2):
        plain = found[0][f"plain {count}"]
        reductions, broadcasts = zip(*plain, strict=True)
        assert reductions == ((4, 3, 3, 3), (3, 2, 2, 2), (3, 2, 2, 2))[count]  # the first: a unit of weights (S8)
        assert (broadcasts[0], *broadcasts[2:]) == (0, 0, 0)  # the second: torch's, of how it divides gradients
        for name in ("statistics", "codebook"):
            more = [(a - c, b - d) for (a, b), (c, d) in zip(found[0][f"{name} {count}"], plain, strict=True)]
            assert more == [(1, 1), (0, 1), (0, 1), (0, 1)], name


def backward(rank: int, world: int) -> tuple[str, bool]:
    """What a write of the backward pass ends in, and that it is taken back."""
    model = Chosen()

    def write(_: torch.Tensor) -> None:
        with torch.no_grad():
            model.other.add_(1.0 + rank)

    w: Any = model.w
    w.register_hook(write)
    state = polyamp.init(ENGINES["ddp"](model, world), recipe_of("float32", 0.1, 1))
    before = values(model)
    try:
        polyamp.train_step(chosen_loss, state.recipe)(state, {**rows(rank, 0), "write": ""})
    except UnsupportedError as error:
        return str(error), values(model) == before
    return "", False


def test_s09_a_write_in_the_backward_pass_is_refused() -> None:
    for number, (message, as_before) in enumerate(ranks.run(backward, 2, 2)):
        assert f"rank {number} wrote to the parameter 'other' in the backward pass" in message
        assert as_before


def unread(rank: int, world: int) -> tuple[Any, str]:
    """As on an accelerator, where a step does not wait for what the others say: the weights after first writes on all
    ranks, in the first step and later, and what one on rank 1 alone ends in."""
    parameter_write_broadcast.can_read_without_sync = lambda device: False  # type: ignore[attr-defined]
    model = Chosen()
    state = polyamp.init(ENGINES["ddp"](model, world), recipe_of("float32", 0.0, 1))
    step: Any = polyamp.train_step(chosen_loss, state.recipe)
    for number, write in enumerate(("w", "", "w", "other", "other")):
        state, _ = step(state, {**rows(rank, number), "write": write})
    reached = values(model)
    try:
        step(state, {**rows(rank, 5), "write": "layer.bias" if rank else ""})
    except UnsupportedError as error:
        return reached, str(error)
    return reached, ""


def test_s09_where_the_host_waits_for_nothing_a_first_write_on_some_ranks_is_refused() -> None:
    (one, silent), (other, message) = ranks.run(unread, 2, 2)
    assert one == other
    assert one["w"] != [1.0] * 3 != one["other"]
    assert silent == ""
    assert "wrote to the parameter 'layer/bias' for the first time on 1 of 2 ranks" in message


def ignored(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Frozen statistics under `fully_shard`, and rank 0's by itself."""
    model, alone = Statistics(), Statistics()
    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params={model.mean, model.var})
    state = polyamp.init(wrapped, recipe_of("float32", 0.0, 1))
    step: Any = polyamp.train_step(loss_fn, state.recipe)
    for number in range(3):
        state, _ = step(state, rows(rank, number))
        alone(rows(0, number)["x"])
    return model.mean.tolist(), alone.mean.tolist()


def test_s09_parameters_that_fully_shard_leaves_alone_are_rank_0s_too() -> None:
    one, other = ranks.run(ignored, 2, 2)
    assert one == other
    assert one[0] == one[1]
