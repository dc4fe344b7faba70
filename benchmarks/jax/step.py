"""polyamp's JAX step against the same step written by hand: time, compile time, converts, memory and loss curve.

The model is the two-layer transformer of `transformer`, trained in float16 with dynamic loss scaling, clipping and
AdamW. The columns:

    float32        the handwritten step without a cast, the reference of the loss curves
    hand           handwritten casts with a float32 residual stream: numerically what autocast does; the baseline
    hand-f16       the same with a float16 residual stream: the leanest that an expert writes, and what mode "cast" does
    hand-optax     `hand` with optax.adamw in place of ten lines of AdamW; with --optax
    cast, autocast `polyamp.train_step` on the linen model, by mode

A second table holds what is compared with targets: "autocast" over `hand` and "cast" over `hand-f16`, the step and its
trace + compile; polyamp's bfloat16 over its float32; and the calls in which the host waited for the device.

Run by hand and by `make bench`; it judges nothing and always exits with 0. About two minutes on two CPU cores;
`--quick` has `hand` and "autocast" alone, and its times are worth little.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import polyamp
from benchmarks.common import paired_timing, results
from benchmarks.common.results import Entry, Side
from benchmarks.jax import measure, transformer
from benchmarks.jax.measure import Measured, Settings, Variant
from benchmarks.jax.synchronisations import waits
from polyamp.contract import registry
from polyamp.rules.stuck_scale import StuckScaleMonitor

_STEP: Final = 1.02
_COMPILE: Final = 1.25
_CALLS: Final = 56
_QUICK: Final = ("hand", "autocast")


def handwritten(
    name: str, variables: Any, *, compute: Any, residual: Any, optimizer: Any = transformer.adamw
) -> Variant:
    """A handwritten variant; see `transformer.handwritten_step`."""
    made = optimizer()
    return Variant(
        name=name,
        state=lambda: transformer.handwritten_state(variables, made, compute=compute),
        step=lambda: transformer.handwritten_step(made, compute=compute, residual=residual),
        read=lambda output: output,
        compiles={"hand": None, "float32": 0}.get(name, 1),
    )


def library(
    name: str,
    variables: Any,
    *,
    policy: str = "mixed_float16",
    mode: Any = "autocast",
    op_rules: Mapping[str, Any] | None = None,
) -> Variant:
    """polyamp on the linen model; `policy`, `mode` and `op_rules` as in `polyamp.Policy`.

    Raises (from `state`):
        polyamp.UnsupportedError: the backend does not have the mode.
    """
    scaler = polyamp.LossScaler(
        init_scale=transformer.INITIAL_SCALE,
        growth_interval=transformer.GROWTH_INTERVAL,
        min_scale=transformer.MIN_SCALE,
        max_scale=transformer.MAX_SCALE,
    )
    recipe = polyamp.Recipe(
        policy=polyamp.Policy(policy, mode=mode, op_rules=op_rules or {}),
        scaler=scaler if policy == "mixed_float16" else None,
        optimizer=polyamp.adamw(
            transformer.LEARNING_RATE,
            betas=(transformer.BETA1, transformer.BETA2),
            eps=transformer.ADAM_EPSILON,
            weight_decay=transformer.WEIGHT_DECAY,
        ),
        clip_norm=transformer.CLIP_NORM,
    )
    return Variant(
        name=name,
        state=lambda: polyamp.init((transformer.Transformer(), variables), recipe),
        step=lambda: measure.train_step(loss_fn, recipe),
        read=lambda output: (output.loss, ~output.skipped),
        jitted=lambda: registry.get("jax").train_step(loss_fn, recipe),
        inside=lambda step: step._run["jax"],
        compiles=None if mode == "autocast" else 1,
    )


def loss_fn(model: Any, batch: Any) -> Any:
    """The loss as a polyamp user writes it."""
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def variants(modes: Sequence[str], *, with_optax: bool) -> list[Variant]:
    """Every variant that this polyamp can run, in the order of the columns; says which it cannot.

    Args:
        modes: modes of polyamp's policy.
        with_optax: whether the column `hand-optax` is one of them.
    """
    variables = transformer.initial_variables()
    by_hand = functools.partial(handwritten, variables=variables)
    half, single = jnp.float16, jnp.float32
    found = [
        by_hand("float32", compute=single, residual=single),
        by_hand("hand", compute=half, residual=single),
        by_hand("hand-f16", compute=half, residual=half),
    ]
    if with_optax:
        found.append(by_hand("hand-optax", compute=half, residual=single, optimizer=transformer.optax_adamw))
    for mode in modes:
        variant = library(mode, variables, mode=mode)
        try:
            variant.state()
        except polyamp.UnsupportedError as error:
            print(f"mode={mode!r} is left out: {error}\n", flush=True)
        else:
            found.append(variant)
    return found


def bfloat16_over_float32(settings: Settings) -> Entry:
    """polyamp's step in bfloat16 against the same in float32, both in mode "autocast"."""
    variables, batch = transformer.initial_variables(), transformer.batches(1)[0]
    made = {}
    for dtype, policy in (("float32", "float32"), ("bfloat16", "mixed_bfloat16")):
        variant = library(dtype, variables, policy=policy)
        made[dtype] = (variant.step(), variant.state())
    measure.compiled_together([step._run["jax"].lower(state, batch) for step, state in made.values()])
    steps = {dtype: _closed(step, state, batch) for dtype, (step, state) in made.items()}
    note = f"on {jax.devices()[0].platform}, reported as it is"
    row = paired_timing.Row(
        "2-layer transformer, polyamp's step, bfloat16 over float32", None, *steps.items(), note=note
    )
    rounds = paired_timing.Settings(rounds=settings.rounds, steps=settings.steps, seconds=3)
    return paired_timing.entry(row, paired_timing.measure(row, rounds))


def _closed(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> paired_timing.Step:
    def run() -> None:
        nonlocal state
        state, _ = step(state, batch)
        jax.block_until_ready(state)

    return run


def synchronisations(step: Any, state: Callable[[], Any], calls: int) -> Iterator[Entry]:
    """Host synchronisations of polyamp's float16 step, one value a call; looks for a stuck scale apart.

    Raises:
        RuntimeError: the counter does not see a step that reads its loss.
    """

    def reading(state: Any, batch: Any) -> tuple[Any, Any]:
        state, result = step(state, batch)
        np.asarray(result.loss)
        return state, result

    batch = transformer.batches(1)[0]
    deliberate = waits(reading, state(), batch, calls=4)
    if deliberate != [1] * 4:
        raise RuntimeError(f"the counter of host synchronisations missed some of 4 deliberate ones: {deliberate}")
    start, _ = step(state(), batch)  # with the watch that the compiled step's states share
    scaler, watch = polyamp.LossScaler(), StuckScaleMonitor(shared=True)
    watch.steps = start.watch.steps + 1  # the one that warms up
    found = waits(step, start, batch, calls=calls)
    looks = [watch.is_due(scaler) for _ in range(calls)]
    for name, looking, target in (
        ("host synchronisations in a step, float16", False, 0.0),
        ("the same, steps that look whether the scale is stuck", True, None),
    ):
        counts = [float(one) for one, look in zip(found, looks, strict=True) if look == looking]
        note = f"{sum(counts):.0f} of {len(counts)} calls waited"
        note += f"; the host looks once every {scaler.patience} or {scaler.patience + 1} steps" * looking
        if counts:
            yield Entry(section="targets", name=name, unit="", own=Side("autocast", counts), target=target, note=note)


def entries(found: Measured) -> list[Entry]:
    """The modes that were measured against what they are to be held against."""
    made, model = [], "2-layer transformer, float16"
    for own, base in (("autocast", "hand"), ("cast", "hand-f16")):
        if own not in found.curves or base not in found.curves:
            continue
        converts = [str(found.programs[side].converts) for side in (own, base)]
        note = f"{' against '.join(converts)} converts in the optimized HLO"
        made.append(measure.entry(found, f"{model}, {own}", base=base, own=own, target=_STEP, note=note))
        if found.compiles[own]:
            name = f"{model}, {own}: trace + compile"
            made.append(measure.compile_entry(found, name, base=base, own=own, target=_COMPILE))
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=["cast", "autocast"], help="polyamp's modes (default: both)")
    parser.add_argument("--optax", action="store_true", help="the column hand-optax too")
    arguments, settings = measure.parse(parser)
    environment = measure.environment()
    print(results.heading(environment, settings._asdict()) + "\n", flush=True)
    columns = variants(arguments.modes, with_optax=arguments.optax)
    if arguments.quick:
        columns = [one for one in columns if one.name in _QUICK]
    batches = transformer.batches(settings.curve)
    found = measure.measure(columns, batches, settings)
    calls = 8 if arguments.quick else _CALLS
    others = [] if arguments.quick else [bfloat16_over_float32(settings)]
    for one in columns:
        if one.name == "autocast":
            others += synchronisations(found.steps[one.name], one.state, calls)
    found = found._replace(compiles=measure.compile_times(columns, batches[0], settings))
    print(measure.report(found, reference=columns[0].name, bases=_bases(columns)) + "\n", flush=True)
    paired_timing.finish([*entries(found), *others], environment, settings, __file__, arguments.json)


def _bases(columns: Sequence[Variant]) -> list[str]:
    return [one.name for one in columns if one.name in ("hand", "hand-f16")]


if __name__ == "__main__":
    main()
