"""Rules S32 and S33 in torch: `polyamp.save` and `polyamp.restore` that some ranks call and others do not."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyamp
from polyamp.errors import CheckpointError, ReplicaError, StateError
from polyamp.rules import resume_rng_seeds, single_file_save
from polyamp.train import checkpoint
from polyamp_torch.distributed.torch_only import failure_guard
from tests import ranks
from tests.backends.torch.distributed.test_checkpoints import advance, differences, fresh, whole

SOON = 8.0
"""Seconds that are "within seconds" on a machine with a lot to do; collectives wait for 60."""


def alone(rank: int, folder: str, caller: int, wait: float) -> tuple[list[str], float, Any]:
    """One rank saves, in mid-run and at the end, and no other one waits for it or calls anything."""
    single_file_save.WRITER_TIMEOUT = wait  # type: ignore[misc]
    state = advance(fresh("ddp", 0), 0, 2)
    begun = time.monotonic()
    if rank == caller:
        polyamp.save(state, f"{folder}/middle")
    seconds = time.monotonic() - begun
    middle = whole(state)
    state = advance(state, 2, 4)
    begun = time.monotonic()
    if rank == caller:
        polyamp.save(state, f"{folder}/end", sharded=False)
        polyamp.save(state, f"{folder}/end")
    seconds = max(seconds, time.monotonic() - begun)
    dist.barrier()
    again = polyamp.restore(fresh("ddp", 1), f"{folder}/middle")
    parted = differences(middle, whole(again))
    return parted, seconds, torch.get_rng_state().numpy()


@pytest.mark.parametrize(("caller", "launcher"), [(0, False), (1, True)])
def test_s33_one_rank_alone_saves_what_it_holds_whole(tmp_path: Path, caller: int, launcher: bool) -> None:
    found = ranks.run(alone, 3, str(tmp_path), caller, 0.3, launcher=launcher, leave=launcher)
    assert found[0][1] < 4.0, "nobody was waited for"
    for parted, _, _ in found:
        assert [name for name in parted if "rng" not in name] == []
    _, arrays = checkpoint.read(tmp_path / "middle")
    for rank, (_, _, stream) in enumerate(found):
        drawn = (
            torch.Generator()
            .manual_seed(resume_rng_seeds.stream_seed([arrays["rng/cpu"].tobytes()], rank, 3))
            .get_state()
        )
        assert stream.tobytes() == drawn.numpy().tobytes(), "each rank draws anew from the one that was saved"
    state = polyamp.restore(fresh(None, 1), tmp_path / "end")
    assert int(state.step) == 4


def together(rank: int, folder: str, late: int, error: bool) -> list[str]:
    """Every rank saves; one of them comes later. What each finds at the path when `save` returns."""
    state = advance(fresh("ddp", 0), 0, 2)
    found: list[str] = []
    write = checkpoint.write_atomically  # type: ignore[attr-defined]

    def counted(*arguments: Any, **how: Any) -> None:
        found.extend(["wrote"] * (rank > 0))
        write(*arguments, **how)

    checkpoint.write_atomically = counted  # type: ignore[attr-defined]
    for number in range(2):
        if rank == late:
            time.sleep(0.4)
        if error and rank == 0:
            checkpoint.write_atomically = full  # type: ignore[attr-defined]
        try:
            polyamp.save(state, f"{folder}/state")
            _, arrays = checkpoint.read(f"{folder}/state")
            found += differences(arrays, whole(state))
        except (OSError, CheckpointError) as raised:
            found.append(f"{type(raised).__name__}: {raised}")
        state = advance(state, number + 2, number + 3)
    if not error:
        polyamp.save(state, f"{folder}/another", dry_run=True)
    return found


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("late", "launcher"), [(0, True), (1, False)])
def test_s33_every_rank_saves_and_rank_0_writes(tmp_path: Path, late: int, launcher: bool) -> None:
    """Also where the store ends with rank 0, which is through with its program first."""
    assert ranks.run(together, 3, str(tmp_path), late, False, launcher=launcher, leave=False) == [[], [], []]
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_s33_every_rank_hears_that_rank_0_could_not_write(tmp_path: Path) -> None:
    found = ranks.run(together, 2, str(tmp_path), 0, True, leave=False)
    assert found[0] == ["OSError: [Errno 28] No space left on device"] * 2
    words = f"CheckpointError: rank 0 could not write {tmp_path}/state: OSError: [Errno 28] No space left on device"
    assert found[1] == [words] * 2


def dead(rank: int, folder: str, how: str) -> str:
    """Rank 0 is killed, or stopped, while it writes the file; every rank saves."""
    failure_guard.STORE_TIMEOUT = 2.0  # type: ignore[misc]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, os.getpid())
    state = fresh("ddp", 0)
    polyamp.save(state, f"{folder}/state")
    before = Path(folder, "state").read_bytes()

    def die(*_: Any, **__: Any) -> None:
        time.sleep(0.5)  # the other one has come meanwhile
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    if rank == 0:
        checkpoint.write_atomically = die
    try:
        polyamp.save(advance(state, 0, 1), f"{folder}/state")
        return "saved"
    except ReplicaError as error:
        assert Path(folder, "state").read_bytes() == before
        return str(error)
    finally:
        if how == "stop":
            os.kill(every[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "launcher", "words"),
    [
        ("kill", True, "rank 0 is no longer running: killed, or ended without a word, in polyamp.save, where rank 1 "),
        ("stop", False, "the store that the ranks of this process group share does not answer."),
    ],
)
def test_s33_a_rank_that_dies_as_it_writes_is_named(tmp_path: Path, how: str, launcher: bool, words: str) -> None:
    found = ranks.outcomes(dead, 2, str(tmp_path), how, collective_timeout=3.0, leave=False, launcher=launcher)
    assert found[1].value is not None, found[1].error
    assert found[1].value.startswith(words)
    assert found[1].value.endswith("The checkpoint before is whole.")
    assert found[1].seconds < 3.0 + SOON


def parted(rank: int, engine: str, caller: int, call: str, where: str, folder: str) -> tuple[str, float]:
    """One rank saves, or restores, where every one is needed; what each reads, and after how many seconds."""
    state = advance(fresh(engine, 0), 0, 2)
    if where == "end" and rank != caller:
        return "through", 0.0
    begun = time.monotonic()
    try:
        if rank == caller and call == "restore":
            polyamp.restore(state, f"{folder}/state")
        elif rank == caller:
            polyamp.save(state, f"{folder}/state", sharded=True if engine == "ddp" else None)
        advance(state, 2, 4)
    except ReplicaError as error:
        return str(error), time.monotonic() - begun
    return "no error", time.monotonic() - begun


BOTH = "rank {0} is in polyamp.{1} after step 2, and rank {2} in step 3. Every rank has to call polyamp.{1} of a state"


@pytest.mark.parametrize(
    ("engine", "caller", "call", "launcher"),
    [("fsdp2", 0, "save", False), ("ddp", 0, "restore", True), ("tensor_parallel", 1, "save", True)],
)
def test_s33_save_on_one_rank_and_a_step_on_the_other_are_named_on_both(
    tmp_path: Path, engine: str, caller: int, call: str, launcher: bool
) -> None:
    how = (engine, caller, call, "middle", str(tmp_path))
    found = ranks.run(parted, 2, *how, collective_timeout=60.0, leave=False, launcher=launcher)
    for words, seconds in found:
        assert words.startswith(BOTH.format(caller, call, 1 - caller)), words
        assert seconds < SOON
    assert list(tmp_path.iterdir()) == []


def test_s33_save_on_one_rank_at_the_end_says_that_the_others_ended(tmp_path: Path) -> None:
    found = ranks.run(parted, 3, "ddp", 0, "save", "end", str(tmp_path), collective_timeout=60.0, leave=False)
    words, seconds = found[0]
    assert "rank 1 ended after step 2" in words or "rank 2 ended after step 2" in words, words
    assert ", and rank 0 is in polyamp.save, which every rank has to call." in words
    assert seconds < SOON
    assert list(tmp_path.iterdir()) == []


def idle(rank: int, folder: str) -> str:
    """Rank 1 neither steps nor ends."""
    state = fresh("fsdp2", 0)
    if rank == 1:
        time.sleep(3.0)
        return ""
    try:
        polyamp.save(state, f"{folder}/state")
    except ReplicaError as error:
        return str(error)
    return "saved"


def test_s33_a_rank_that_does_not_come_to_save_is_named_in_time(tmp_path: Path) -> None:
    words = ranks.run(idle, 2, str(tmp_path), collective_timeout=1.0, leave=False)[0]
    assert words.startswith("rank 1 hangs: it has not come back since step 0, for "), words
    assert ", at test_some_ranks_save.py, line " in words
    assert "(The collective of rank 0 failed in polyamp.save after step 0: rank 1 did not come within 1 s)" in words
    assert "The last complete checkpoint is whole." in words


def moved(rank: int, folder: str) -> list[str]:
    """What is said of a state of several processes that is to be pickled or copied."""
    states = [fresh(engine, 0) for engine in ("ddp", "fsdp2")]
    said = []
    for state in states:
        for how in (pickle.dumps, copy.deepcopy, lambda each: torch.save(each, f"{folder}/{rank}.pt")):
            try:
                how(state)  # type: ignore[operator]
                said.append("done")
            except StateError as error:
                said.append(str(error))
    copied = copy.deepcopy(states[0].model.module)
    return [*said, *differences({n: p.detach().numpy() for n, p in copied.named_parameters()}, {})]


def test_s33_pickling_and_copying_a_state_says_what_to_do(tmp_path: Path) -> None:
    for found in ranks.run(moved, 2, str(tmp_path)):
        of_ddp, of_shards = found[:3], found[3:6]
        assert len({*of_ddp}) == len({*of_shards}) == 1
        assert "polyamp.save(state, path)" in of_ddp[0]
        assert "copy.deepcopy(state.model.module)" in of_ddp[0]
        assert "polyamp.save(state, path)" in of_shards[0]
        assert found[6:] == ["down.bias", "down.weight", "five", "norm.bias", "norm.weight", "up.bias", "up.weight"]
