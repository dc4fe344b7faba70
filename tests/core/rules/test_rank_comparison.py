"""Rule S32 without a framework: what ranks bring is compared, and a roll call names who failed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from polyamp.conformance.in_memory_rank_store import InMemoryStore
from polyamp.errors import CheckpointError, ReplicaError
from polyamp.rules import failure_report, liveness, single_file_save
from polyamp.rules.collective_barrier import collective_call
from polyamp.rules.failure_report import RankFailures
from polyamp.rules.rank_comparison import (
    Fingerprint,
    compare_ranks,
    group_ranks_by_fingerprint,
    report_init_error,
)
from polyamp.rules.rank_group import RankGroup, format_error, format_ranks
from polyamp.rules.single_file_save import SingleWriter


def on_ranks(
    count: int, run: Callable[[RankGroup], Any], *, seconds: float = 2.0, absent: Sequence[int] = ()
) -> list[Any]:
    """What `run` gives, or raises as ReplicaError, in a thread for each rank."""
    store, found = InMemoryStore(), [None] * count

    def run_rank(rank: int) -> None:
        try:
            found[rank] = run(RankGroup(store, rank, range(count), seconds))
        except ReplicaError as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(count) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def said(count: int, brought: Callable[[int], Fingerprint], part: Callable[[int], str] = lambda place: "") -> str:
    """What all ranks say alike; "" where none refuses."""
    found = on_ranks(count, lambda group: compare_ranks(group, 1, brought(group.rank), part(group.rank)))
    (words,) = {"" if each is None else str(each) for each in found}
    return words


def test_s32_ranks_that_bring_the_same_go_on() -> None:
    assert said(3, lambda place: {"recipes": ["a = 1"], "values": ["w: 1"]}) == ""


def test_s32_the_rank_that_differs_is_named_on_every_rank() -> None:
    lines = {2: ["w: float32 [3]", "b: float32 [2]"]}
    usual = ["w: float32 [3]", "b: float32 [3]"]
    assert said(4, lambda place: {"versions": ["1"], "parameters": lines.get(place, usual)}) == (
        "rank 2 brings other parameters than ranks 0, 1 and 3: 'b: float32 [2]' there, 'b: float32 [3]' here. Build "
        "the model and the recipe from the same code, with the same settings, on every rank."
    )


def test_s32_what_is_missing_and_each_kind_of_difference_are_said() -> None:
    words = said(5, lambda place: {"versions": [f"torch 2.{place == 0}"], "buffers": ["m"] * (2 - (place == 3))})
    assert words.startswith("rank 0 brings other versions than ranks 1, 2 and 4: 'torch 2.True' there, 'torch 2.False'")
    assert "rank 3 brings other buffers than ranks 1, 2 and 4: nothing there, 'm' here." in words
    assert "Install the same versions everywhere." in words


def test_s32_shards_are_compared_with_their_copies_alone() -> None:
    """Four ranks of which 0 and 2, 1 and 3 hold the same shards."""
    assert said(4, lambda place: {"shards": [f"w: {place % 2}"]}, lambda place: str(place % 2)) == ""
    words = said(4, lambda place: {"shards": [f"w: {place if place == 3 else place % 2}"]}, lambda p: str(p % 2))
    assert words.startswith("rank 3 brings other shards than ranks 0, 1 and 2: 'w: 3' there, 'w: 1' here.")


def test_s32_who_does_not_come_is_named_in_time() -> None:
    for absent, words in (([2], "rank 2"), ([0], "rank 0")):
        begun = time.monotonic()
        found = on_ranks(3, lambda group: compare_ranks(group, 1, {}), seconds=0.3, absent=absent)
        errors = [str(each) for place, each in enumerate(found) if place not in absent]
        assert all(each.startswith(f"{words} did not come to polyamp.init within 0.3 s.") for each in errors), errors
        assert time.monotonic() - begun < 8


@pytest.mark.parametrize("failing", [0, 1])
def test_s32_a_rank_that_raises_in_init_is_not_waited_for(failing: int) -> None:
    def run(group: RankGroup) -> None:
        if group.rank == failing:
            report_init_error(group, 1, ValueError("no model"))
        else:
            compare_ranks(group, 1, {})

    found = on_ranks(3, run, seconds=60.0)
    words = {str(each) for place, each in enumerate(found) if place != failing}
    assert words == {f"polyamp.init raised ValueError: no model on rank {failing}"}


def test_s32_kinds_of_ranks() -> None:
    assert group_ranks_by_fingerprint([({"a": "1"}, ""), ({"a": "2"}, ""), ({"a": "1"}, ""), ({"a": "3"}, "")]) == [
        [0, 2],
        [1],
        [3],
    ]
    assert format_ranks(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
    assert format_error(RuntimeError("[/a/b/pair.cc:553] Connection closed")) == "RuntimeError: Connection closed"
    assert len(format_error(ValueError("x" * 900))) == 600


def test_s32_the_rank_that_raised_is_named_with_its_error() -> None:
    error = ValueError("no such row")

    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun, board.is_in_step = 5, True
        if group.rank == 2:
            board.report_error(error)
            with pytest.raises(
                ReplicaError, match=r"rank 2 raised ValueError: no such row in step 5\. Start all ranks"
            ):
                board.check()
            return ""
        time.sleep(0.1)
        raised = board.collective_error("RuntimeError: closed")
        with pytest.raises(ReplicaError, match="rank 2 raised"):
            board.check()
        return str(raised)

    found = on_ranks(3, run)
    assert found[0] == (
        "rank 2 raised ValueError: no such row in step 5. (The collective of rank 0 failed in step 5: RuntimeError: "
        "closed) Start all ranks again and polyamp.restore the last checkpoint: this state is not to be used again."
    )
    assert error.__notes__ == [
        "polyamp: this is rank 2 of 3, in step 5. The other ranks end with ReplicaError, which says so. This state is "
        "not to be used again."
    ]


def test_s32_a_rank_that_ended_and_one_that_was_killed() -> None:
    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun = 5
        if group.rank == 1:
            board.report_exit()
            return ""
        time.sleep(0.1)
        return str(board.collective_error("RuntimeError: closed"))

    assert on_ranks(2, run)[0].startswith("rank 1 ended after step 5. (The coll")


def test_s32_the_killed_rank_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun, board.is_in_step = 5, True
        if group.rank == 1:
            board.failed = True  # its thread says nothing
            group.store.set(
                "who/1", b'{"host": "%b", "pid": 1, "start": "-1"}' % liveness.process_identity()["host"].encode()
            )
            return ""
        time.sleep(0.1)
        return str(board.collective_error("RuntimeError: closed"))

    begun = time.monotonic()
    found = on_ranks(3, run)
    assert found[0].startswith("rank 1 is no longer running: killed, or ended without a word. (The coll")
    assert time.monotonic() - begun < failure_report.ROLL_CALL_TIMEOUT


def test_s32_the_rank_that_hangs_says_where_by_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()

    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun, board.is_in_step = 5 - group.rank, group.rank == 0
        if group.rank == 1:
            over.wait(20)
            return ""
        words = str(board.collective_error("RuntimeError: Timed out"))
        over.set()
        return words

    words = on_ranks(2, run)[0]
    assert words.startswith("rank 1 hangs: it has not come back since step 4, for "), words
    assert ", in run. (The collective" in words


def test_s32_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_report, "ROLL_CALL_TIMEOUT", 0.5)

    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        if group.rank == 1:
            board.failed = True  # its thread says nothing
            return ""
        return str(board.collective_error("RuntimeError: Timed out"))

    assert on_ranks(2, run)[0].startswith(
        "rank 1 did not answer within 0.5 s: it was killed, hangs, or its machine is lost."
    )


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (["closed", "closed", "lost"], r"rank 2 parted from the others in step 5: lost there, closed on the others\. "),
        (["closed"] * 3, r"All ranks answer, and on each a collective failed in step 5: (rank \d: closed[;.] ){3}"),
        (["a", "b"], r"All ranks answer, and on each a collective failed in step 5: (rank (0: a|1: b)[;.] ){2}"),
    ],
    ids=["one differs", "all the same", "no majority"],
)
def test_s32_ranks_that_all_fail_are_told_apart_by_their_errors(errors: list[str], words: str) -> None:
    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun, board.is_in_step = 5, True
        return str(board.collective_error(errors[group.rank]))

    found = on_ranks(len(errors), run)
    assert all(re.match(rf"{words}\(The collective", str(each)) for each in found), found


def test_s32_the_rank_in_another_step_than_most_is_named() -> None:
    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun, board.is_in_step = 5 + group.rank // 2, True
        return str(board.collective_error("closed"))

    said = "rank 2 took another number of steps than the others, who are in step 5. "
    assert [str(each)[: len(said)] for each in on_ranks(3, run)] == [said] * 3


def called_by(
    places: Sequence[int], elsewhere: Callable[[RankFailures], Any], *, seconds: float = 20.0
) -> dict[int, str]:
    """What the ranks of three that save read, where the others do something else."""

    def run(group: RankGroup) -> str:
        board = RankFailures(group)
        board.steps_begun = 4
        if group.rank not in places:
            elsewhere(board)
            return ""
        with collective_call(board, "polyamp.save"):
            assert board.describe_position() == "polyamp.save after step 4"
            return "all came"

    found = on_ranks(3, run, seconds=seconds)
    return {place: str(found[place]) for place in places}


def test_s33_a_call_of_all_begins_when_all_have_come() -> None:
    assert called_by([0, 1, 2], lambda board: None) == dict.fromkeys(range(3), "all came")


@pytest.mark.parametrize("wait", [2.5, 0.0], ids=["the others fail first", "it fails first"])
def test_s33_who_went_another_way_is_named_on_both_sides(wait: float) -> None:
    heard = []

    def step(board: RankFailures) -> None:
        board.steps_begun, board.is_in_step = 5, True
        while not board.group.store.add("meeting/1/elsewhere", 0):  # the thread that looks after a long step says it
            time.sleep(0.02)
        time.sleep(wait)
        heard.append(str(board.collective_error("RuntimeError: closed")))

    begun = time.monotonic()
    found = called_by([0, 2], step)
    words = (
        "ranks 0 and 2 are in polyamp.save after step 4, and rank 1 in step 5. Every rank has to call polyamp.save of a"
    )
    assert all(each.startswith(words) for each in (*found.values(), *heard)), (found, heard)
    assert all("The last complete checkpoint is whole. Start all ranks again" in each for each in found.values())
    assert len(heard) == 1
    assert time.monotonic() - begun < 8.0


def test_s33_who_ended_or_does_not_come_is_named() -> None:
    found = called_by([0, 1], lambda board: board.report_exit())
    words = "rank 2 ended after step 4, and rank 0 is in polyamp.save, which every rank has to call. The last complete"
    assert {each.replace("rank 1 is", "rank 0 is")[: len(words)] for each in found.values()} == {words}
    late = called_by([1], lambda board: time.sleep(3.0), seconds=0.5)[1]
    assert (
        "(The collective of rank 1 failed in polyamp.save after step 4: ranks 0 and 2 did not come within 0.5 s)"
        in late
    )


def test_s33_one_rank_writes_for_all_that_call() -> None:
    """With no word from rank 0 the first that waits writes; an error of the rank that wrote is everybody's."""
    written: list[int] = []

    said: list[str] = []

    def run(group: RankGroup, absent: int | None, fails: bool) -> None:
        def put() -> None:
            written.append(group.rank)
            if fails:
                raise OSError(28, "full")

        if group.rank != absent:
            try:
                SingleWriter(group).write("state", "step 3", put, lambda: len(written) or None)
            except (OSError, CheckpointError) as error:
                said.append(f"{type(error).__name__}: {error}")

    def on_three(absent: int | None, *, fails: bool = False) -> None:
        written.clear()
        on_ranks(3, lambda group: run(group, absent, fails))

    on_three(None)
    assert (written, said) == ([0], [])
    on_three(None, fails=True)
    ours = "CheckpointError: rank 0 could not write state: OSError: [Errno 28] full"
    assert (written, sorted(said)) == ([0], [ours, ours, "OSError: [Errno 28] full"])
    single_file_save.WRITER_TIMEOUT = 0.3  # type: ignore[misc]
    try:
        on_three(0)
        assert len(written) == 1
        on_three(2)
        assert written == [0]
    finally:
        single_file_save.WRITER_TIMEOUT = 5.0  # type: ignore[misc]


KILLED = "rank 0 is no longer running: killed, or ended without a word, in polyamp.save, where rank 1 waits for it. "
HANGS = "rank 0 hangs: it writes in polyamp.save for more than 0.3 s, where rank 1 waits for it. "


@pytest.mark.parametrize(("started", "words"), [({"start": "-1"}, KILLED), ({}, HANGS)], ids=["killed", "hangs"])
def test_s33_a_rank_that_does_not_finish_writing_is_named(
    started: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(liveness, "process_identity", {**liveness.process_identity(), **started}.copy)

    def put() -> None:
        over.wait(20)

    def run(group: RankGroup) -> None:
        try:
            SingleWriter(group).write("state", "step 3", put, lambda: None)
        finally:
            over.set()

    assert str(on_ranks(2, run, seconds=0.3)[1]) == f"{words}The checkpoint before is whole."
