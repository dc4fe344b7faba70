"""polyamp's JAX backend: training state as a pytree, steps compiled with `jax.jit`.

It trains flax linen, flax nnx, equinox and haiku models, Keras models where Keras runs on JAX, and plain
`(apply_fn, params)` pairs. It imports none of these libraries itself: each is recognised only if the user's program
has imported it.

Example:
    >>> import jax.numpy as jnp, polyamp
    >>> recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    >>> def apply_fn(params, x):
    ...     return x @ params["linear"]["kernel"]
    >>> def loss_fn(model, batch):
    ...     return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])
    >>> state = polyamp.init((apply_fn, {"linear": {"kernel": jnp.ones((2, 1))}}), recipe)
    >>> step = polyamp.train_step(loss_fn, recipe)
    >>> state, result = step(state, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))})
    >>> float(result.loss), state.params["linear"]["kernel"].dtype.name
    (1.0, 'float32')
"""

from polyamp.backend_lookup import check_framework

check_framework(__name__, "jax", "jax", "optax")

from polyamp_jax.backend import BACKEND, JaxBackend
from polyamp_jax.own_loop.jax_only.select import select
from polyamp_jax.own_loop.native_scaler import scaled_value_and_grad
from polyamp_jax.precision.autocast import autocast, explain, keep_precision
from polyamp_jax.precision.op_list import register_rule
from polyamp_jax.step.state import JaxState, continue_streams

__all__ = [
    "BACKEND",
    "JaxBackend",
    "JaxState",
    "autocast",
    "continue_streams",
    "explain",
    "keep_precision",
    "register_rule",
    "scaled_value_and_grad",
    "select",
]


def __dir__() -> list[str]:
    return __all__
