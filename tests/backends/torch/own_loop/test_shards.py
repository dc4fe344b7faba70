"""`polyamp_torch.GradScaler` on sharded parameters, where `ShardedGradScaler` stands in people's loops (S9, S12, S14).

Each trap is shown on torch's scaler too: what it does there is asserted beside what happens here.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from polyamp_torch import GradScaler
from tests import ranks

INF = float("inf")
ADAMW, SGD = torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(SGD, foreach=True),
    "sgd, one by one": functools.partial(SGD, foreach=False),
    "adam": functools.partial(torch.optim.Adam, foreach=True),
    "adamw": functools.partial(ADAMW, foreach=True),
    "adamw, one by one": functools.partial(ADAMW, foreach=False),
    "adamw, fused": functools.partial(ADAMW, fused=True),
}


def made() -> nn.Module:
    """The first layer has one row: of two ranks, the second holds nothing of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4), nn.Linear(4, 2))


def pair() -> nn.Module:
    """What tensor parallelism divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp(net: nn.Module) -> nn.Module:
    fully_shard(net[2])  # type: ignore[index]  # a Sequential
    return fully_shard(net)  # type: ignore[return-value]  # torch has a mixin here


def hsdp(net: nn.Module) -> nn.Module:
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return net


def two_axes(net: nn.Module) -> nn.Module:
    """Sharded over one axis of a mesh, and over the other one by tensor parallelism, but for the first layer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan: Any = {"1": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh["tensor"], plan)
    return fully_shard(net, mesh=mesh["data"])  # type: ignore[return-value]  # torch has a mixin here


def tensor_parallel(net: nn.Module) -> nn.Module:
    """The last two layers over the ranks; those before, if there are any, stay plain tensors."""
    last = len(net) - 1  # type: ignore[arg-type]  # a Sequential
    plan: Any = {str(last - 1): ColwiseParallel(), str(last): RowwiseParallel()}
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def whole(x: Any) -> torch.Tensor:
    full: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return full.detach().clone()


class Loop:
    """Four iterations of a loop by hand on one batch, of which the third overflows in one output's rows alone.

    Attributes:
        skipped: of each, whether no parameter of this rank moved.
        scales: behind each.
        collectives: that `unscale_`, `step` and `update` sent in each.
        weights: at the end, whole.
    """

    def __init__(self, net: nn.Module, optimizer: Any, scaler: Any, *, clip: bool) -> None:
        opt = optimizer(net.parameters(), lr=1e-2)
        self.skipped, self.scales, self.collectives = [], [], []
        for gain in (1.0, 2.0, INF, 1.0):
            opt.zero_grad()
            out = net(torch.arange(8.0).reshape(2, 4))
            scaler.scale((out * torch.tensor([1.0, gain])).sum()).backward()
            sent = CommDebugMode()
            if clip:
                with sent:
                    scaler.unscale_(opt)
                count = sent.get_total_counts()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            before = [here(p) for p in net.parameters()]
            with sent:
                scaler.step(opt)
                scaler.update()
            self.collectives.append(sent.get_total_counts() + (count if clip else 0))
            self.skipped.append(all(torch.equal(a, here(b)) for a, b in zip(before, net.parameters(), strict=True)))
            self.scales.append(scaler.get_scale())
        self.weights = [whole(p) for p in net.parameters()]


def here(x: Any) -> torch.Tensor:
    part: torch.Tensor = x.to_local() if isinstance(x, DTensor) else x
    return part.detach().clone()


def ours(**kwargs: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=1024.0, **kwargs)


def like_one_process(
    wrap: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module] = made
) -> list[tuple[str, Any]]:
    """Of every optimizer, with and without clipping: decisions, scales, collectives, and how far from torch's scaler in
    one process the weights are."""
    found = []
    for name, optimizer in OPTIMIZERS.items():
        for clip in (False, True):
            alone = Loop(make(), optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0), clip=clip)
            loop = Loop(wrap(make()), optimizer, ours(), clip=clip)
            assert loop.skipped == alone.skipped == [False, False, True, False], name
            assert loop.scales == alone.scales, name
            pairs = zip(loop.weights, alone.weights, strict=True)
            apart = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
            found.append((name, (apart < 1e-6, loop.collectives)))
    return found


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:  # noqa: BLE001  # whatever torch raises is what is shown
        return f"{type(error).__name__}: {error}"


def behind_a_replicated_bias(scaler: Any, rank: int) -> tuple[bool, float]:
    """Two tensors of a layer under tensor parallelism, the replicated one first; the second rank's shard overflows."""
    mesh = init_device_mesh("cpu", (2,))
    bias = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([bias, weight], 0.1)
    scaler.scale(torch.ones(()))
    bias.grad = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    weight.grad = DTensor.from_local(torch.full((2, 2), INF if rank == 1 else 1.0), mesh, [Shard(0)])
    scaler.step(optimizer)
    scaler.update()
    return bool((here(bias) == 0.0).all()), scaler.get_scale()


def grows(scaler: Any) -> float:
    """The scale after 130 finite steps with a growth interval of 1."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    for _ in range(130):
        scaler.scale(torch.ones(()))
        weight.grad = torch.zeros(1)
        scaler.step(optimizer)
        scaler.update()
    found: float = scaler.get_scale()
    return found


def shrinks(scaler: Any) -> float:
    """The scale after an overflow."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    scaler.scale(torch.ones(()))
    weight.grad = torch.full((1,), INF)
    scaler.step(optimizer)
    scaler.update()
    found: float = scaler.get_scale()
    return found


def sequence_parallel() -> nn.Module:
    """The norm's gradients are sums over the ranks that are still to be formed, and the last layer is plain."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2))
    plan: Any = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def mixed(scaler: Any) -> Any:
    """Sharded and plain parameters in one optimizer."""
    one_by_one = OPTIMIZERS["sgd, one by one"]
    return outcome(lambda: Loop(tensor_parallel(made()), one_by_one, scaler, clip=False).skipped)


def partial(scaler: Any) -> Any:
    """Gradients of which each rank holds a summand."""
    one_by_one = OPTIMIZERS["sgd, one by one"]
    return outcome(lambda: Loop(sequence_parallel(), one_by_one, scaler, clip=False).skipped)


def some_without_gradients(scaler: Any, rank: int, overflow: float, *, fused: bool, unscales: bool) -> Any:
    """Only the first rank has a gradient: torch's FSDP1 leaves a rank without a shard without one."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], 0.1, fused=fused)
    scaler.scale(torch.ones(()))
    weight.grad = torch.full((1,), overflow) if rank == 0 else None
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.step_was_skipped, scaler.get_scale()


def two_optimizers(skip: Any, *, first_is_unscaled: bool) -> list[tuple[bool, bool]]:
    """Whether each of two sharded layers moved; in iterations one and three the second's gradients overflow."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for layer in (first, second):
        fully_shard(layer)
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (first, second)]
    scaler, found = ours(skip=skip), []
    for gain in (INF, 1.0, INF):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = torch.ones(1, 2)
        scaler.scale(first(x).sum() + (second(x) * torch.tensor([1.0, gain])).sum()).backward()
        before = [here(p) for layer in (first, second) for p in layer.parameters()]
        if first_is_unscaled:
            scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        after = [here(p) for layer in (first, second) for p in layer.parameters()]
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        found.append((not all(same[:2]), not all(same[2:])))
    return found


def windows(rank: int) -> list[tuple[bool, float]]:
    """Two backward passes a step, of which the last one reduces; the second rank overflows in either, or in none."""
    net = fsdp(made())
    optimizer, scaler, found = ADAMW(net.parameters(), 1e-2, fused=True), ours(), []
    for gains in ((1.0, 1.0), (INF, 1.0), (1.0, INF), (1.0, 1.0)):
        optimizer.zero_grad()
        for number, gain in enumerate(gains):
            net.set_requires_gradient_sync(number == 1)  # type: ignore[operator]  # an FSDPModule
            factor = torch.tensor([1.0, gain if rank == 1 else 1.0])
            scaler.scale((net(torch.ones(2, 4)) * factor).sum() / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.step_was_skipped, scaler.get_scale()))
    return found


def backward_after_unscale() -> str:
    """The gradients of the root's parameters come when the backward pass has ended."""
    net = fully_shard(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = ours()
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    return str(outcome(lambda: scaler.step(optimizer)))


def flat(*, group: bool, original: bool) -> Any:
    net = FullyShardedDataParallel(nn.Linear(4, 2), use_orig_params=original, device_id=torch.device("cpu"))
    scaler = ours(process_group=dist.group.WORLD if group else None)
    loop = outcome(lambda: Loop(net, functools.partial(ADAMW, foreach=True), scaler, clip=False))
    return loop if isinstance(loop, str) else (loop.skipped, loop.scales, loop.collectives)


def sharded_sgd() -> str:
    net = fully_shard(nn.Linear(4, 2))
    return str(outcome(lambda: Loop(net, functools.partial(SGD, fused=True), ours(), clip=False)))


def of_a_group() -> list[str]:
    scaler = ours(process_group=dist.group.WORLD)
    return [str(outcome(lambda: copy.deepcopy(scaler))), str(outcome(lambda: ours(process_group=0)))]


def two(rank: int) -> dict[str, Any]:
    torch_one, torch_sharded = (
        functools.partial(kind, "cpu", 1024.0) for kind in (torch.amp.GradScaler, ShardedGradScaler)
    )
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: of FSDP1, of outputs that are views
        found["ddp"] = like_one_process(ddp)
        found["fsdp"] = like_one_process(fsdp)
        found["tensor parallel"] = like_one_process(tensor_parallel, pair)
        found["replicated first"] = [behind_a_replicated_bias(make(), rank) for make in (torch_one, ours)]
        fused = OPTIMIZERS["adamw, fused"]
        found["fused, clipped"] = outcome(lambda: Loop(fsdp(made()), fused, torch_sharded(), clip=True))
        found["mixed"] = [mixed(torch_one()), mixed(ours())]
        found["partial"] = [partial(torch_one()), partial(ours())]
        found["without"] = [
            some_without_gradients(ours(process_group=dist.group.WORLD), rank, value, fused=fused, unscales=unscales)
            for value in (1.0, INF)
            for fused in (False, True)
            for unscales in (False, True)
        ]
        found["none at all"] = outcome(lambda: some_without_gradients(
            ours(process_group=dist.group.WORLD), 1, 1.0, fused=False, unscales=False))  # fmt: skip
        found["torch, without"] = outcome(
            lambda: some_without_gradients(torch_one(), rank, 1.0, fused=False, unscales=True)
        )
        found["two"] = {
            (skip, unscaled): two_optimizers(skip, first_is_unscaled=unscaled)
            for skip in ("all", "each")
            for unscaled in (False, True)
        }
        found["windows"] = windows(rank)
        found["backward"] = backward_after_unscale()
        found["fsdp1"] = [flat(group=group, original=original) for group in (False, True) for original in (False, True)]
        found["sgd, fused"] = sharded_sgd()
        found["group"] = of_a_group()
    return found


def four(rank: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {"hsdp": like_one_process(hsdp)}
        both = Loop(two_axes(made()), OPTIMIZERS["sgd, one by one"], ours(), clip=False)
        found["two axes"] = both.skipped, both.collectives
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "shard"))["shard"]
        net = fully_shard(nn.Linear(4, 2), mesh=mesh)
        optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), ours()
        gain = INF if rank >= 2 else 1.0
        scaler.scale((net(torch.ones(1, 4)) * torch.tensor([1.0, gain])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found["pairs"] = scaler.get_scale()
    return found


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks.run(two, 2)
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "tensor parallel"])
def test_s09_s12_the_loop_is_that_of_one_process(of_two: list[dict[str, Any]], engine: str) -> None:
    first, second = of_two
    assert first[engine] == second[engine]
    sent = 0 if engine == "ddp" else 1  # gradients that are reduced already are the same everywhere
    assert first[engine] == [(name, (True, [sent] * 4)) for name in OPTIMIZERS for _ in range(2)]


def test_s09_several_axes_and_groups_beside_each_other() -> None:
    found = ranks.run(four, 4)
    for each in found:
        assert each["hsdp"] == [(name, (True, [1] * 4)) for name in OPTIMIZERS for _ in range(2)]
        assert each["two axes"] == ([False, False, True, False], [1] * 4)
    assert [each["pairs"] for each in found] == [1024.0, 1024.0, 512.0, 512.0]


def test_s09_an_overflow_behind_a_replicated_tensor_is_everybodys(of_two: list[dict[str, Any]]) -> None:
    of_torch = [found["replicated first"][0] for found in of_two]
    assert of_torch == [(False, 1024.0), (True, 512.0)]  # replicas that part
    assert [found["replicated first"][1] for found in of_two] == [(True, 512.0)] * 2


def test_what_torch_raises_on_sharded_parameters_works_here(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert "doesn't match the broadcast shape" in found["fused, clipped"]
        for name in ("mixed", "partial"):
            assert "got mixed torch.Tensor and DTensor" in found[name][0]
            assert found[name][1] == [False, False, True, False]


def test_s09_a_rank_without_gradients_decides_with_the_others(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert found["without"] == [(False, 1024.0)] * 4 + [(True, 512.0)] * 4
        assert found["none at all"].startswith("GradientError: step() found no gradients")
    assert of_two[1]["torch, without"].startswith("AssertionError: No inf checks were recorded")


def test_s08_s09_a_window_overflows_once(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert found["windows"] == [(False, 1024.0), (True, 512.0), (True, 256.0), (False, 256.0)]


def test_s14_optimizers_of_sharded_layers_are_one_decision(of_two: list[dict[str, Any]]) -> None:
    both, none, one = (True, True), (False, False), (True, False)
    for found in of_two:
        for unscaled in (False, True):
            assert found["two"]["all", unscaled] == [none, both, none]
            assert found["two"]["each", unscaled] == [one, both, one]


def test_s20_what_is_refused_and_what_to_write(of_two: list[dict[str, Any]]) -> None:
    for found in of_two:
        assert found["backward"].startswith("GradScalerError: a backward pass ran after unscale_(optimizer)")
        unknown, known = found["fsdp1"][:2], found["fsdp1"][2:]
        assert all("process_group=torch.distributed.group.WORLD" in each for each in unknown)
        assert known == [([False, False, True, False], [1024.0, 1024.0, 512.0, 512.0], [1] * 4)] * 2
        assert "no fused kernel of SGD for sharded parameters" in found["sgd, fused"]
        assert found["sgd, fused"].endswith("Write SGD(..., foreach=True).")
        copied, wrong = found["group"]
        assert copied.startswith("GradScalerError: a GradScaler with a process_group cannot be copied")
        assert wrong.endswith("Received: 0.")


def test_s17_the_scale_of_torchs_sharded_scaler_grows_to_infinity() -> None:
    with ranks_of_one():
        theirs = ShardedGradScaler("cpu", 1024.0, growth_interval=1)
        assert grows(theirs) == INF
    assert grows(GradScaler("cpu", 1024.0, growth_interval=1)) == 2.0**127


def test_torchs_sharded_scaler_swaps_positional_arguments() -> None:
    with ranks_of_one():
        assert shrinks(ShardedGradScaler("cpu", 1024.0, 0.5, 2.0)) == 512.0
        with pytest.raises(AssertionError, match="The growth factor must be"):
            ShardedGradScaler("cpu", 1024.0, 2.0, 0.5)  # torch.amp.GradScaler's order
    assert shrinks(GradScaler("cpu", 1024.0, 2.0, 0.5)) == 512.0
    with pytest.raises(ValueError, match=r"growth_factor.*ShardedGradScaler"):
        GradScaler("cpu", 1024.0, 0.5, 2.0)


class ranks_of_one:  # noqa: N801  # used as a function is
    """A process group of this process alone, which torch's sharded scaler needs."""

    def __enter__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
