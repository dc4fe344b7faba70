"""Rule S32 in torch: a rank raises, is killed, hangs or brings something else; the others say which, in time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp.errors import ModelError, PolicyError, ReplicaError
from polyamp.rules import failure_report, rank_comparison
from polyamp_torch.distributed.torch_only import failure_guard
from tests import ranks

WAIT = 3.0
"""Seconds that a collective waits."""
ROLL = 8.0
"""Seconds that a roll call may take on top of that, on a machine with a lot to do."""


def network(engine: str, *, width: int = 8, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    if engine == "ddp":
        return DistributedDataParallel(model)
    for part in (*model, model) if engine == "fsdp2" else ():
        if not isinstance(part, nn.ReLU):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def recipe(*, overrides: dict[str, str] | None = None, **more: Any) -> polyamp.Recipe:
    policy = polyamp.Policy("float32", overrides=overrides or {})
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1, momentum=0.9), **more)


def loss_fn(model: Any, batch: Any) -> Any:
    return (model(batch) ** 2).mean()


def training(rank: int, engine: str, failing: int, fault: str, where: str) -> tuple[str, str, str, float]:
    """Ten steps; in the fourth one rank fails. What was raised: its class, its words, and its cause's class; and the
    seconds from the failure on."""
    since = [time.monotonic()]
    calls = [0]

    def fail() -> None:
        since[0] = time.monotonic()
        if rank != failing or calls[0] < 7:
            return
        if fault == "raise":
            raise ValueError("no such row")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            os._exit(0)
        if fault == "sleep":
            time.sleep(WAIT + 5)
            os._exit(0)

    def failing_loss(model: Any, batch: Any) -> Any:
        calls[0] += 1
        if where == "before forward":
            fail()
        out = model(batch)
        if where == "after forward":
            fail()
        loss = (out**2).mean()
        if where == "backward":
            out.register_hook(lambda grad: fail())
        return loss

    made = recipe(accumulate_steps=2)
    state = polyamp.init(network(engine), made)
    step = polyamp.train_step(failing_loss, made)
    for number in range(10):
        if where == "outside":
            calls[0] = 2 * number + 1
            fail()
        try:
            state, _ = step(state, torch.ones(4, 4) * (rank + 1))
        except ReplicaError as error:
            return type(error).__name__, str(error), type(error.__cause__).__name__, time.monotonic() - since[0]
    return "", "", "", time.monotonic() - since[0]


GONE = "rank {} is no longer running: killed, or ended without a word. (The collective of rank"
RAISED = "rank {} raised ValueError: no such row in step 4. (The collective of rank"
CASES = [
    ("ddp", 2, 1, "raise", "before forward", RAISED),
    ("ddp", 4, 2, "raise", "backward", RAISED),
    ("ddp", 4, 1, "kill", "after forward", GONE),
    ("ddp", 2, 0, "kill", "outside", GONE),
    ("ddp", 2, 1, "sleep", "outside", "rank {} hangs: it has not come back since step 3, for "),
    ("fsdp2", 2, 0, "raise", "backward", RAISED),
    ("fsdp2", 4, 2, "kill", "after forward", GONE),
    ("fsdp2", 4, 2, "sleep", "after forward", "rank {} hangs: it is still in step 4, for "),
]


@pytest.mark.parametrize(("engine", "world", "failing", "fault", "where", "words"), CASES)
def test_s32_the_others_name_the_rank(
    engine: str, world: int, failing: int, fault: str, where: str, words: str
) -> None:
    how = (engine, failing, fault, where)
    found = ranks.outcomes(training, world, *how, timeout=60, collective_timeout=WAIT, leave=False)
    others = [each for rank, each in enumerate(found) if rank != failing]
    for each in others:
        assert each.error == ""
        kind, said, cause, seconds = each.value
        assert (kind, cause) == ("ReplicaError", "RuntimeError")
        assert said.startswith(words.format(failing))
        assert said.endswith("polyamp.restore the last checkpoint: this state is not to be used again.")
        assert seconds < WAIT + ROLL
        assert fault != "sleep" or ", at test_failures.py, line " in said
    assert len({each.value[1].partition(" (The coll")[0] for each in others}) == 1


def refused(rank: int, engine: str) -> list[str]:
    """What each `init` says in which rank 1 brings something else; "" where all may go on."""
    other = rank == 1

    def frozen() -> nn.Module:
        model = network(engine)
        if other:
            next(model.parameters()).requires_grad_(False)
        return model

    def changed() -> nn.Module:
        model = network(engine, seed=rank)
        if other and engine == "ddp":
            with torch.no_grad():
                next(model.parameters()).flatten()[3] += 1e-6
        return model

    def counted(where: str) -> nn.Module:
        model = network(engine)
        inner: Any = model.module if engine == "ddp" else model
        inner.register_buffer("count" if where == "name" and other else "seen", torch.zeros(3) + other)
        return model

    cases: list[tuple[Any, polyamp.Recipe]] = [
        (lambda: network(engine), recipe()),
        (lambda: network(engine), recipe(clip_norm=1.0 + other)),
        (frozen, recipe()),
        (changed, recipe()),
        (lambda: counted("name"), recipe()),
        (lambda: counted("values"), recipe()),
        (lambda: network(engine), recipe(scaler=polyamp.LossScaler(growth_interval=7 + 2 * other))),
        (lambda: network(engine), recipe(overrides={"nowhere": "float16"} if other else {})),
        (lambda: network(engine), recipe()),
    ]
    found = []
    for build, made in cases:
        try:
            polyamp.init(build(), made)
            found.append("")
        except (PolicyError, ModelError) as error:
            found.append(f"polyamp.init raised {type(error).__name__}: {' '.join(str(error).split())} on rank {rank}")
        except ReplicaError as error:
            found.append(str(error))
    return found


NOT_TRAINED = "'0/weight: float32 [8, 4]{0}, not trained' there, '0/weight: float32 [8, 4]{0}' here"
BROUGHT = [
    "",
    "rank 1 brings other recipes than {}: 'clip_norm = 2.0' there, 'clip_norm = 1.0' here",
    "rank 1 brings other parameters than {}: " + NOT_TRAINED.replace("{0}", ""),
    "rank 1 brings other values than {}: '0/weight: values with the checksum ",
    "rank 1 brings other buffers than {}: 'count: float32 [3]' there, 'seen: float32 [3]' here",
    "rank 1 brings other values than {}: 'seen: values with the checksum ",
    "rank 1 brings other recipes than {}: 'scaler.growth_interval = 9' there, 'scaler.growth_interval = 7' here",
    "polyamp.init raised PolicyError: ",
    "",
]
SHARDED = {
    2: "rank 1 brings other parameters than {}: " + NOT_TRAINED.format(", S(0)"),
    3: "",  # every rank has shards of its own
}


@pytest.mark.parametrize(("engine", "world"), [("ddp", 4), ("fsdp2", 2)])
def test_s32_init_refuses_what_parts_on_every_rank(engine: str, world: int) -> None:
    found = ranks.run(refused, world, engine)
    assert found == [found[0]] * world
    for number, (said, words) in enumerate(zip(found[0], BROUGHT, strict=True)):
        expected = SHARDED.get(number, words) if engine == "fsdp2" else words
        assert said.startswith(expected.format({2: "rank 0", 4: "ranks 0, 2 and 3"}[world])), said
        assert bool(said) == bool(expected)


def crossed(rank: int, fault: str) -> list[str]:
    """What each rank is told whose programs part without an error, and by the next step of both states then."""
    made = recipe()
    states = [polyamp.init(network("ddp", seed=seed), made) for seed in (0, 1)]
    step = polyamp.train_step(loss_fn, made)
    said = []
    order = [0, 1, 0, 1]
    if rank == 1 and fault == "order":
        order = [0, 1, 1, 0]
    if rank == 1 and fault == "early":
        order = [0, 1, 0]
    if rank == 1 and fault == "bad batch":
        order = [0, 1, -1, 0, 1]
    for number in order:
        try:
            step(states[number], torch.ones(4, 4) if number >= 0 else torch.ones(4, 3))
        except (ReplicaError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_s32_states_that_are_stepped_in_another_order_do_not_mix() -> None:
    """Their gradients have one shape, so that the collectives themselves pair."""
    one, other = ranks.run(crossed, 4, "order", leave=False)[:2]
    begins = "rank 1 parted from the others in step 3: PartedError: step 3, of state 2, with gradients of 4 parameters "
    assert len(one) == len(other) == 2
    assert one[0].startswith(f"ReplicaError: {begins}there, PartedError: step 3, of state 1, ")
    assert one[1].startswith(f"ReplicaError: {begins}")
    assert "(The collective of rank 1 failed in step 3" in other[0]


def test_s32_a_rank_that_ends_early_or_goes_on_after_an_error_is_named() -> None:
    one, other = ranks.run(crossed, 2, "early", leave=False)
    assert one[0].startswith("ReplicaError: rank 1 ended after step 3. (The collective of rank 0 failed in step 4")
    assert other == []
    one, other = ranks.run(crossed, 2, "bad batch", leave=False)
    assert one[0].startswith("ReplicaError: rank 1 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert other[0].startswith("RuntimeError: mat1 and mat2")
    assert [each.partition(" (4x3")[0] for each in other[1:]] == [
        "ReplicaError: rank 1 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    ] * 2


def stopped(rank: int, where: str) -> tuple[str, float]:
    """Rank 0 is stopped, and so is the store, if its process keeps that: what rank 1 ends with, and after how long."""
    failure_guard.STORE_TIMEOUT = failure_report.ROLL_CALL_TIMEOUT = rank_comparison._VERDICT_GRACE = 2.0  # type: ignore[misc]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, os.getpid())
    since = [time.monotonic()]

    def stop(at: str) -> None:
        if at == where:
            since[0] = time.monotonic()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)

    model, made = network("ddp"), recipe()
    try:
        stop("init")
        state = polyamp.init(model, made)
        step = polyamp.train_step(loss_fn, made)
        for number in range(5):
            if number == 3:
                stop("step")
            state, _ = step(state, torch.ones(4, 4))
        stop("save")
        polyamp.save(state, "nowhere", sharded=True)
    except ReplicaError as error:
        return str(error), time.monotonic() - since[0]
    finally:
        os.kill(every[0], signal.SIGKILL)
    return "", 0.0


STORE = (
    "the store that the ranks of this process group share does not answer. It is kept by the launcher (torchrun) or, "
)


@pytest.mark.parametrize(
    ("where", "launcher", "words"),
    [
        ("init", False, STORE),
        ("step", False, STORE),
        ("step", True, "rank 0 did not answer within 2 s: it was killed, hangs, or its machine is lost."),
        ("save", False, STORE),
    ],
)
def test_s32_nobody_waits_for_a_rank_that_stopped(where: str, launcher: bool, words: str) -> None:
    how = {"collective_timeout": 2.0, "leave": False, "launcher": launcher, "timeout": 40.0}
    found = ranks.outcomes(stopped, 2, where, **how)[1]  # type: ignore[arg-type]
    assert found.value is not None, found.error
    said, seconds = found.value
    assert said.startswith(words), said
    assert seconds < 2.0 + ROLL
