"""Windows, running statistics, unused parameters and the two halves on several ranks (S8, S9, S12, S23)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from tests import ranks
from tests.backends.torch.distributed.training import (
    ENGINES,
    batches,
    collectives,
    ddp,
    digest,
    distance,
    mean_loss,
    mlp,
    normalized,
    part,
    sharded,
    trained,
    whole,
)

FLOAT32 = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1, momentum=0.9), accumulate_steps=4)


def uneven(rank: int, world: int) -> dict[str, tuple[float, str, int]]:
    """Windows of other lengths on each rank, against one batch of all their rows (S9)."""
    found = {}
    rows = (7, 2)[rank]
    for name in ("ddp", "ddp static", "fsdp2"):
        steps = [tuple(leaf[:rows] for leaf in batch) for batch in batches(3)]
        lists = [[tuple(leaf[row : row + 1] for leaf in batch) for row in range(min(rows, 4))] for batch in batches(2)]
        state, results = trained(ENGINES[name](mlp(), world), FLOAT32, [*steps, *lists])
        alone = mlp()
        optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
        losses = []
        for number, batch in enumerate(batches(3) + batches(2)):
            lengths = ((7, 2), (4, 2))[number >= 3]
            each = [n * mean_loss(alone, tuple(leaf[:n] for leaf in batch)) for n in lengths]
            loss = torch.stack(each).sum() / sum(lengths)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        apart = distance([whole(p) for p in state.parameters.values()], list(alone.parameters()))
        apart = max(apart, distance([result.loss for result in results], losses))
        found[name] = (apart, digest(state), int(results[-1].step))
    return found


def test_s08_windows_that_differ_between_ranks_are_divided_by_one_number() -> None:
    found = ranks.run(uneven, 2, 2)
    assert found[0] == found[1]
    assert {name: values for name, values in found[0].items() if not values[0] < 1e-6} == {}


def narrow(rank: int, world: int) -> dict[str, tuple[float, str]]:
    """bfloat16 parameters, 300 micro-batches whose gradients are 1 each: a sum in bfloat16 ends at 256."""
    found = {}
    recipe = polyamp.Recipe(policy="bfloat16", optimizer=polyamp.sgd(1.0), accumulate_steps=300)
    for name in ("ddp", "fsdp2"):
        model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16))
        nn.init.zeros_(model[0].weight)
        state = polyamp.init(ENGINES[name](model, world), recipe)
        _, result = polyamp.train_step(lambda model, batch: model(batch).sum(), recipe)(state, torch.ones(300, 1))
        found[name] = (float(whole(state.parameters["0/weight"])), digest(state, result.grad_norm))
    return found


def test_s08_gradients_of_16_bit_parameters_are_summed_in_float32_on_ranks_too() -> None:
    found = ranks.run(narrow, 2, 2)
    assert found[0] == found[1]
    assert {name: moved for name, (moved, _) in found[0].items()} == {"ddp": -1.0, "fsdp2": -1.0}


class Seen(nn.Module):
    """Keeps a mean over its inputs, in a module that `fully_shard` holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("still", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The inner model's output."""
        with torch.no_grad():
            self.get_buffer("mean").mul_(0.5).add_(x.float().mean(0))
        out: torch.Tensor = self.inner(x)
        return out


class Uncounted(nn.BatchNorm1d):
    """Statistics whose kernel leaves no trace, without the count that torch's own layer moves beside them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The batch normalised."""
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def uncounted() -> nn.Module:
    """`normalized` with `Uncounted`."""
    model = normalized()
    model[1] = Uncounted(5)  # type: ignore[index,operator]  # a Sequential
    return model


def seen_in_parts(model: Any, world: int) -> nn.Module:
    """`fully_shard` around a `Seen`."""
    sharded(model.inner, world)
    torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (world,)))
    wrapped: nn.Module = model
    return wrapped


def statistics(rank: int, world: int) -> dict[str, Any]:
    """Running statistics after every step: the same on all ranks, rank 0's, and as before where a step was skipped."""
    found: dict[str, Any] = {}
    recipe = polyamp.Recipe(
        policy="mixed_float16", optimizer=polyamp.sgd(0.01), scaler=polyamp.LossScaler(init_scale=2.0**8)
    )
    cases = {"ddp": (ddp(), normalized), "ddp seen": (ddp(), Seen), "fsdp2 seen": (seen_in_parts, Seen)}
    cases |= {"fsdp2": (sharded, normalized), "fsdp2 uncounted": (sharded, uncounted)}
    for name, (wrap, make) in cases.items():
        state = polyamp.init(wrap(make(), world), recipe)
        step = polyamp.train_step(mean_loss, recipe)
        alone = make()
        said = []
        for number, batch in enumerate(batches(4)):
            own = part(batch, rank, world)
            if number == 2 and rank == 1:
                own[2][0] = float("inf")
            state, result = step(state, own)
            if not result.skipped:
                alone(part(batch, 0, world)[0])
            buffers = [b.clone() for b in state.model.buffers()]
            said.append((digest(state), bool(result.skipped)))
        firsts = [b.double() for b in alone.buffers()]
        near = distance([b.double() for b in buffers], firsts) < (2e-3 if make is Seen else 0.2)
        found[name] = (said, near)
        if name == "fsdp2 seen":
            found["sent"] = collectives(lambda step=step, state=state, own=own: step(state, own))["gloo:broadcast"]
    return found


def test_s09_running_statistics_are_those_of_rank_0_after_every_step() -> None:
    found = ranks.run(statistics, 2, 2)
    assert found[0] == found[1]
    assert found[0].pop("sent") == 1
    for name, (said, near) in found[0].items():
        assert [skipped for _, skipped in said] == [False, False, True, False], name
        assert near, name


class Chosen(nn.Module):
    """Three layers, of which the inputs' last number chooses: the third where it is positive, the second never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer's output, or the sum of two."""
        out: torch.Tensor = self.first(x) + (self.third(x) if x[0, -1] > 0 else 0.0)
        return out


def unused(rank: int, world: int) -> tuple[list[str], str, str]:
    """What moved; which error a model without `find_unused_parameters` ends in, and that nothing moved then."""
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1, weight_decay=0.5))
    state = polyamp.init(ddp(find_unused_parameters=True)(Chosen(), world), recipe)
    step = polyamp.train_step(mean_loss, recipe)
    x, y, gain = batches(1)[0]
    x = x.clone()
    x[:, -1] = 1.0 if rank else -1.0
    before = {name: p.detach().clone() for name, p in state.parameters.items()}
    for _ in range(2):
        state, _ = step(state, (x, y, gain))
    moved = [name for name, p in state.parameters.items() if not torch.equal(p, before[name])]
    slots = {name: float(state.optimizer.state[p]["step"]) for name, p in state.parameters.items()}
    assert slots == {name: 2.0 if name in moved else 0.0 for name in slots}
    bare = polyamp.init(ddp()(Chosen(), world), recipe)
    before = digest(bare)
    x[:, -1] = -1.0
    with pytest.raises(polyamp.errors.LossError) as caught:
        step(bare, (x, y, gain))
    assert digest(bare) == before
    return moved, digest(state), str(caught.value)


def test_s23_a_parameter_that_no_rank_uses_stays_and_one_that_some_rank_uses_does_not() -> None:
    found = ranks.run(unused, 2, 2)
    assert found[0] == found[1]
    moved, _, said = found[0]
    assert moved == ["first/weight", "first/bias", "third/weight", "third/bias"]
    assert "'second/weight', 'second/bias', 'third/weight'" in said
    assert "DistributedDataParallel(model, find_unused_parameters=True)" in said


def halves(rank: int, world: int) -> dict[str, tuple[float, bool, str]]:
    """`value_and_grad` and `apply_gradients` against `train_step`, an overflow on rank 1 among the steps."""
    found = {}
    recipe = polyamp.Recipe(
        policy="mixed_float16",
        optimizer=polyamp.adamw(1e-2),
        scaler=polyamp.LossScaler(init_scale=2.0**8),
        clip_norm=0.5,
    )
    for name, make in (("ddp", normalized), ("ddp views", normalized), ("fsdp2", mlp), ("fsdp2", Seen)):
        wrap = seen_in_parts if make is Seen else ENGINES[name]
        one, two = (polyamp.init(wrap(make(), world), recipe) for _ in range(2))
        step, run = polyamp.train_step(mean_loss, recipe), polyamp.value_and_grad(mean_loss)
        same = True
        for number, batch in enumerate(batches(4)):
            own = part(batch, rank, world)
            if number == 1 and rank == 1:
                own[2][0] = float("inf")
            one, expected = step(one, own)
            before = digest(two)
            value, gradients = run(two, own)
            assert digest(two) == before
            kept = {path: whole(grad) for path, grad in gradients.values.items()}
            run(two, own)
            again = {path: whole(grad) for path, grad in gradients.values.items()}
            assert number == 1 or all(torch.equal(kept[path], again[path]) for path in kept)
            assert torch.isfinite(value) == (number != 1 or rank != 1)
            two, result = polyamp.apply_gradients(two, gradients)
            same = same and bool(result.skipped) == bool(expected.skipped) == (number == 1)
        apart = distance([whole(p) for p in two.parameters.values()], [whole(p) for p in one.parameters.values()])
        found[f"{name} {make.__name__}"] = (apart, same, digest(two))
    return found


def test_s09_the_two_halves_decide_together_and_equal_the_step() -> None:
    found = ranks.run(halves, 2, 2)
    assert found[0] == found[1]
    assert {name: values for name, values in found[0].items() if not (values[0] < 1e-6 and values[1])} == {}
