"""polyamp's JAX step against the same step written by hand: time, compile time, converts, memory and loss curve.

The model is the two-layer transformer of `jax_transformer`, trained in float16 with dynamic loss scaling, clipping and
AdamW. The columns:

    float32        the handwritten step without a cast, the reference of the loss curves
    hand           handwritten casts with a float32 residual stream: numerically what autocast does; the baseline
    hand-f16       the same with a float16 residual stream: the leanest that an expert writes, and what mode "cast" does
    hand-optax     `hand` with optax.adamw in place of ten lines of AdamW
    cast, autocast `polyamp.train_step` on the linen model, by mode

Run by hand and by `make bench`; it judges nothing and always exits with 0. About five minutes on two CPU cores;
`--quick` takes about one, leaves out `hand-optax`, and its times are worth little.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import jax_measure
import jax_transformer as transformer
from jax_measure import Variant

import polyamp
from polyamp import registry


def handwritten(
    name: str, variables: Any, *, compute: Any, residual: Any, optimizer: Any = transformer.adamw
) -> Variant:
    """A handwritten variant; see `jax_transformer.handwritten_step`."""
    made = optimizer()
    return Variant(
        name=name,
        state=lambda: transformer.handwritten_state(variables, made, compute=compute),
        step=lambda: transformer.handwritten_step(made, compute=compute, residual=residual),
        read=lambda output: output,
    )


def library(name: str, variables: Any, *, mode: Any, op_rules: Mapping[str, Any] | None = None) -> Variant:
    """polyamp on the linen model; `op_rules` as in `polyamp.Policy`.

    Raises (from `state`):
        polyamp.UnsupportedError: the backend does not have the mode.
    """
    recipe = polyamp.Recipe(
        policy=polyamp.Policy("mixed_float16", mode=mode, op_rules=op_rules or {}),
        scaler=polyamp.LossScaler(
            init_scale=transformer.INITIAL_SCALE,
            growth_interval=transformer.GROWTH_INTERVAL,
            min_scale=transformer.MIN_SCALE,
            max_scale=transformer.MAX_SCALE,
        ),
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
        step=lambda: polyamp.train_step(loss_fn, recipe),
        read=lambda output: (output.loss, ~output.skipped),
        jitted=lambda: registry.get("jax").train_step(loss_fn, recipe),
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=["cast", "autocast"], help="polyamp's modes (default: both)")
    arguments, settings = jax_measure.parse(parser)
    print(jax_measure.heading(settings), flush=True)
    columns = variants(arguments.modes, with_optax=not arguments.quick)
    results = jax_measure.measure(columns, transformer.batches(settings.curve), settings)
    print(jax_measure.report(results, reference="float32", bases=["hand", "hand-f16"]))
    if arguments.json:
        jax_measure.write_json(arguments.json, results, settings)


if __name__ == "__main__":
    main()
