"""polyamp's torch step against the same step written by hand, on the four workloads of `workloads`.

    workloads      each in float32, bfloat16 and float16; the MLP and the block clipped and accumulated too
    memory         what such a step holds at its peak: activations, gradients, temporaries
    growth         the MLP over 1, 4 and 16 micro-batches of the same size: what polyamp adds to each

Both sides start from the same weights, see the same batch and use torch's fused AdamW; the losses of the first steps
are compared before anything is timed. What takes longer than three seconds a step is left out, and says so. About 60
seconds on one CPU core; a row takes a quarter of `--seconds`, and `--steps` and `--warmup` are 1 by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.common import paired_timing, workloads
from benchmarks.common.paired_timing import Row, Settings
from benchmarks.common.results import Entry, Side, heading
from benchmarks.common.workloads import BLOCK, GPT, MLP, RESNET, Workload
from benchmarks.torch import loops, measure
from benchmarks.torch.loops import Training, Variant

BY_HAND, POLYAMP = "by hand", "polyamp"
SECONDS = 1 / 4
"""Of `--seconds`, what a row takes."""
TOO_SLOW = 3.0
"""Seconds a step from which on a row is left out."""

Case = tuple[Workload, Variant]
CASES: list[Case] = [
    *((workload, Variant(dtype)) for workload in workloads.ALL for dtype in workloads.DTYPES),
    *(
        (workload, Variant(dtype, workloads.CLIP_NORM))
        for workload in (MLP, BLOCK)
        for dtype in ("bfloat16", "float16")
    ),
    *((workload, Variant("bfloat16", accumulate=4)) for workload in (MLP, BLOCK)),
]
QUICK: list[Case] = [
    (MLP, Variant("float16", workloads.CLIP_NORM)),
    (BLOCK, Variant("bfloat16")),
    (GPT, Variant("float32")),
    (RESNET, Variant("bfloat16")),
]


def name_of(case: Case) -> str:
    """The row's name."""
    return f"{case[0].name}, {case[1]}"


def sides(case: Case, *, whole: bool = True) -> tuple[Training, Training]:
    """The handwritten training and polyamp's, from the same weights on the same batches."""
    batches = loops.micro_batches(case[0], case[1].accumulate, whole=whole)
    return loops.workload_by_hand(*case, batches), loops.workload_with_polyamp(*case, batches)


def compared(case: Case, settings: Settings, *, section: str = "workloads", whole: bool = True) -> tuple[Entry, ...]:
    """The times of a case, and its memory where the section is "workloads"."""
    base, own = sides(case, whole=whole)
    began = time.perf_counter()
    first = loops.losses(base.step, 1)
    seconds = time.perf_counter() - began
    if seconds > TOO_SLOW:
        note = f"left out: one step by hand takes {seconds:.1f} s on this processor"
        missing = {"own": Side(POLYAMP, []), "base": Side(BY_HAND, []), "note": note}
        return (Entry(section=section, name=name_of(case), unit="s", **missing),)
    curve = first + loops.losses(base.step, workloads.CHECKED_STEPS - 1)
    apart = paired_timing.distance(curve, loops.losses(own.step))
    row = Row(
        name_of(case),
        None,
        (BY_HAND, base.step),
        (POLYAMP, own.step),
        section=section,
        note=_numerics(curve, apart, case[1].dtype),
    )
    found = paired_timing.measure(row, settings._replace(seconds=settings.seconds * SECONDS))
    entry = paired_timing.entry(row, found, distance=apart)
    return (entry, memory(case, base, own)) if section == "workloads" else (entry,)


def _numerics(curve: Sequence[float], apart: float, dtype: str) -> str:
    """What is to be said of the losses before the times are read."""
    if not curve[-1] < curve[0]:
        return f"does not train by hand: losses {', '.join(f'{loss:.4g}' for loss in curve)}"
    return "" if apart <= workloads.TOLERANCE[dtype] else "other numerics"


def memory(case: Case, base: Training, own: Training) -> Entry:
    """The peaks of a case whose steps are warm."""
    return Entry(
        section="memory",
        name=name_of(case),
        unit="MiB",
        own=Side(POLYAMP, [measure.peak(*own)]),
        base=Side(BY_HAND, [measure.peak(*base)]),
    )


def growth(counts: Sequence[int], settings: Settings) -> Iterator[Entry]:
    """The MLP over more and more micro-batches."""
    for count in counts:
        case = (MLP, Variant("bfloat16", accumulate=count))
        (entry,) = compared(case, settings, section="growth", whole=False)
        assert entry.base is not None
        pairs = zip(entry.own.values, entry.base.values, strict=True)
        added = [(mine - theirs) / count * 1e6 for mine, theirs in pairs]
        low, middle, high = statistics.quantiles(added, n=4)
        yield Entry(
            section="growth",
            name=f"mlp, bfloat16, {count} micro-batch{'es' if count > 1 else ''} of {MLP.batch}",
            unit="s",
            own=entry.own,
            base=entry.base,
            distance=entry.distance,
            note=f"polyamp adds {middle:.0f} us ({low:.0f}..{high:.0f}) to a micro-batch",
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help='rows whose name starts so; "growth" too')
    arguments, settings = paired_timing.parse(parser, steps=1, warmup=1)
    torch.set_num_threads(settings.threads)
    paired_timing.keep_freed_memory()
    environment = measure.environment()
    print(heading(environment, settings._asdict()) + "\n", flush=True)
    measure.check_counters()
    wanted = tuple(arguments.only)
    entries: list[Entry] = []
    for case in QUICK if arguments.quick else CASES:
        if not wanted or name_of(case).startswith(wanted):
            entries += compared(case, settings)
    if not wanted or "growth" in wanted:
        entries += growth(workloads.ACCUMULATE[:1] if arguments.quick else workloads.ACCUMULATE, settings)
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
