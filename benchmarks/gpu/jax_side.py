"""JAX's side of `gpu`: polyamp's step and the handwritten one on one NVIDIA GPU. `rows` says what is measured.

By hand: the casts of `jax_models`, optax.adamw, dynamic loss scaling in float16, one `jax.jit` with donation; polyamp
gets the same model as float32 code and its default mode. TF32 is JAX's matmul precision "tensorfloat32", and "float32"
turns it off; without either, a GPU computes in TF32. Peak memory is what XLA allocates for the compiled step, arguments
and results included: the allocator's own peak is the whole process's and cannot be set back.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from benchmarks.common import results, workloads
from benchmarks.common.workloads import Workload
from benchmarks.gpu import jax_models, measurements, run_plan
from benchmarks.gpu.measurements import Waits

# one pool for the whole process: pools that grow are torn into regions in which a step's temporaries find no place
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import jax.numpy as jnp
import optax

import polyamp

_GROWTH_INTERVAL: Final = 2000
_WEIGHT_DECAY: Final = 1e-2
_COUNTED: Final = 3
"""Steps in which waits are looked for."""
_PRECISION: Final = {"TF32": "tensorfloat32"}
"""Row's precision -> `jax.default_matmul_precision`; "float32" for all others."""


class JaxTraining:
    """One side; see `measurements.Training`.

    Args:
        step: `(state, batch) -> (state, loss)`.
        jitted: the `jax.jit` function inside it, once it has run.
        state: the first state.
        batch: inputs and targets, on the device.
    """

    def __init__(
        self, step: Callable[[Any, Any], tuple[Any, Any]], jitted: Callable[[], Any], state: Any, batch: Any
    ) -> None:
        self._step = step
        self._jitted = jitted
        self._state = state
        self._batch = batch

    def losses(self, count: int) -> list[float]:
        """See `measurements.Training`."""
        found = []
        for _ in range(count):
            self._state, loss = self._step(self._state, self._batch)
            found.append(float(loss))
        return found

    def run(self, count: int) -> tuple[float, float]:
        """See `measurements.Training`."""
        jax.block_until_ready(self._state)
        begin = time.perf_counter()
        for _ in range(count):
            self._state, loss = self._step(self._state, self._batch)
        free = time.perf_counter()
        jax.block_until_ready((self._state, loss))
        return time.perf_counter() - begin, free - begin

    def peak(self) -> float | None:
        """As the compiler says; JAX keeps what the step was compiled to, so nothing compiles."""
        return _peak_of(self._jitted(), self._state, self._batch)

    def waits(self) -> Waits | None:
        """By JAX's guard against transfers to the host, under which the first one is an error."""
        if jax.default_backend() != "gpu":
            return None
        if _refused(lambda: float(jnp.ones(()) + 1.0)) is None:
            return Waits(None, "the transfer guard does not see a transfer made on purpose")

        def several() -> None:
            for _ in range(_COUNTED):
                self._state, _ = self._step(self._state, self._batch)

        kept = jax.tree.map(jnp.copy, self._state)  # a step that is refused has consumed its own
        refused = _refused(several)
        if refused is not None:
            self._state = kept
        how = f"by the transfer guard, in {_COUNTED} steps"
        return Waits(0.0, how) if refused is None else Waits(1.0, f"{how}: at least one, {refused}")


def _refused(run: Callable[[], object]) -> str | None:
    """What the guard says of a transfer to the host; None if there is none."""
    try:
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            run()
    except RuntimeError as error:
        if "transfer" not in str(error):
            raise
        return str(error).splitlines()[0]
    return None


def _peak_of(jitted: Any, state: Any, batch: Any) -> float:
    memory = jitted.lower(state, batch).compile().memory_analysis()
    results_ = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(memory.argument_size_in_bytes + results_ + memory.temp_size_in_bytes)


# --- the two steps


class HandState(NamedTuple):
    """State of the handwritten step.

    Attributes:
        variables: master weights and running statistics, float32.
        opt_state: AdamW's.
        scale: loss scale, float32 scalar; 1 where the dtype needs none.
        good_steps: finite steps since the scale last moved, int32 scalar.
    """

    variables: Any
    opt_state: Any
    scale: jax.Array
    good_steps: jax.Array


def by_hand(model: jax_models.Model, dtype: str, matmul: str) -> tuple[Any, Any]:
    """`(state, batch) -> (state, loss)`, jitted, and `variables -> state`."""
    scaled = dtype == "float16"
    optimizer = optax.adamw(measurements.LEARNING_RATE, weight_decay=_WEIGHT_DECAY)

    def scaled_loss(params: Any, state: HandState, batch: Any) -> tuple[Any, Any]:
        inputs, targets = batch
        with jax.default_matmul_precision(matmul):
            outputs, statistics = model.apply({**state.variables, "params": params}, inputs, jnp.dtype(dtype))
        loss = jax_models.loss_of(outputs, targets)
        return (loss * state.scale if scaled else loss), (loss, statistics)

    def step(state: HandState, batch: Any) -> tuple[HandState, Any]:
        params = state.variables["params"]
        grads, (loss, statistics) = jax.grad(scaled_loss, has_aux=True)(params, state, batch)
        if scaled:
            grads = jax.tree.map(lambda g: g / state.scale, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        variables = {**state.variables, "params": optax.apply_updates(params, updates)}
        if "batch_stats" in variables:
            variables["batch_stats"] = statistics
        if not scaled:
            return HandState(variables, opt_state, state.scale, state.good_steps), loss
        finite = jnp.isfinite(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        new = jax.tree.map(functools.partial(jnp.where, finite), (variables, opt_state), tuple(state[:2]))
        grow = state.good_steps + 1 == _GROWTH_INTERVAL
        scale = jnp.where(finite, jnp.where(grow, state.scale * 2, state.scale), state.scale / 2)
        return HandState(*new, scale, jnp.where(finite & ~grow, state.good_steps + 1, 0)), loss

    def first(variables: Any) -> HandState:
        scale = jnp.float32(workloads.INIT_SCALE if scaled else 1.0)
        return HandState(variables, optimizer.init(variables["params"]), scale, jnp.int32(0))

    return jax.jit(step, donate_argnums=0), first


def loss_fn(model: Any, batch: Any) -> Any:
    """The loss as a polyamp user writes it."""
    inputs, targets = batch
    if jnp.issubdtype(targets.dtype, jnp.integer):
        return polyamp.losses.softmax_cross_entropy(model(inputs), targets)
    return polyamp.losses.mean_squared_error(model(inputs), targets)


def library(subject: Any, dtype: str, matmul: Any, batch: Any) -> JaxTraining:
    """polyamp's step."""
    recipe = polyamp.Recipe(
        policy=polyamp.Policy(workloads.DTYPES[dtype], float32_matmul=matmul),
        scaler=polyamp.LossScaler(init_scale=workloads.INIT_SCALE) if dtype == "float16" else None,
        optimizer=polyamp.adamw(measurements.LEARNING_RATE, weight_decay=_WEIGHT_DECAY),
    )
    train = polyamp.train_step(loss_fn, recipe)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        state, result = train(state, batch)
        return state, result.loss

    return JaxTraining(step, lambda: train._run["jax"], polyamp.init(subject, recipe), batch)


class JaxEngine:
    """See `measurements.Engine`."""

    name = "jax"

    def __init__(self) -> None:
        self._device = jax.devices()[0]
        self._kept: tuple[Workload, jax_models.Model, Any] | None = None

    def environment(self) -> dict[str, Any]:
        """Versions and the device."""
        versions = {"jax": jax.__version__, "optax": optax.__version__, "polyamp": polyamp.__version__}
        facts = {**versions, "device": self._device.device_kind, **results.machine()}
        used = (self._device.memory_stats() or {}).get("peak_bytes_in_use")
        return facts if used is None else {**facts, "allocator's peak so far, MiB": round(used / measurements.MIB)}

    def memory(self) -> float | None:
        """What XLA's pool may grow to."""
        limit = (self._device.memory_stats() or {}).get("bytes_limit")
        return None if limit is None else float(limit)

    def needs(self, workload: Workload) -> float | None:
        """As the compiler says; no step is run and no batch is made on the device."""
        model = self._model(workload)
        jitted, first = by_hand(model, "float32", "float32")
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), workloads.data(workload))
        try:
            return _peak_of(jitted, jax.eval_shape(first, model.variables), batch)
        except jax.errors.JaxRuntimeError as error:  # the compiler tries kernels out, in memory
            if not self.out_of_memory(error):
                raise
        return None

    def build(self, workload: Workload, precision: str, *, own: bool) -> JaxTraining:
        """See `measurements.Engine`."""
        gc.collect()
        model = self._model(workload)
        batch = self._batch(workload, model)
        dtype = "float32" if precision == "TF32" else precision
        if own:
            return library(model.subject, dtype, "high" if precision == "TF32" else "highest", batch)
        jitted, first = by_hand(model, dtype, _PRECISION.get(precision, "float32"))
        state = first(jax.tree.map(jnp.copy, model.variables))  # copies, since the step consumes them
        return JaxTraining(jitted, lambda: jitted, state, batch)

    def out_of_memory(self, error: BaseException) -> bool:
        """See `measurements.Engine`."""
        return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def free(self) -> None:
        """See `measurements.Engine`."""
        self._kept = None
        gc.collect()
        jax.clear_caches()

    def _model(self, workload: Workload) -> jax_models.Model:
        if self._kept is None or self._kept[0]._replace(batch=0) != workload._replace(batch=0):
            self._kept = None  # before the next is allocated
            self._kept = (workload, jax_models.model(workload), None)
        return self._kept[1]

    def _batch(self, workload: Workload, model: jax_models.Model) -> Any:
        if self._kept is None or self._kept[0] != workload or self._kept[2] is None:
            self._kept = (workload, model, jax.tree.map(jnp.asarray, workloads.data(workload)))
        return self._kept[2]


def open_engine(rehearse: bool) -> JaxEngine | str:
    """The engine, or why there is none."""
    if rehearse:
        jax.config.update("jax_platforms", "cpu")
        return JaxEngine()
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return (
            f"jax {jax.__version__} finds no GPU ({str(error).splitlines()[0]}): pip install 'jax[cuda12]', or "
            "'jax[cuda13]' where the driver is as new, and leave JAX_PLATFORMS unset"
        )
    return JaxEngine()


if __name__ == "__main__":
    sys.exit(run_plan.main(__doc__, __file__, open_engine))
