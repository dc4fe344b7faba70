"""polyamp's TensorFlow step against the same step with Keras's `LossScaleOptimizer` in a custom loop.

Eight Dense(256) layers with biases, Adam, dynamic loss scaling, in one `tf.function` on either side; the Keras loop is
the one of Keras's own guide, without the global norm that polyamp's step reports. The rows:

    float32        loss scaling alone: nothing is cast on either side
    bfloat16       mixed_bfloat16, outside XLA
    float16        mixed_float16, under XLA on both sides (outside it float16 is not usable on a CPU)
    Keras's Adam   the bfloat16 row with keras.optimizers.Adam in the recipe, in the place of polyamp's spec
    XLA            polyamp's bfloat16 step under XLA against outside of it, and with --slow the float16 step
    bfloat16 block a transformer block in bfloat16 over the same in float32, both polyamp's

Run by hand and by `make bench`; it judges nothing and always exits with 0. About three minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import paired
import tensorflow as tf
from paired import Row, Step

import polyamp

WIDTH, LAYERS, BATCH, SCALE = 256, 8, 64, 2.0**10
BLOCK_WIDTH, HEADS, TOKENS = 512, 8, 128
_TARGET = 0.95


def batch() -> tuple[Any, Any]:
    """Inputs and targets, float32."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((BATCH, WIDTH)).astype(np.float32) for _ in range(2))
    return tf.constant(x), tf.constant(y)


def stack(policy: str = "float32") -> Any:
    """Eight layers under Keras's policy, the same weights every time."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu", dtype=policy) for _ in range(LAYERS - 1)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH, dtype=policy)])


def block() -> Any:
    """A transformer block of width 512."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((TOKENS, BLOCK_WIDTH))
    normed = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(HEADS, BLOCK_WIDTH // HEADS)(normed, normed)
    hidden = keras.layers.Dense(4 * BLOCK_WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, x + keras.layers.Dense(BLOCK_WIDTH)(hidden))


def loss_fn(model: Any, batch: Any) -> Any:
    """Mean squared error."""
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def by_hand(policy: str, *, jit: bool) -> Step:
    """Keras's scaler in the loop of Keras's guide to mixed precision, the layers under Keras's policy."""
    model, (x, y) = stack(policy), batch()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-6), initial_scale=SCALE)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit)
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return lambda: step(x, y).numpy()


def library(policy: str, *, jit: bool, optimizer: Any = None) -> Step:
    """polyamp's step."""
    recipe = polyamp.Recipe(
        policy=policy, optimizer=optimizer or polyamp.adam(1e-6), scaler=polyamp.LossScaler(init_scale=SCALE)
    )
    return _waiting(stack(), recipe, batch(), jit=jit)


def block_step(policy: str) -> Step:
    """polyamp's step on the transformer block."""
    x = tf.constant(np.random.default_rng(1).standard_normal((4, TOKENS, BLOCK_WIDTH)).astype(np.float32))
    return _waiting(block(), polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(1e-6)), (x, x), jit=False)


def _waiting(model: Any, recipe: polyamp.Recipe, data: Any, *, jit: bool) -> Step:
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(loss_fn, recipe, jit_compile=jit)
    return lambda: step(state, data)[1].loss.numpy()


def rows(*, slow: bool) -> Iterator[Row]:
    """All rows."""
    for name, policy, jit in (
        ("float32", "float32", False),
        ("bfloat16", "mixed_bfloat16", False),
        ("float16, XLA", "mixed_float16", True),
    ):
        yield Row(name, _TARGET, ("Keras", by_hand(policy, jit=jit)), ("polyamp", library(policy, jit=jit)))
    native = library("mixed_bfloat16", jit=False, optimizer=keras.optimizers.Adam(1e-6))
    yield Row("Keras's Adam", None, ("Keras", by_hand("mixed_bfloat16", jit=False)), ("polyamp", native))
    for policy, share in (("mixed_bfloat16", 1.0), *([("mixed_float16", 0.2)] if slow else [])):
        outside, inside = (library(policy, jit=jit) for jit in (False, True))
        yield Row(f"XLA: {policy}", None, ("outside", outside), ("XLA", inside), share=share)
    sides = [(name, block_step(policy)) for name, policy in (("float32", "float32"), ("bfloat16", "mixed_bfloat16"))]
    yield Row("bfloat16 block", None, sides[0], sides[1], share=0.3)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="rows whose name starts so")
    parser.add_argument(
        "--slow", action="store_true", help="also float16 outside XLA, which takes minutes on some processors"
    )
    arguments, settings = paired.parse(parser)
    tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
    environment = {"tensorflow": tf.__version__, "keras": keras.__version__, **paired.machine()}
    print(paired.heading(environment, settings) + "\n", flush=True)
    wanted = tuple(arguments.only) or ("",)
    found = [(row, paired.measure(row, settings)) for row in rows(slow=arguments.slow) if row.name.startswith(wanted)]
    print(paired.report(found))
    if arguments.json:
        paired.write_json(arguments.json, found, environment, settings)


if __name__ == "__main__":
    main()
