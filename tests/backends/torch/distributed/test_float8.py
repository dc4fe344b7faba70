"""Products in 8 bits on two ranks (S36): each rank's activations have scales of their own, as a micro-batch's have."""

from __future__ import annotations

import torch
from torch import nn

import polyamp
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


def test_s36_ranks_train_as_micro_batches_do_and_send_nothing_more() -> None:
    first, second = ranks.run(products, 2, 2)
    for engine, (apart, from_half, checksum, same_messages) in first.items():
        assert apart < 1e-5, engine
        assert from_half > 1e-4, engine
        assert checksum == second[engine][2], engine
        assert same_messages, engine
