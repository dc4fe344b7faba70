"""Mistakes with one framework's own things: flax's axis names, Keras layers with two dtypes. Rows of `table`."""

from __future__ import annotations

from typing import Final

from tests.mistakes.table import EVERYWHERE, JAX, TENSORFLOW, TORCH, Row, every

_BATCH_NORM: Final = (
    "class Net(linen.Module):\n"
    "    @linen.compact\n"
    "    def __call__(self, x):\n"
    "        return linen.BatchNorm(use_running_average=False, axis_name='batch')(linen.Dense(2)(x))\n"
    "m = Net()\n"
    "v = jax.vmap(lambda x: m.init(jax.random.key(0), x), in_axes=0, axis_name='batch', axis_size=1)(x[None])\n"
    "v = jax.tree.map(lambda leaf: leaf[0], v)\n"
    "s = polyamp.init((m, v), recipe)\n"
    "polyamp.train_step(loss_fn, recipe)(s, batch)"
)
_DROPOUT: Final = (
    "m = linen.Sequential([linen.Dense(2), linen.Dropout(0.5, deterministic=False)])\n"
    "v = m.init({'params': jax.random.key(0), 'dropout': jax.random.key(1)}, x)\n"
    "s = polyamp.init((m, v), recipe)\n"
    "polyamp.train_step(loss_fn, recipe)(s, batch)"
)
_SAMPLING: Final = (
    "class Sampling(keras.layers.Layer):\n"
    "    def call(self, z):\n"
    "        return z + tf.random.normal(tf.shape(z)) * self.scale\n"
    "    scale = 1.0\n"
    "inputs = keras.Input((3,))\n"
    "m = keras.Model(inputs, Sampling(name='sampling')(keras.layers.Dense(2)(inputs)))\n"
    "s = polyamp.init(m, recipe)\n"
    "polyamp.train_step(loss_fn, recipe)(s, batch)"
)

ROWS: Final = [
    Row(_DROPOUT, "ModelError", r"random stream 'dropout'.*polyamp\.init\(model, recipe, rngs=\{'dropout': 0\}\)", JAX),
    *every(
        "ArgumentError",
        EVERYWHERE,
        [
            ("LossScaler().scale(state.scale_state, array(1.0))", r"scaler\.scale\(loss, state\).*Received: .*swapped"),
            ("LossScaler().unscale(state.scale_state, [array(1.0)])", r"scaler\.unscale\(grads, state\).*a list of 1"),
            ("LossScaler().update(True, state.scale_state)", r"scaler\.update\(state, finite\).*Received: True"),
        ],
    ),
    Row(
        _BATCH_NORM,
        "ModelError",
        r"axis name 'batch'.*BatchNorm.*axis_name=.*Drop|axis_name.*'batch'.*whole batch",
        JAX,
    ),
    Row(
        "l = lambda model, batch: jax.lax.pmean(loss_fn(model, batch), 'devices')\ntrain(l)",
        "ModelError",
        r"axis.*'devices'.*Drop",
        JAX,
    ),
    Row(
        "polyamp.init(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), recipe, axis_name='batch')",
        "UnsupportedError",
        r"axis_name= maps an equinox module",
        JAX,
    ),
    Row(
        _SAMPLING,
        "ModelError",
        r"layer 'sampling' \(Sampling\).*bfloat16.*float32.*overrides=\{'sampling': 'float32'\}",
        TENSORFLOW,
    ),
    Row(
        "polyamp.GradScaler()",
        "AttributeError",
        r"module 'polyamp' has no attribute 'GradScaler'.*polyamp_torch\.GradScaler",
        TORCH,
    ),
    Row("polyamp.AdamW(1e-3)", "AttributeError", r"no attribute 'AdamW'.*Did you mean 'adamw'"),
    Row("polyamp.TrainStep", "AttributeError", r"no attribute 'TrainStep'.*Did you mean 'train_step'"),
    Row("polyamp.schedule", "AttributeError", r"no attribute 'schedule'.*Did you mean 'schedules'"),
    Row("polyamp.losses.cross_entropy(x, x)", "AttributeError", r"no attribute 'cross_entropy'.*softmax_cross_entropy"),
    Row("polyamp.losses.mse(x, x)", "AttributeError", r"no attribute 'mse'.*mean_squared_error"),
    Row("mse(array(x), array(x)[:, :2])", "LossError", r"shape.*\(4, 3\).*\(4, 2\)"),
    Row("polyamp.losses.softmax_cross_entropy(array(x), array(np.array([0, 1, 2, 3])))", "LossError", r"labels.*3"),
]
