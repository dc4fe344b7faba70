"""Keras on its JAX backend, polyamp over it: rows of `peers`, on the MLP of `workloads`.

Keras's policy casts like polyamp's autocast on this model: products, biases and tanh in 16 bits. Two ways that a Keras
user trains, each against polyamp on the same model in flax linen, with the same weights:

    stateless step  the jitted step of Keras's guide to custom training loops in JAX
    train_on_batch  the model's own method, which takes NumPy arrays and reads the loss on the host: so does
                    polyamp's side; with --slow
"""

from __future__ import annotations

import os
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import paired_timing, workloads
from benchmarks.common.paired_timing import Row, Settings, Step
from benchmarks.common.results import Entry, Side
from benchmarks.jax import measure, models
from benchmarks.jax import workloads as jax_workloads
from benchmarks.jax.workloads import Case

_TARGET: Final = 1.0
_MISSING: Final = "not installed: pip install -r benchmarks/jax/requirements.txt"


def entries(settings: Settings, *, slow: bool) -> list[Entry]:
    """Its rows; if Keras is not there, or runs on another backend, one that says so."""
    os.environ["KERAS_BACKEND"] = "jax"
    try:
        import keras
    except ModuleNotFoundError:
        return [_unmeasured(_MISSING)]
    if keras.backend.backend() != "jax":
        return [_unmeasured(f"Keras was imported before, on its {keras.backend.backend()} backend")]
    version = f"Keras {keras.__version__}"
    rows = [*_rows("float16", version, settings, reads=slow), *_rows("bfloat16", version, settings, reads=False)]
    if not slow:
        rows.append(
            _unmeasured("train_on_batch is left out: Keras compiles it anew for about 10 s; --slow measures it")
        )
    return rows


def _unmeasured(reason: str) -> Entry:
    own, base = Side("autocast", []), Side("Keras", [])
    return Entry(section="peers", name="mlp, float16", unit="s", own=own, base=base, target=_TARGET, note=reason)


def _rows(dtype: str, version: str, settings: Settings, *, reads: bool) -> list[Entry]:
    """polyamp against the stateless step, and where it `reads` against `train_on_batch`: one compiled step for both."""
    variables, arrays = models.variables(workloads.MLP), workloads.data(workloads.MLP)
    own = jax_workloads.library(Case(workloads.MLP, dtype), variables, jax.tree.map(jnp.asarray, arrays))
    jitted = stateless(dtype, variables)
    measure.compiled_together([own.lowered(), jitted.lowered()])
    curve = _curve(own)

    def compared(name: str, base: Step, own: Step) -> Entry:
        theirs = _curve(base)
        distance = paired_timing.distance(theirs, curve)
        same = distance <= workloads.TOLERANCE[dtype]
        note = "equal numerics" if same else f"other numerics: losses {curve}, Keras's {theirs}"
        row = Row(f"mlp, {dtype}", _TARGET, (f"{version}, {name}", base), ("autocast", own), section="peers", note=note)
        return paired_timing.entry(row, paired_timing.measure(row, settings), distance=distance)

    found = [compared("stateless step", jitted, own)]
    if reads:
        own.batch = arrays
        found.append(compared("train_on_batch", train_on_batch(dtype, variables), lambda: float(own())))
    return found


def _curve(step: Step) -> list[float]:
    return [float(step()) for _ in range(workloads.CHECKED_STEPS)]


def _model(dtype: str, variables: Any) -> tuple[Any, Any]:
    """The MLP under Keras's policy with these weights, and its optimizer."""
    import keras

    sizes, policy = workloads.MLP, workloads.DTYPES[dtype]
    layers = [keras.layers.Dense(sizes.width, activation="tanh", dtype=policy) for _ in range(sizes.layers - 1)]
    model = keras.Sequential([keras.Input((sizes.width,)), *layers, keras.layers.Dense(sizes.width, dtype=policy)])
    params = variables["params"]
    for number, layer in enumerate(model.layers):
        own = params[f"Dense_{number}"]
        layer.set_weights([np.asarray(own["kernel"]), np.asarray(own["bias"])])
    optimizer = keras.optimizers.AdamW(workloads.LEARNING_RATE, weight_decay=1e-2, epsilon=1e-8)
    if dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=workloads.INIT_SCALE)
    return model, optimizer


def stateless(dtype: str, variables: Any) -> jax_workloads.Training:
    """The step of Keras's guide, with its loss scaled as `Model.train_step` scales it, and its arguments donated."""
    import keras

    model, optimizer = _model(dtype, variables)
    optimizer.build(model.trainable_variables)
    batch = jax.tree.map(jnp.asarray, workloads.data(workloads.MLP))

    def scaled_loss(trainable: Any, fixed: Any, slots: Any, x: Any, y: Any) -> tuple[Any, Any]:
        outputs, fixed = model.stateless_call(trainable, fixed, x, training=True)
        loss = keras.ops.mean(keras.losses.mean_squared_error(y, keras.ops.cast(outputs, "float32")))
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            return optimizer.scale_loss(loss), (loss, fixed)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        trainable, fixed, slots = state
        grads, (loss, fixed) = jax.grad(scaled_loss, has_aux=True)(trainable, fixed, slots, *batch)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return (trainable, fixed, slots), loss

    kinds = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = tuple([jnp.copy(variable.value) for variable in kind] for kind in kinds)
    jitted = jax.jit(step, donate_argnums=0)
    return jax_workloads.Training(jitted, lambda: jitted, state, batch)


def train_on_batch(dtype: str, variables: Any) -> Step:
    """`Model.train_on_batch` of a compiled model."""
    model, optimizer = _model(dtype, variables)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = workloads.data(workloads.MLP)
    return lambda: model.train_on_batch(x, y)
