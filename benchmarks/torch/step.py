"""polyamp's torch step against the same step written by hand with `torch.autocast`, `GradScaler` and clipping.

The rows, each against what a careful user writes:

    tensors        200 weights of 32x32, float16, clip 1.0, SGD: what follows the backward pass, and the whole step;
                   the handwritten loop uses the fused SGD too
    block          a transformer block of width 512, bfloat16 autocast, AdamW: torch's op list, and polyamp's
    bfloat16       polyamp's block in bfloat16 over the same in float32
    GradScaler     polyamp_torch.GradScaler in the place of torch's, in the handwritten loop
    host reads     what waits for a device in a step
    growth         what follows the backward pass, from 200 to 10,000 weights of 8x8: microseconds a tensor
    compiled       the block with compile=True over the eager step (with --compile: it takes a minute to compile)

Run by `bench.py`; it judges nothing and always exits with 0. About 60 seconds on one CPU core; `--steps` and `--warmup`
are 1 by default.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

import polyamp
from benchmarks.common import paired_timing, results
from benchmarks.common.paired_timing import Found, Row, Settings, Step
from benchmarks.common.results import Entry, Side
from benchmarks.common.workloads import DTYPES
from benchmarks.torch import loops, measure
from benchmarks.torch.models import block, device
from polyamp_torch import GradScaler

SCALE = 2.0**10
WIDTH, HEADS, TOKENS, BATCH = 512, 8, 128, 8
RATE = 1e-6
COUNTS = ((200, 1.0), (1000, 0.5), (10_000, 0.1))
"""Tensors of the growth rows -> the share of the rounds that they take."""

QUICK = ("tensors: after", "block, polyamp", "GradScaler: after", "host", "growth")
"""What the names of a short run's rows begin with."""


class Chain(nn.Module):
    """`count` square weights in a row, each a rotation, so that 200 of them neither blow up nor vanish."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.init.orthogonal_(torch.empty(size, size)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


class Parallel(nn.Module):
    """`count` weights side by side under one operation, whose cost is not the question."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size, size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.view(-1) for weight in self.weights]) * x


def loss_fn(model: Any, batch: Any) -> Any:
    """The mean square of the model's output."""
    return model(batch[0]).float().square().mean()


def by_hand_with_scaler(model: nn.Module, x: torch.Tensor, scaler: Any) -> Step:
    """The handwritten float16 loop with clipping."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, fused=True)
    return loops.by_hand(model, [(x,)], loss_fn, optimizer, "float16", clip_norm=1.0, scaler=scaler)


def scaled(model: nn.Module, x: torch.Tensor, optimizer: Any = None) -> Step:
    """polyamp's float16 step with clipping."""
    return loops.library(
        model,
        [(x,)],
        loss_fn,
        policy="mixed_float16",
        optimizer=optimizer or polyamp.sgd(RATE),
        clip_norm=1.0,
        scaler=polyamp.LossScaler(init_scale=SCALE),
    )


def chain() -> nn.Module:
    """200 weights of 32x32."""
    return Chain(200, 32).to(device())


def small() -> torch.Tensor:
    """What goes into the chain."""
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(device())


def transformer() -> nn.Module:
    """The block."""
    torch.manual_seed(0)
    return block(WIDTH, HEADS).to(device())


def tensor_rows() -> Iterator[Row]:
    """200 weights of 32x32."""
    for name, target, after in (("tensors: after backward", 0.80, True), ("tensors: whole step", 1.0, False)):
        hand = by_hand_with_scaler(chain(), small(), loops.native_scaler(SCALE))
        yield Row(name, target, ("by hand", hand), ("polyamp", scaled(chain(), small())), after, share=1.8)


def block_rows(*, compiled: bool) -> Iterator[Row]:
    """The transformer block."""
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device())

    def own(policy: Any, how: Any = False) -> Step:
        optimizer = polyamp.adamw(RATE)
        return loops.library(transformer(), [(x,)], loss_fn, how=how, policy=policy, optimizer=optimizer)

    def hand() -> Step:
        model = transformer()
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
        return loops.by_hand(model, [(x,)], loss_fn, optimizer, "bfloat16")

    whole = "mixed_bfloat16"
    native = polyamp.Policy(whole, op_list="native")
    limit = 1.05 if device().type == "cpu" else 1.02
    for name, policy, target in (("block, native list", native, 1.02), ("block, polyamp's list", whole, limit)):
        yield Row(name, target, ("by hand", hand()), ("polyamp", own(policy)), share=0.4)
    amx = device().type == "cpu" and results.machine()["amx"]
    yield Row(
        "bfloat16 over float32, block",
        1 / 1.8 if amx else None,
        ("float32", own("float32")),
        ("bfloat16", own(whole)),
        share=0.25,
        note="" if amx else "the target, 1/1.8, is for processors with AMX",
    )
    if compiled:
        yield Row("compiled", None, ("eager", own(whole)), ("compiled", own(whole, True)), share=0.5)


def scaler_rows() -> Iterator[Row]:
    """The drop-in scaler."""
    for name, after in (("GradScaler: after backward", True), ("GradScaler: whole step", False)):
        scaler = GradScaler(polyamp.LossScaler(init_scale=SCALE), device=device().type)
        used = (loops.native_scaler(SCALE), scaler)
        sides = [by_hand_with_scaler(chain(), small(), each) for each in used]
        yield Row(name, 1.0, ("torch's", sides[0]), ("polyamp's", sides[1]), after, share=1.8)


def reading_rows(*, quick: bool) -> Iterator[Entry]:
    """What waits for a device in an ordinary step, one that overflows, and one after it."""
    specs = {"AdamW": polyamp.adamw(RATE), "Lion": polyamp.lion(RATE)}
    cases = (("float16", "AdamW"), ("float16", "Lion"), ("bfloat16", "AdamW"))
    for dtype, name in cases[:1] if quick else cases:
        clip_norm = 1.0 if dtype == "float16" else None
        given = {"policy": DTYPES[dtype], "optimizer": specs[name], "clip_norm": clip_norm}
        x = small()
        own = loops.library(chain(), [(x,)], loss_fn, scaler=polyamp.LossScaler(init_scale=SCALE), **given)
        with measure.as_on_an_accelerator():
            reads = _reads(own, x)
        yield Entry(
            section="targets",
            name=f"host reads, {dtype}{', clip' if clip_norm else ''}, {name}",
            unit="",
            own=Side("polyamp", reads),
            target=0.0,
            note=_reads_by_hand(dtype, clip_norm, x),
        )


def _reads_by_hand(dtype: str, clip_norm: float | None, x: torch.Tensor) -> str:
    """Of SGD, because torch's other optimizers read their counts of steps besides, which always lie on the host."""
    found = []
    for fused in (True, False):
        model, scaler = chain(), loops.native_scaler(SCALE) if dtype == "float16" else None
        optimizer = torch.optim.SGD(model.parameters(), RATE, fused=fused)
        hand = loops.by_hand(model, [(x,)], loss_fn, optimizer, dtype, clip_norm=clip_norm, scaler=scaler)
        found.append(f"{statistics.median(_reads(hand, x)):.0f}")
    return f"by hand {found[0]} with the fused SGD, {found[1]} with torch's default one"


def _reads(step: Step, x: torch.Tensor) -> list[float]:
    step()
    found = []
    kept = x.clone()
    for value in (kept, torch.full_like(x, float("inf")), kept):
        x.copy_(value)
        found.append(float(measure.host_reads(step)))
    return found


def growth_rows(counts: Sequence[tuple[int, float]]) -> Iterator[tuple[int, Row]]:
    """More and more tensors."""
    for count, share in counts:
        x = torch.ones((), device=device())
        hand = by_hand_with_scaler(Parallel(count, 8).to(device()), x, loops.native_scaler(SCALE))
        sides = ("by hand", hand), ("polyamp", scaled(Parallel(count, 8).to(device()), x))
        yield count, Row(f"growth: {count} tensors", None, *sides, True, share, "growth")


def growth(found: list[tuple[int, Found]]) -> Iterator[Entry]:
    """Microseconds a tensor for the most tensors, over those for the fewest."""
    (fewest, first), (most, last) = found[0], found[-1]
    for name, target in (("polyamp", 1.0), ("by hand", None)):
        few, many = (times.own if name == "polyamp" else times.base for times in (first, last))
        yield Entry(
            section="growth",
            name=f"after backward, {fewest} to {most} tensors, {name}",
            unit="us a tensor",
            own=Side(f"{most} tensors", [seconds / most * 1e6 for seconds in many]),
            base=Side(f"{fewest} tensors", [seconds / fewest * 1e6 for seconds in few]),
            target=target,
        )


def measured(*, compiled: bool, quick: bool, wanted: tuple[str, ...], settings: Settings) -> Iterator[Entry]:
    """All rows, as they are measured; `wanted` are what their names begin with, or nothing for all."""

    def times(row: Row) -> Found | None:
        if wanted and not row.name.startswith(wanted):
            return None
        return paired_timing.measure(row, settings, measure.backward_clock)

    for row in itertools.chain(tensor_rows(), block_rows(compiled=compiled), scaler_rows()):
        if found := times(row):
            yield paired_timing.entry(row, found)
    if not wanted or any(name.startswith("host") for name in wanted):
        yield from reading_rows(quick=quick)
    growing = []
    for count, row in growth_rows(COUNTS[:2] if quick else COUNTS):
        if found := times(row):
            growing.append((count, found))
            yield paired_timing.entry(row, found)
    if len(growing) > 1:
        yield from growth(growing)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also the compiled step")
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    arguments, settings = paired_timing.parse(parser, steps=1, warmup=1)
    torch.set_num_threads(settings.threads)
    paired_timing.keep_freed_memory()
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    measure.check_counters()
    wanted = tuple(arguments.only) or (QUICK if arguments.quick else ())
    entries = list(measured(compiled=arguments.compile, quick=arguments.quick, wanted=wanted, settings=settings))
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
