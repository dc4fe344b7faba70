"""Products in 8 bits on two ranks (S36): each rank's activations have scales of their own, as a micro-batch's have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import polyamp
from polyamp.monitor.records import PRODUCT_OPERANDS
from tests import ranks
from tests.backends.torch.distributed.training import (
    ENGINES,
    collectives,
    digest,
    distance,
    mean_loss,
    part,
    trained,
    whole,
)

FLOAT8 = polyamp.Policy("mixed_float8", float8=polyamp.Float8(emulate=True))
HALF = polyamp.Policy("mixed_bfloat16")


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def recipe(policy: polyamp.Policy, **settings: object) -> polyamp.Recipe:
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), clip_norm=1.0, **settings)


def products(rank: int, world: int) -> dict[str, tuple[float, float, str, bool]]:
    """Distance from micro-batches in one process and from bfloat16, a checksum, and whether the messages are alike."""
    torch.manual_seed(2)
    steps = [(torch.randn(8, 16), torch.randn(8, 16), torch.ones(8, 1)) for _ in range(4)]
    own = [part(batch, rank, world) for batch in steps]
    parts = [[part(batch, each, world) for each in range(world)] for batch in steps]
    alone, _ = trained(layers(), recipe(FLOAT8, accumulate_steps=world), parts)
    found = {}
    for engine in ("ddp", "fsdp2"):
        states, messages = [], []
        for policy in (FLOAT8, HALF):
            state, _ = trained(ENGINES[engine](layers(), world), recipe(policy), own)
            step = polyamp.train_step(mean_loss, recipe(policy))
            states.append([whole(p) for p in state.parameters.values()])
            messages.append(collectives(lambda state=state, step=step: step(state, own[0])))
            if policy == FLOAT8:
                checksum = digest(state)
        apart = distance(states[0], list(alone.parameters.values()))
        found[engine] = (apart, distance(*states), checksum, messages[0] == messages[1])
    return found


def figures(rank: int, world: int) -> dict[str, tuple[list[Any], list[Any]]]:
    """The figures of products and the parameters after a step under each engine, and those of as many micro-batches in
    one process."""
    torch.manual_seed(2)
    batch = (torch.randn(8, 16), torch.randn(8, 16), torch.ones(8, 1))
    found = {}
    for name in ("alone", "ddp", "fsdp2"):
        monitor = polyamp.Monitor(every=1, gradients=False, updates=False, products=True)
        made = recipe(FLOAT8, accumulate_steps=world if name == "alone" else 1).replace(clip_norm=None)
        state = polyamp.init(layers() if name == "alone" else ENGINES[name](layers(), world), made)
        given = [part(batch, each, world) for each in range(world)] if name == "alone" else part(batch, rank, world)
        polyamp.train_step(mean_loss, made, monitor=monitor)(state, given)
        records = [(each.module, each.products) for each in monitor.records[0].modules]
        found[name] = records, [whole(p).detach().numpy().copy() for p in state.parameters.values()]
    return found


def tensor_parallel(rank: int, world: int) -> tuple[str, bool]:
    """What a step raises for a column and a row parallel layer, and whether the shards of parameters are as before."""
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    made = recipe(FLOAT8)
    state = polyamp.init(parallelize_module(layers(), init_device_mesh("cpu", (world,)), plan), made)
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in state.parameters.values()]
    before = [each.detach().clone() for each in shards]
    error = ""
    try:
        polyamp.train_step(mean_loss, made)(state, (torch.ones(8, 16), torch.ones(8, 16), torch.ones(8, 1)))
    except polyamp.UnsupportedError as refused:
        error = str(refused)
    return error, all(map(torch.equal, before, shards))


def test_s36_tensor_parallel_layers_are_refused_and_nothing_is_updated() -> None:
    for error, same in ranks.run(tensor_parallel, 2, 2, timeout=180.0):
        assert error.startswith("float8: a product of tensors that are sharded over processes (DTensor) has no scale")
        assert same


def test_s36_ranks_have_the_bits_and_the_figures_of_micro_batches() -> None:
    for found in ranks.run(figures, 2, 2):
        alone, parameters = found["alone"]
        for engine in ("ddp", "fsdp2"):
            records, own_parameters = found[engine]
            assert len(records) == 2
            assert all(map(np.array_equal, own_parameters, parameters)), engine
            for (path, one), (expected, other) in zip(records, alone, strict=True):
                assert path == expected
                for name in PRODUCT_OPERANDS:
                    own, wanted = getattr(one, name), getattr(other, name)
                    assert (own.elements, own.underflow) == (wanted.elements, wanted.underflow), (engine, path, name)
                    assert abs(own.sqnr - wanted.sqnr) < 1e-3, (engine, path, name)


def test_s36_ranks_train_as_micro_batches_do_and_send_nothing_more() -> None:
    first, second = ranks.run(products, 2, 2)
    for engine, (apart, from_half, checksum, same_messages) in first.items():
        assert apart < 1e-5, engine
        assert from_half > 1e-4, engine
        assert checksum == second[engine][2], engine
        assert same_messages, engine
