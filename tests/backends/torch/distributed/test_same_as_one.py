"""N ranks with batch B/N train as one process with batch B does (S9): values, decisions, and the number of collectives.

Every test is one launch of two or four ranks, which run all of its cases.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import polyamp
from polyamp import schedules
from tests import ranks
from tests.backends.torch.distributed.training import (
    ENGINES,
    arrays,
    batches,
    collectives,
    digest,
    distance,
    mean_loss,
    mlp,
    normalized,
    part,
    trained,
    whole,
)

STEPS = 50
SPECS = {
    "sgd": polyamp.sgd(0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": polyamp.adamw(1e-2),
    "lion": polyamp.lion(1e-3, weight_decay=0.1),
    "rmsprop": polyamp.rmsprop(1e-3),
    "adagrad": polyamp.adagrad(1e-2),
    "nadam": polyamp.nadam(1e-2),
    "lamb": polyamp.lamb(1e-2),
    "adafactor": polyamp.adafactor(1e-2, weight_decay=0.1),
    "muon": polyamp.muon(1e-2, ns_coefficients=(2.0, -1.5, 0.5)),
    "schedule_free": polyamp.schedule_free(1e-2),
}


def optimizers(rank: int, world: int) -> dict[str, tuple[float, float, bool]]:
    """Distance of the parameters and losses from one process, and whether the paths are the same."""
    found = {}
    steps = batches(STEPS)
    own = [part(batch, rank, world) for batch in steps]
    for name, optimizer in SPECS.items():
        recipe = polyamp.Recipe(policy="float32", optimizer=optimizer)
        alone, expected = trained(mlp(), recipe, steps)
        for engine in ("ddp", "fsdp2"):
            state, results = trained(ENGINES[engine](mlp(), world), recipe, own)
            apart = distance([whole(p) for p in state.parameters.values()], list(alone.parameters.values()))
            losses = distance([result.loss for result in results], [result.loss for result in expected])
            same = list(state.parameters) == list(alone.parameters)
            found[f"{engine} {name}"] = (apart, losses, same)
    return found


def recipes(rank: int, world: int) -> dict[str, tuple[float, ...]]:
    """The same for one recipe with everything, on every engine: distance of the parameters, of the norms, of the
    averages (S34), of the model with them, and of the parameters behind it."""
    recipe = polyamp.Recipe(
        policy="float32",
        optimizer=polyamp.adamw(
            schedules.warmup_cosine(1e-2, warmup_steps=3, total_steps=20),
            groups=[
                polyamp.Group(kind="bias", weight_decay=0.0),
                polyamp.Group("4/**", learning_rate_scale=0.5, clip_norm=0.05),
                polyamp.Group("0/**", trainable_after=4),
            ],
        ),
        clip_norm=0.5,
        accumulate_steps=2,
        ema=polyamp.Ema(0.9, warmup=True, exclude="4/bias"),
    )
    steps = batches(20)
    alone, expected = trained(mlp(), recipe, steps)
    found = {}
    for name, wrap in ENGINES.items():
        state, results = trained(wrap(mlp(), world), recipe, [part(batch, rank, world) for batch in steps])
        apart = distance([whole(p) for p in state.parameters.values()], list(alone.parameters.values()))
        norms = distance([result.grad_norm for result in results], [result.grad_norm for result in expected])
        own, others = state.averages.model, alone.averages.model
        assert list(own) == list(others) == [path for path in alone.parameters if path != "4/bias"]
        averages = distance([whole(p) for p in own.values()], list(others.values()))
        with polyamp.averaged(state):
            inside = [whole(state.parameters[path]) for path in own]
        after = distance([whole(p) for p in state.parameters.values()], list(alone.parameters.values()))
        found[name] = (apart, norms, averages, distance(inside, list(others.values())), after)
    return found


def whole_tensor_collectives(rank: int, world: int) -> dict[str, int]:
    """Number of collectives in a warm step of sharded parameters."""
    found = {}
    for name in ("adamw", "muon", "adafactor", "lamb"):
        recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2) if name == "adamw" else SPECS[name])
        state, step = polyamp.init(ENGINES["fsdp2"](mlp(), world), recipe), polyamp.train_step(mean_loss, recipe)
        for batch in batches(2):
            with CommDebugMode() as sent:
                state, _ = step(state, part(batch, rank, world))
            found[name] = sent.get_total_counts()
    return found


def test_a_sharded_muon_gathers_each_matrix_once() -> None:
    """Three matrices and three biases: Muon gathers the matrices; Adafactor too, and sums two norms of each of the
    six; LAMB sums two norms of each."""
    for found in ranks.run(whole_tensor_collectives, 2, 2):
        more = {name: count - found["adamw"] for name, count in found.items()}
        assert more == {"adamw": 0, "muon": 3, "adafactor": 3 + 6 + 3, "lamb": 12}


def test_s09_ranks_with_parts_of_a_batch_equal_one_process_with_the_whole() -> None:
    for found in ranks.run(optimizers, 2, 2):
        assert {name: values for name, values in found.items() if not (max(values[:2]) < 1e-6 and values[2])} == {}
        assert len(found) == 2 * len(SPECS)


def test_s09_groups_schedule_clip_and_accumulation_are_those_of_one_process() -> None:
    for found in ranks.run(recipes, 4, 4):
        assert {name: values for name, values in found.items() if not max(values) < 1e-6} == {}
        assert len(found) == len(ENGINES)


def overflows(rank: int, world: int) -> dict[str, list[tuple[str, bool, float]]]:
    """After every step: a checksum of all state, whether it was skipped, and whether what is left standing moved."""
    found = {}
    recipe = polyamp.Recipe(
        policy="mixed_float16",
        optimizer=polyamp.adamw(schedules.cosine(1e-2, 40)),
        scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=3),
        clip_norm=1.0,
    )
    for name in ("ddp", "ddp static", "fsdp2", "hsdp") if world == 4 else ("ddp", "ddp views", "fsdp2"):
        make = mlp if name in ("fsdp2", "hsdp") else normalized
        state, step = polyamp.init(ENGINES[name](make(), world), recipe), polyamp.train_step(mean_loss, recipe)
        said = []
        for number, batch in enumerate(batches(2 * world + 2)):
            own = part(batch, rank, world)
            if number % 2 and (number // 2) % world == rank:
                own[2][0] = float("inf")
            before = arrays(state)
            state, result = step(state, own)
            after = arrays(state)
            stands = [key for key in before if not key.startswith("scale/")]
            moved = sum(not torch.equal(before[key], after[key]) for key in stands)
            said.append((digest(state, result.grad_norm, result.loss), bool(result.skipped), float(moved)))
        found[name] = said
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_s09_an_overflow_on_any_rank_is_skipped_by_all_and_all_stay_bit_equal(world: int) -> None:
    found = ranks.run(overflows, world, world)
    assert all(each == found[0] for each in found)
    for said in found[0].values():
        assert [skipped for _, skipped, _ in said] == [bool(number % 2) for number in range(len(said))]
        assert all((moved == 0) == skipped for _, skipped, moved in said)


def by_hand(engine: str, model: Any, batch: Any, count: int) -> Any:
    """torch's own loop with a scaler and a clip, as a function of nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def step() -> None:
        for number in range(count):
            last = number == count - 1
            if engine == "fsdp2":
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if engine == "fsdp2" or last else model.no_sync():
                with torch.autocast("cpu", torch.float16):
                    loss = mean_loss(model, tuple(leaf[number::count] for leaf in batch))
                scaler.scale(loss / count).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def counted(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Collectives of a step, by hand and polyamp's."""
    found = {}
    batch = part(batches(1)[0], rank, world)
    for engine, make in (("ddp", mlp), ("ddp", normalized), ("fsdp2", mlp)):
        for count in (1, 2):
            loop = by_hand(engine, ENGINES[engine](make(), world), batch, count)
            recipe = polyamp.Recipe(
                policy="mixed_float16",
                optimizer=polyamp.adamw(1e-2),
                scaler=polyamp.LossScaler(init_scale=2.0**8),
                accumulate_steps=count,
                clip_norm=1.0,
            )
            state = polyamp.init(ENGINES[engine](make(), world), recipe)
            step = polyamp.train_step(mean_loss, recipe)
            for _ in range(2):
                loop()
                assert not step(state, batch)[1].skipped
            each = [collectives(loop), collectives(lambda step=step, state=state: step(state, batch))]
            found[f"{engine} {make.__name__} {count}"] = tuple(each_.total() for each_ in each)
    return found


def test_s09_a_step_has_at_most_one_collective_more_than_the_loop_by_hand() -> None:
    found = ranks.run(counted, 2, 2)
    assert found[0] == found[1]
    assert {name: pair for name, pair in found[0].items() if pair[1] > pair[0] + 1} == {}
    assert found[0]["ddp mlp 2"] == (1, 2)
    assert found[0]["ddp normalized 1"] == (3, 4)
