"""One forward and backward pass of a state's model, with what every layer gives and the gradient by it.

The pass is `value_and_grad`, run operation by operation instead of as one graph, so that values are there as layers
give them: the same casts, the same loss scale, the same training mode. Called by `observer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from polyamp.parity.observing import See, Watched
from polyamp.results import LossFunction
from polyamp_tensorflow.arrays import raw, to_numpy, to_tensors
from polyamp_tensorflow.compat import LOSSES
from polyamp_tensorflow.models.layers import is_layer, modules
from polyamp_tensorflow.observe.operations import Operations
from polyamp_tensorflow.observe.parts import Parts, rows_of_a_replica
from polyamp_tensorflow.observe.probes import Probes, wide
from polyamp_tensorflow.observe.streams import Streams
from polyamp_tensorflow.observe.widened import not_in_float64
from polyamp_tensorflow.porting.fill import assign
from polyamp_tensorflow.porting.walk import Found, found
from polyamp_tensorflow.step.distribution import several
from polyamp_tensorflow.step.step import build_models

Array = np.ndarray[Any, Any]


def watch(state: Any, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
    """See `Observer.watch`: `value_and_grad(loss_fn, compile=False)` on the state.

    A `tf.function` of the user runs as the Python that it was made of. An output is what a layer's `call` returns,
    before a policy rounds it for the layers that follow; of a tuple or a dict the first array. It is passed on as an
    identity operation whose gradient is the cotangent. Keras's losses go past a softmax or sigmoid to its logits, so
    that such an output has no cotangent.

    Operations run as they stand: what the graph's optimizer or XLA join is rounded in between. On several replicas an
    output is that of all of them, one after another along the batch; theirs are kept until the last one has its own.

    Operations are told of a state that no step has updated, of the first replica.

    Raises:
        UnsupportedError: a state in float64, of a model or `loss_fn` that mixes other numbers with it.
    """
    build_models([state], loss_fn, to_tensors(batch, state.recipe.policy.param))
    model, holds = state.model, found(state.model)
    scale = float(state.scale_state.scale) if state.recipe.loss_scaler.scales else 1.0
    replicas = len(state.strategy.extended.worker_devices) if several(state.strategy) else 1
    parts = Parts(see, replicas, rows_of_a_replica(batch, replicas))
    operations = Operations(wanted=int(state.step) == 0)
    probes = Probes(parts.see, scale, operations)
    with _as_before(state), _in_python(), probes.inside(model, holds.paths), not_in_float64(state):
        run = state.backend.value_and_grad(probes.around(loss_fn, model), compile=False)
        result, (gradients,) = run([state], batch)
    parts.finish()
    loss = result[0] if isinstance(result, tuple) else result
    unseen = "" if is_layer(model) else f"{type(model).__qualname__} is no Keras layer, so its parts are not seen."
    return Watched(float(loss), _by_leaf(state, holds, gradients.values), operations.rows(), unseen)


def _by_leaf(state: Any, holds: Found, gradients: Mapping[str, Any]) -> dict[str, Array | None]:
    """Gradients by the names of the inventory, of what the state trains."""
    names = {id(raw(variable)): name for name, variable in state.variables.parameters.items()}
    leaves = [leaf for layer in holds.inventory.layers for leaf in layer.leaves.values()]
    found = {}
    for leaf in leaves:
        name = names.get(id(raw(holds.variables[leaf.name])))
        if name is not None and leaf.tied is None:
            value = gradients[name]
            found[leaf.name] = None if value is None else wide(value)
    return found


@contextlib.contextmanager
def _as_before(state: Any) -> Iterator[None]:
    """What the pass moves or leaves is as before: random streams, statistics, added losses."""
    written = {**state.variables.rng, **state.variables.left_by_a_forward_pass}
    values = [(variable, to_numpy(variable)) for variable in written.values()]
    layers = [module.layer for module in modules(state.model)]
    losses = [(vars(layer)[name], list(vars(layer)[name])) for layer in layers for name in LOSSES]
    streams = Streams()
    try:
        yield
    finally:
        for variable, value in values:
            assign(variable, value)
        for listed, items in losses:
            listed[:] = items
        streams.put_back()


@contextlib.contextmanager
def _in_python() -> Iterator[None]:
    """Every `tf.function` runs as Python, so that layers inside of one give values."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
