"""Rule S32 for every backend: what ranks bring to `init` is compared. Two states of one process stand for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import polyamp
from polyamp.conformance.in_memory_rank_store import InMemoryStore
from polyamp.conformance.problems import layers, recipe
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import ReplicaError
from polyamp.rules.rank_comparison import compare_ranks
from polyamp.rules.rank_group import RankGroup
from polyamp.train.rank_fingerprint import state_fingerprint


def rank_messages(states: list[Any]) -> list[str]:
    """What each of several ranks with these states is told; "" where it may go on."""
    store, found = InMemoryStore(), [""] * len(states)

    def run(rank: int) -> None:
        try:
            compare_ranks(
                RankGroup(store, rank, range(len(states)), 20.0), 1, state_fingerprint(states[rank], whole=True)
            )
        except ReplicaError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_s32_ranks_that_bring_the_same_train(backend: Backend, harness: Harness) -> None:
    def state() -> Any:
        return polyamp.init(harness.mlp(layers((4, 8, 3))), recipe())

    assert rank_messages([state(), state()]) == ["", ""]


def test_s32_a_rank_that_brings_something_else_is_refused_on_all(backend: Backend, harness: Harness) -> None:
    """The shape, the recipe and the values: each is named, with the rank."""

    def state(sizes: tuple[int, ...] = (4, 8, 3), seed: int = 0, **changes: Any) -> Any:
        return polyamp.init(harness.mlp(layers(sizes, seed=seed)), recipe(**changes))

    others: dict[str, Callable[[], Any]] = {
        "rank 2 brings other recipes than ranks 0 and 1: 'accumulate_steps = 2' there": lambda: state(
            accumulate_steps=2
        ),
        "rank 2 brings other parameters than ranks 0 and 1: ": lambda: state((4, 9, 3)),
        "rank 2 brings other values than ranks 0 and 1: ": lambda: state(seed=1),
    }
    for words, other in others.items():
        found = rank_messages([state(), state(), other()])
        assert found[0].startswith(words), found[0]
        assert found == [found[0]] * 3
