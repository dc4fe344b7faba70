"""polyamp's torch step against other libraries' mixed precision in torch, each in its plain form.

    by hand        torch.autocast, GradScaler in float16, fused AdamW
    Accelerate     Accelerator(mixed_precision=...) with the same optimizer
    Fabric         lightning.fabric.Fabric(precision=...) with the same optimizer
    Keras          Keras 3 on its torch backend: its own mixed policies, AdamW and LossScaleOptimizer, in its guide's
                   loop for torch, which takes no more time than train_on_batch

All start from the same weights and see the same batch. Before it is timed a peer's losses are compared with polyamp's,
and the dtype of its matrix products is looked at: one that computes in another dtype than it was asked for is not
timed, and its row says so. So does one that is not installed (`benchmarks/torch/requirements.txt`) or does not train.
About 40 seconds on one CPU core; a row takes a quarter of `--seconds`, and `--steps` and `--warmup` are 1 by default.
"""

from __future__ import annotations

import argparse
import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.common import paired_timing, workloads
from benchmarks.common.paired_timing import Row, Settings
from benchmarks.common.results import Entry, Side, heading
from benchmarks.common.workloads import BLOCK, MLP, Workload
from benchmarks.torch import keras_peer, loops, measure, models
from benchmarks.torch.loops import Training, Variant

SECONDS = 0.25
"""Of `--seconds`, what a row takes."""


def accelerate(workload: Workload, variant: Variant, batches: Sequence[Any]) -> Training:
    """Hugging Face Accelerate."""
    library: Any = importlib.import_module("accelerate")
    library.state.AcceleratorState._reset_state(reset_partial_state=True)  # or the last row's precision stays
    words = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
    scaling = library.GradScalerKwargs(init_scale=workloads.INIT_SCALE)
    accelerator = library.Accelerator(
        mixed_precision=words[variant.dtype], cpu=models.device().type == "cpu", kwargs_handlers=[scaling]
    )
    built = models.build(workload)
    model, optimizer = accelerator.prepare(built, loops.adamw(built))
    (batch,) = batches

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss_fn(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return Training(step, built)


def fabric(workload: Workload, variant: Variant, batches: Sequence[Any]) -> Training:
    """Lightning Fabric."""
    library: Any = importlib.import_module("lightning.fabric")
    words = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}
    made = library.Fabric(accelerator=models.device().type, devices=1, precision=words[variant.dtype])
    built = models.build(workload)
    model, optimizer = made.setup(built, loops.adamw(built))
    (batch,) = batches

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss_fn(model, batch)
        made.backward(loss)
        optimizer.step()
        return loss.detach()

    return Training(step, built)


Peer = Callable[[Workload, Variant, Sequence[Any]], Training]
PEERS: dict[str, Peer] = {
    "by hand": loops.workload_by_hand,
    "Accelerate": accelerate,
    "Fabric": fabric,
    "Keras": keras_peer.training,
}
PACKAGES = ("accelerate", "lightning", "keras")
CASES = [(workload, Variant(dtype)) for workload in (MLP, BLOCK) for dtype in ("bfloat16", "float16")]


def compared(name: str, workload: Workload, variant: Variant, settings: Settings) -> Entry:
    """polyamp over one peer on one workload."""
    batches = loops.micro_batches(workload, 1)
    row_name = f"{workload.name}, {variant}"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            peer = PEERS[name](workload, variant, batches).step
        curve = loops.losses(peer)
        seen = measure.products(peer)
    except ModuleNotFoundError as error:
        return _missing(row_name, name, f"{error}: pip install -r benchmarks/torch/requirements.txt")
    except Exception as error:  # noqa: BLE001  # whatever a peer does wrong is what its row says
        return _missing(row_name, name, f"{type(error).__name__}: {error}")
    told = ", ".join(f"{count} matrix products in {dtype}" for dtype, count in seen.most_common())
    if seen.most_common(1)[0][0] != variant.dtype:
        words = " ".join(str(said[0].message).split()) if said else ""
        note = f"asked for {variant.dtype}, it computes {told}"
        return _missing(row_name, name, f'{note} and says "{words}"' if words else f"{note} and says nothing")
    if not curve[-1] < curve[0]:
        return _missing(row_name, name, f"does not train: losses {', '.join(f'{loss:.4g}' for loss in curve)}")
    own = loops.workload_with_polyamp(workload, variant, batches).step
    apart = paired_timing.distance(curve, loops.losses(own))
    same = apart <= workloads.TOLERANCE[variant.dtype] and len(seen) == 1
    row = Row(
        row_name,
        1.0 if same else None,
        (name, peer),
        ("polyamp", own),
        section="peers",
        note="" if same else f"other numerics: {told}",
    )
    found = paired_timing.measure(row, settings._replace(seconds=settings.seconds * SECONDS))
    return paired_timing.entry(row, found, distance=apart)


def _missing(row_name: str, name: str, note: str) -> Entry:
    base, own = Side(name, []), Side("polyamp", [])
    return Entry(section="peers", name=row_name, unit="s", own=own, base=base, note=note)


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    installed = {each.metadata["Name"].lower() for each in metadata.distributions() if each.metadata["Name"]}
    return {name: metadata.version(name) for name in PACKAGES if name in installed}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows, or peers, whose name starts so")
    arguments, settings = paired_timing.parse(parser, steps=1, warmup=1)
    os.environ["KERAS_BACKEND"] = "torch"
    torch.set_num_threads(settings.threads)
    paired_timing.keep_freed_memory()
    environment = measure.environment(**versions())
    print(heading(environment, settings._asdict()) + "\n", flush=True)
    wanted = tuple(arguments.only)
    cases = CASES[:1] if arguments.quick else CASES
    entries = [
        compared(name, *case, settings)
        for case in cases
        for name in PEERS
        if not wanted or name.startswith(wanted) or f"{case[0].name}, {case[1]}".startswith(wanted)
    ]
    paired_timing.finish(entries, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
