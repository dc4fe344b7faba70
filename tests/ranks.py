"""Several torch processes on loopback, as `torchrun` starts them, for tests and soaks: each runs one function.

    found = ranks.run(function, 4, "an argument")     function(rank, "an argument") in four processes, gloo between them
    [each.value for each in found]

The processes are forked from one server that has imported torch and polyamp and computed nothing, so that a launch
takes tens of milliseconds and not seconds. The store that they meet in is the caller's, as an agent's under torchrun:
it outlives every rank; or it is rank 0's, as without a launcher. A rank that raises, or dies, is an outcome as well;
what did not end in time is killed.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

PRELOADED = [
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "polyamp",
    "polyamp.losses",
    "polyamp.train.rank_fingerprint",
    "polyamp_torch.backend",
    "polyamp_torch.distributed.torch_only.fingerprint",
    "polyamp_torch.distributed.torch_only.failure_guard",
]
"""What the server imports; `fully_shard` imports the compiler, which takes two seconds.

None of it may run an operation of torch's: its thread pools do not survive a fork.
"""


class Outcome(NamedTuple):
    """How one rank ended.

    Attributes:
        value: what the function returned, pickled; None where it did not.
        error: `repr` of what it raised, then its traceback; "" where it raised nothing.
        exitcode: of the process, negative for a signal; None for one that was killed because the time was over.
        seconds: from the launch until it was heard last.
    """

    value: Any
    error: str
    exitcode: int | None
    seconds: float


class RankError(AssertionError):
    """A rank did not return; shows all of them."""


def outcomes(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    timeout: float = 60.0,
    collective_timeout: float = 20.0,
    leave: bool = True,
    launcher: bool = True,
) -> list[Outcome]:
    """`function(rank, *arguments)` in `world` processes with a gloo process group.

    Args:
        function: of a module that can be imported.
        world: how many processes.
        *arguments: pickled.
        timeout: seconds after which what still runs is killed.
        collective_timeout: seconds that a collective waits for the others.
        leave: whether a rank that is through destroys its process group, as a good program does.
        launcher: whether the store is the caller's; without one it is in rank 0's process.

    Returns:
        How each ended, by rank.
    """
    import torch.distributed as dist

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    limit = datetime.timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    port = store.port
    if not launcher:
        del store
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    started, begun = [], time.monotonic()
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        how = (rank, world, port, rank == 0 and not launcher, collective_timeout, leave)
        process = context.Process(target=_rank, args=(there, how, function, arguments), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    try:
        return _heard(started, begun, begun + timeout)
    finally:
        for process, here in started:
            process.kill()
            process.join()
            here.close()


def run(function: Callable[..., Any], world: int, *arguments: Any, **options: Any) -> list[Any]:
    """What each rank returned.

    Raises:
        RankError: one of them did not return.
    """
    found = outcomes(function, world, *arguments, **options)
    if any(each.error or each.exitcode != 0 for each in found):
        ended = (f"rank {rank} ended with {each.exitcode}: {each.error}" for rank, each in enumerate(found))
        raise RankError("\n".join(ended))
    return [each.value for each in found]


def _heard(started: Sequence[tuple[Any, Connection]], begun: float, end: float) -> list[Outcome]:
    said: dict[int, tuple[Any, str]] = {}
    last = dict.fromkeys(range(len(started)), 0.0)
    open_ = {here: rank for rank, (_, here) in enumerate(started)}
    while open_ and (left := end - time.monotonic()) > 0:
        for here in wait(list(open_), timeout=left):
            assert isinstance(here, Connection)
            rank = open_[here]
            last[rank] = time.monotonic() - begun
            try:
                said[rank] = here.recv()
            except EOFError:
                del open_[here]
    found = []
    for rank, (process, here) in enumerate(started):
        if here not in open_:
            process.join(max(0.1, end - time.monotonic()))
        found.append(Outcome(*said.get(rank, (None, "")), process.exitcode, last[rank]))
    return found


def _rank(
    there: Connection,
    how: tuple[int, int, int, bool, float, bool],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    rank, world, port, hosts, seconds, leave = how
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=hosts, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    try:
        value = function(rank, *arguments)
        if leave:
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is the outcome
        there.send((None, f"{error!r}\n{traceback.format_exc()}"))
        there.close()
        os._exit(1)  # not through torch's clean-up, which may wait for ranks that are gone
    there.send((value, ""))
    there.close()
