"""polyamp on two processes against the same loop by hand, under DistributedDataParallel and `fully_shard`.

    ddp, fsdp2     a GPT of 1 million parameters and one of 25 million, in float32, bfloat16 and float16, clipped; and
                   accumulated over four micro-batches
    added          what polyamp's step sends beside the engine's own: collectives, and elements of them
    one reduction  what a reduction of four numbers takes, the one that polyamp adds

By hand is what a careful user writes: `no_sync`, or `set_requires_gradient_sync`, before all but the last micro-batch,
`torch.autocast` around the forward pass, `torch.amp.GradScaler` in float16, `clip_grad_norm_`, torch's fused AdamW. It
does not know the mean loss over the ranks; polyamp's `result.loss` is that. polyamp trains with torch's own list of
operations (`op_list="native"`), so that what is compared is the step on several processes and nothing else.

Two gloo processes on loopback (`--processes` for more) train both in turn, from the same weights; a round's time is
that of the slower rank. Run by `bench.py`; it judges nothing. About two minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import polyamp
from benchmarks.common import paired_timing, results, workloads
from benchmarks.common.paired_timing import Found, Row, Settings, Step
from benchmarks.common.results import Entry, Side
from benchmarks.common.workloads import GPT, Workload
from benchmarks.torch import loops, measure, models

TARGET: Final = 1.02
SIZES: Final = {
    "1 M": GPT._replace(batch=1, length=32),
    "5 M": Workload("gpt", batch=1, width=256, layers=6, heads=8, length=32, vocabulary=512),
    "25 M": Workload("gpt", batch=1, width=512, layers=8, heads=8, length=32, vocabulary=512),
}
"""Few tokens, so that what follows the backward pass is seen beside it."""
TOO_SLOW: Final = 3.0
"""Seconds of a step from which on a case is left out: float16 on processors without instructions for it."""


class Case(NamedTuple):
    """What is trained, and how.

    Attributes:
        engine: "ddp" or "fsdp2".
        size: of `SIZES`.
        dtype: of `workloads.DTYPES`.
        accumulate: micro-batches of an update, each as large as the workload's batch.
    """

    engine: str
    size: str
    dtype: str
    accumulate: int = 1

    def __str__(self) -> str:
        several = f", accumulate {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.engine}, {self.size} parameters, {self.dtype}, clip{several}"


CASES: Final = [
    *(Case(engine, size, dtype) for engine in ("ddp", "fsdp2") for size in SIZES for dtype in workloads.DTYPES),
    *(Case(engine, size, "float16", 4) for engine in ("ddp", "fsdp2") for size in SIZES),
]
QUICK: Final = [Case("ddp", "1 M", "float16", 2), Case("fsdp2", "1 M", "bfloat16")]


def wrapped(case: Case) -> nn.Module:
    """The model in its engine."""
    model = models.build(SIZES[case.size])
    if case.engine == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    assert isinstance(model, models.GPT)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def batches(case: Case, rank: int) -> list[models.Batch]:
    """The rank's micro-batches."""
    workload = SIZES[case.size]
    found = [workloads.data(workload, seed=number * dist.get_world_size() + rank) for number in range(case.accumulate)]
    return [(torch.from_numpy(inputs).long(), torch.from_numpy(targets).long()) for inputs, targets in found]


def by_hand(case: Case, given: Sequence[models.Batch]) -> Step:
    """The handwritten step; returns the losses of its micro-batches."""
    model = wrapped(case)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, workloads.LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=workloads.INIT_SCALE, enabled=case.dtype == "float16")
    dtype = getattr(torch, case.dtype)
    last = len(given) - 1

    def micro_batch(number: int) -> torch.Tensor:
        with torch.autocast("cpu", None if case.dtype == "float32" else dtype, enabled=case.dtype != "float32"):
            loss = models.loss_fn(model, given[number])
        scaler.scale(loss / len(given) if last else loss).backward()
        return loss.detach()

    def alone(number: int) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync() if number < last else nullcontext()
        if last:
            model.set_requires_gradient_sync(number == last)  # type: ignore[operator]  # FSDPModule's
        return nullcontext()

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        losses = []
        for number in range(len(given)):
            with alone(number):
                losses.append(micro_batch(number))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, workloads.CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        return losses

    return step


def with_polyamp(case: Case, given: Sequence[models.Batch]) -> Step:
    """polyamp's step."""
    return loops.library(
        wrapped(case),
        given,
        models.loss_fn,
        policy=polyamp.Policy(workloads.DTYPES[case.dtype], op_list="native"),
        optimizer=polyamp.adamw(workloads.LEARNING_RATE),
        clip_norm=workloads.CLIP_NORM,
        scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if case.dtype == "float16" else None,
    )


def measured(own: Step, base: Step, settings: Settings) -> Found:
    """Seconds a step of the slower rank, round by round; every rank makes as many steps as the others."""
    began = time.perf_counter()
    for _ in range(settings.warmup):
        base()
        own()
    spent = agreed([(time.perf_counter() - began) / settings.warmup])[0]
    least = min(paired_timing.LEAST_ROUNDS, settings.rounds)
    rounds = int(np.clip(settings.seconds / (spent * settings.steps), least, settings.rounds))
    found = Found([], [])
    gc.collect()
    gc.disable()
    for number in range(rounds):
        sides = [(base, found.base), (own, found.own)]
        for step, times in sides if np.random.default_rng(number).random() < 0.5 else reversed(sides):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(settings.steps):
                step()
            times.append((time.perf_counter() - begin) / settings.steps)
    gc.enable()
    return Found(agreed(found.base), agreed(found.own))


def agreed(values: Sequence[float]) -> list[float]:
    """The largest of each over the ranks."""
    made = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    return list(made.tolist())


def mean_loss(step: Step) -> list[float]:
    """The mean losses over the ranks of the first steps."""
    made = torch.tensor(loops.losses(step), dtype=torch.float64)
    dist.all_reduce(made)
    return [value / dist.get_world_size() for value in made.tolist()]


def compared(case: Case, settings: Settings) -> Entry:
    """The times of a case."""
    given = batches(case, dist.get_rank())
    base, own = by_hand(case, given), with_polyamp(case, given)
    began = time.perf_counter()
    base(), own()
    seconds = agreed([(time.perf_counter() - began) / 2])[0]
    if seconds > TOO_SLOW:
        note = f"left out: a step takes {seconds:.1f} s on this processor"
        missing = Side("polyamp", []), Side("by hand", [])
        return Entry(section="replicas", name=str(case), unit="s", own=missing[0], base=missing[1], note=note)
    apart = paired_timing.distance(mean_loss(base), mean_loss(own))
    note = "" if apart <= workloads.TOLERANCE[case.dtype] else "other numerics"
    row = Row(str(case), TARGET, ("by hand", base), ("polyamp", own), section="replicas", note=note)
    return paired_timing.entry(row, measured(own, base, settings), distance=apart)


def collectives(step: Step) -> list[tuple[str, int]]:
    """Name and elements of every collective of a step, as torch's profiler records them."""
    with torch.profiler.profile(record_shapes=True) as found:
        step()
    shapes = [(event.name, event.input_shapes) for event in found.events() if event.name.startswith("gloo:")]
    return [(name.removeprefix("gloo:"), sum(int(np.prod(shape)) for shape in given)) for name, given in shapes]


def added(case: Case) -> Iterator[Entry]:
    """What polyamp's step sends beyond what the loop by hand does."""
    given = batches(case, dist.get_rank())
    counted = []
    for made in (by_hand, with_polyamp):
        step = made(case, given)
        step()
        counted.append(collectives(step))
    base, own = counted
    sent = [sum(elements for _, elements in each) for each in (base, own)]
    yield Entry(
        section="replicas",
        name=f"collectives added, {case}",
        unit="",
        own=Side("polyamp", [float(len(own) - len(base))]),
        target=1.0,
        note=f"{len(base)} by hand with {sent[0]:,} elements, {len(own)} with {sent[1]:,}",
    )


def one_reduction(settings: Settings) -> Entry:
    """Seconds of an all-reduce of four float64, the vector that polyamp sends."""
    times, vector = [], torch.zeros(4, dtype=torch.float64)
    for _ in range(settings.rounds):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(vector)
        times.append(time.perf_counter() - begin)
    own = Side(f"{dist.get_world_size()} processes", agreed(times))
    return Entry(section="replicas", name="one reduction of four numbers", unit="s", own=own)


def ranks(arguments: Sequence[str], processes: int) -> int:
    """Start this script on every rank, as torchrun does."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISTRIBUTED_DEBUG": "OFF", **os.environ}
    return subprocess.run([*launch, *arguments], check=False, env=variables).returncode


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    arguments, settings = paired_timing.parse(parser, steps=1, warmup=3, rounds=101, seconds=12)
    if "RANK" not in os.environ:
        return ranks(sys.argv[1:], arguments.processes)
    torch.set_num_threads(settings.threads)
    paired_timing.keep_freed_memory()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    environment = {**measure.environment(), "processes": dist.get_world_size()}
    if first:
        print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    wanted = tuple(arguments.only)
    cases = [each for each in (QUICK if arguments.quick else CASES) if not wanted or str(each).startswith(wanted)]
    entries = [compared(case, settings) for case in cases]
    for case in QUICK:
        if not wanted or "added".startswith(wanted):
            entries += added(case)
    if not wanted or "one reduction".startswith(wanted):
        entries.append(one_reduction(settings))
    if first:
        paired_timing.finish(entries, environment, settings, __file__, arguments.json)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
