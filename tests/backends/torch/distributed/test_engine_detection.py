"""What is refused on several ranks, tensor-parallel plans, native optimizers and changed models (S9, S20, S28)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel

import polyamp
from tests import ranks
from tests.backends.torch.distributed.training import (
    ENGINES,
    batches,
    ddp,
    digest,
    distance,
    mean_loss,
    mlp,
    part,
    sharded,
    trained,
    whole,
)

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2), clip_norm=0.5)


class Beside(nn.Module):
    """One module with an engine and one beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        out: torch.Tensor = self.head(self.inner(x))
        return out


def said(function: Callable[[], Any]) -> str:
    """The name and words of a polyamp error."""
    try:
        function()
    except polyamp.errors.PolyampError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def thawed(world: int) -> nn.Module:
    """A parameter is trained that the engine was made without."""
    model = mlp()
    model[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]  # a Sequential
    wrapped = ddp()(model, world)
    model[0].bias.requires_grad_(True)  # type: ignore[index, union-attr]  # a Sequential
    return wrapped


def natively(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[int], Any]:
    """`init` with one of torch's own optimizers over sharded parameters."""

    def made(world: int) -> Any:
        model = sharded(mlp(), world)
        return polyamp.init(model, RECIPE.replace(optimizer=kind(model.parameters(), **options)))

    return made


def refused(rank: int, world: int) -> dict[str, str]:
    """What each is refused with."""
    batch = part(batches(1)[0], rank, world)

    def stepped(model: nn.Module, loss_fn: Any = mean_loss, **options: Any) -> None:
        polyamp.train_step(loss_fn, RECIPE, **options)(polyamp.init(model, RECIPE), batch)

    def apart() -> nn.Module:  # no step comes after one that raised in its group of ranks (S32)
        return ddp(process_group=dist.new_group())(mlp(), world)

    def joined() -> None:
        model = apart()
        state = polyamp.init(model, RECIPE)
        with model.join():  # type: ignore[operator]  # a method
            polyamp.train_step(mean_loss, RECIPE)(state, batch)

    def around(model: Any, item: Any) -> torch.Tensor:
        return mean_loss(model.module, item)

    def frozen_beside() -> None:
        model = Beside(ddp()(mlp(), world))
        model.head.requires_grad_(False)
        stepped(model)
        model = Beside(sharded(mlp(), world))
        model.head.requires_grad_(False)
        stepped(model)

    cases: dict[str, Callable[[], Any]] = {
        "fsdp1": lambda: polyamp.init(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")), RECIPE),
        "beside ddp": lambda: polyamp.init(Beside(ddp()(mlp(), world)), RECIPE),
        "beside fsdp2": lambda: polyamp.init(Beside(sharded(mlp(), world)), RECIPE),
        "thawed": lambda: polyamp.init(thawed(world), RECIPE),
        "fused sgd": lambda: natively(torch.optim.SGD, lr=0.1, fused=True)(world),
        "adafactor": lambda: natively(torch.optim.Adafactor)(world),
        "around": lambda: stepped(apart(), around),
        "compiled": lambda: stepped(apart(), compile=True),
        "frozen beside": frozen_beside,
        "data parallel": lambda: stepped(DataParallel(mlp())),
    }
    found = {name: said(case) for name, case in cases.items()}
    return found | {"joined": said(joined)}


def test_s20_what_an_engine_cannot_do_is_refused_with_what_to_use() -> None:
    found = ranks.run(refused, 2, 2)
    assert found[0] == found[1]
    expected = {
        "fsdp1": "UnsupportedError: model: FullyShardedDataParallel keeps parameters in flat pieces",
        "beside ddp": "ModelError: parameter 'head/weight' is in no DistributedDataParallel",
        "beside fsdp2": "ModelError: parameter 'head/weight' is in no module that fully_shard was called on",
        "thawed": "ModelError: model: DistributedDataParallel was made when 5 of its parameters were trained. "
        "Received: 6. Freeze, thaw and replace first",
        "fused sgd": "UnsupportedError: torch.optim.SGD(fused=True) cannot update sharded parameters",
        "adafactor": "UnsupportedError: torch.optim.Adafactor cannot update sharded parameters",
        "around": "LossError: loss_fn computed with the parameter '0/weight' and did not call the Distributed",
        "compiled": "UnsupportedError: train_step(compile=True) compiles the step of one process. Received: a model "
        "held by DistributedDataParallel. Use compile=False",
        "frozen beside": "",
        "data parallel": "",
        "joined": "UnsupportedError: DistributedDataParallel.join(): ranks that are through would wait",
    }
    assert found[0].keys() == expected.keys()
    for name, words in expected.items():
        assert found[0][name].startswith(words), name
        assert bool(words) == bool(found[0][name]), name


NATIVE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, 1e-2),
}


def native(rank: int, world: int) -> dict[str, tuple[float, str]]:
    """torch's own optimizers: distance from one process."""
    found = {}
    steps = batches(6)
    for name, make in NATIVE.items():
        alone = mlp()
        state, _ = trained(alone, RECIPE.replace(optimizer=make(alone.parameters())), steps)
        for engine in ("ddp", "fsdp2"):
            model = ENGINES[engine](mlp(), world)
            recipe = RECIPE.replace(optimizer=make(model.parameters()))
            other, _ = trained(model, recipe, [part(batch, rank, world) for batch in steps])
            apart = distance([whole(p) for p in other.parameters.values()], list(state.parameters.values()))
            found[f"{engine} {name}"] = (apart, digest(other))
    return found


def test_s09_torchs_own_optimizers_train_on_ranks() -> None:
    found = ranks.run(native, 2, 2)
    assert found[0] == found[1]
    assert {name: values for name, values in found[0].items() if not values[0] < 1e-6} == {}


def few_rows(rank: int, world: int) -> tuple[float, float, list[int], str]:
    """Layers of one row each, which only the first rank holds: distances of parameters and results from one process."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 1), nn.Tanh(), nn.Linear(1, 1))

    steps = batches(4)
    alone, expected = trained(model(), RECIPE, steps)
    state, results = trained(sharded(model(), world), RECIPE, [part(batch, rank, world) for batch in steps])
    apart = distance([whole(p) for p in state.parameters.values()], list(alone.parameters.values()))
    losses = distance([result.loss for result in results], [result.loss for result in expected])
    norms = distance([result.grad_norm for result in results], [result.grad_norm for result in expected])
    held = [p.to_local().numel() for p in state.parameters.values()]
    return apart, max(losses, norms), held, digest(state)


def test_s09_a_rank_that_holds_no_row_of_any_parameter_takes_part() -> None:
    found = ranks.run(few_rows, 2, 2)
    assert [held for _, _, held, _ in found] == [[6, 1, 1, 1], [0, 0, 0, 0]]
    assert found[0][3] == found[1][3]
    assert all(max(each[:2]) < 1e-6 for each in found), found


class OneOfMany(nn.Module):
    """A buffer of one element, which is a part of a larger array and keeps its stride of 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 3)
        self.register_buffer("offset", torch.ones(3, 2)[:1, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 3)."""
        out: torch.Tensor = self.layer(x) + self.offset
        return out


def one_of_many(rank: int, world: int) -> list[str]:
    """What `init` says of the same values on all ranks, and of others on the last."""
    model = OneOfMany()
    held = DistributedDataParallel(model)
    assert model.offset.stride() == (2,)
    found = [said(lambda: polyamp.init(held, RECIPE))]
    model.offset += rank
    return [*found, said(lambda: polyamp.init(held, RECIPE))]


def test_s32_an_element_of_a_larger_array_is_compared_too() -> None:
    for alike, other in ranks.run(one_of_many, 2, 2):
        assert alike == ""
        assert other.startswith("ReplicaError: rank 1 brings other values than rank 0: 'offset: values with the check")


def replaced(rank: int, world: int) -> dict[str, tuple[bool, str]]:
    """`refresh` after the head was replaced: what stayed keeps its slots, and training goes on."""
    found = {}
    for name in ("ddp", "fsdp2"):
        model = mlp()
        if name == "fsdp2":
            fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))  # type: ignore[index]  # a Sequential
            fully_shard(model[2], mesh=init_device_mesh("cpu", (world,)))  # type: ignore[index]  # a Sequential
            fully_shard(model[4], mesh=init_device_mesh("cpu", (world,)))  # type: ignore[index]  # a Sequential
            held: nn.Module = model
        else:
            held = DistributedDataParallel(model)
        steps = [part(batch, rank, world) for batch in batches(4)]
        state, _ = trained(held, RECIPE, steps[:2])
        torch.manual_seed(9)
        head = nn.Linear(7, 3)
        if name == "fsdp2":
            fully_shard(head, mesh=init_device_mesh("cpu", (world,)))
        model[4] = head  # type: ignore[index, operator]  # a Sequential
        slot = whole(state.optimizer.state[state.parameters["0/weight"]]["exp_avg"])
        if name == "ddp":
            assert said(lambda state=state: polyamp.refresh(state)).startswith("ModelError: model: Distributed")  # type: ignore[misc]
            held = DistributedDataParallel(model)
        state = polyamp.refresh(state, held)
        kept = torch.equal(slot, whole(state.optimizer.state[state.parameters["0/weight"]]["exp_avg"]))
        step = polyamp.train_step(mean_loss, RECIPE)
        for batch in steps[2:]:
            state, result = step(state, batch)
        found[name] = (kept and int(result.step) == 4, digest(state))
    return found


def test_s28_a_changed_model_goes_on_with_refresh_on_every_rank() -> None:
    found = ranks.run(replaced, 2, 2)
    assert found[0] == found[1]
    assert {name: kept for name, (kept, _) in found[0].items()} == {"ddp": True, "fsdp2": True}


class Block(nn.Module):
    """A norm, two layers to divide and one that is whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.norm, self.up, self.down, self.out = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 3)."""
        out: torch.Tensor = self.out(self.down(torch.tanh(self.up(self.norm(x)))))
        return out


def divided(model: nn.Module, mesh: Any, *, norm: bool) -> nn.Module:
    """Tensor-parallel: one layer by columns, one by rows, and the norm over rows of the batch."""
    rows, whole_rows = Shard(0), Replicate()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if norm:
        parallelize_module(model, mesh, PrepareModuleInput(input_layouts=whole_rows, desired_input_layouts=rows))
        plan |= {"up": ColwiseParallel(input_layouts=rows), "norm": SequenceParallel(sequence_dim=0)}
    return parallelize_module(model, mesh, plan)


def parallel(rank: int, world: int) -> dict[str, tuple[float, float, str]]:
    """Distances of parameters and losses from one process: alone, with a norm over parts, and under `fully_shard`."""
    found = {}
    steps = batches(8)
    for name, optimizer in (("adamw", polyamp.adamw(1e-2)), ("sgd", polyamp.sgd(0.1)), ("lion", polyamp.lion(1e-3))):
        recipe = RECIPE.replace(optimizer=optimizer)
        alone, expected = trained(Block(), recipe, steps)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        line = init_device_mesh("cpu", (world,))
        for case in ("tensor", "norm", "both"):
            if case == "both":
                model = divided(Block(), mesh["tensor"], norm=False)
                fully_shard(model, mesh=mesh["data"])
                own = [part(batch, rank // 2, 2) for batch in steps]
            else:
                model, own = divided(Block(), line, norm=case == "norm"), steps
            state, results = trained(model, recipe, own)
            apart = distance([whole(p) for p in state.parameters.values()], list(alone.parameters.values()))
            losses = distance([result.loss for result in results], [result.loss for result in expected])
            norms = distance([result.grad_norm for result in results], [result.grad_norm for result in expected])
            found[f"{case} {name} {state.replicas.engine.name}"] = (apart, max(losses, norms), digest(state))
    return found


def test_s09_tensor_parallel_plans_train_as_one_process() -> None:
    found = ranks.run(parallel, 4, 4)
    assert all(each == found[0] for each in found)
    assert len(found[0]) == 9
    assert {name: values for name, values in found[0].items() if not max(values[:2]) < 1e-6} == {}
