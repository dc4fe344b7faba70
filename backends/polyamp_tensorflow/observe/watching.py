"""One forward and backward pass of a state's model, with what every layer gives and the gradient by it.

The pass is `value_and_grad`, run operation by operation instead of as one graph, so that values are there as layers
give them: the same casts, the same loss scale, the same training mode. Called by `observer`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polyamp.parity.observing import See, Watched, What
from polyamp.results import LossFunction
from polyamp_tensorflow.arrays import dtype_name, is_floating, raw, to_numpy, to_tensors
from polyamp_tensorflow.compat import LOSSES, EagerTensor
from polyamp_tensorflow.models.layers import is_layer, modules
from polyamp_tensorflow.observe.streams import Streams
from polyamp_tensorflow.porting.fill import assign
from polyamp_tensorflow.porting.walk import Found, found
from polyamp_tensorflow.precision.bound import BoundModel
from polyamp_tensorflow.step.step import build_models

Array = np.ndarray[Any, Any]


def watch(state: Any, loss_fn: LossFunction, batch: Any, see: See) -> Watched:
    """See `Observer.watch`: `value_and_grad(loss_fn, compile=False)` on the state.

    A `tf.function` of the user runs as the Python that it was made of. An output is what a layer's `call` returns,
    before a policy rounds it for the layers that follow; of a tuple or a dict the first array. It is passed on as an
    identity operation whose gradient is the cotangent.

    Operations run as they stand: what the graph's optimizer or XLA join is rounded in between.
    """
    build_models([state], loss_fn, to_tensors(batch, state.recipe.policy.param))
    model, holds = state.model, found(state.model)
    scale = float(state.scale_state.scale) if state.recipe.loss_scaler.scales else 1.0
    probes = _Probes(see, scale)
    with _as_before(state), _in_python(), probes.inside(model, holds.paths):
        run = state.backend.value_and_grad(probes.around(loss_fn, model), compile=False)
        result, (gradients,) = run([state], batch)
    loss = result[0] if isinstance(result, tuple) else result
    unseen = "" if is_layer(model) else f"{type(model).__qualname__} is no Keras layer, so its parts are not seen."
    return Watched(float(loss), _by_leaf(state, holds, gradients.values), (), unseen)


def _by_leaf(state: Any, holds: Found, gradients: Mapping[str, Any]) -> dict[str, Array | None]:
    """Gradients by the names of the inventory, of what the state trains."""
    names = {id(raw(variable)): name for name, variable in state.variables.parameters.items()}
    leaves = [leaf for layer in holds.inventory.layers for leaf in layer.leaves.values()]
    found = {}
    for leaf in leaves:
        name = names.get(id(raw(holds.variables[leaf.name])))
        if name is not None and leaf.tied is None:
            value = gradients[name]
            found[leaf.name] = None if value is None else _wide(value)
    return found


def _wide(tensor: Any) -> Array:
    """On the host, in float32 or float64."""
    array = np.asarray(tensor)
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


@contextlib.contextmanager
def _as_before(state: Any) -> Iterator[None]:
    """What the pass moves or leaves is as before: random streams, statistics, added losses, warnings that were said."""
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


class _Probes:
    """What the layers' outputs pass through during one pass.

    Args:
        see: gets the arrays.
        scale: the loss scale, by which cotangents are divided.
    """

    def __init__(self, see: See, scale: float) -> None:
        self._see, self._scale = see, scale
        self._calls: Counter[str] = Counter()
        self._forward = False

    @contextlib.contextmanager
    def inside(self, model: Any, paths: Mapping[int, str]) -> Iterator[None]:
        """Probes behind the `call` of every layer of a model."""
        instead: list[tuple[Any, Any]] = []
        try:
            for module in modules(model):
                layer, path = module.layer, paths.get(id(module.layer), module.stable_path)
                instead.append((layer, vars(layer).get("call")))
                vars(layer)["call"] = self._behind(layer.call, path)
            yield
        finally:
            for layer, own in instead:
                vars(layer).pop("call", None)
                if own is not None:
                    vars(layer)["call"] = own

    def around(self, loss_fn: LossFunction, model: Any) -> LossFunction:
        """`loss_fn`, in which the forward pass is; a model that is no layer gets its probe here."""

        def watched(bound: Any, batch: Any) -> Any:
            self._forward = True
            try:
                return loss_fn(bound if is_layer(model) else _Shown(bound, self.through), batch)
            finally:
                self._forward = False

        return watched

    def _behind(self, call: Callable[..., Any], path: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            return self.through(path, call(*args, **kwargs))

        return called

    def through(self, path: str, output: Any) -> Any:
        """The output with a probe behind its first array."""
        leaves = keras.tree.flatten(output)
        place = next((n for n, leaf in enumerate(leaves) if isinstance(leaf, EagerTensor) and is_floating(leaf)), None)
        if place is None or not self._forward:
            return output
        self._calls[path] += 1
        name = path if self._calls[path] == 1 else f"{path}#{self._calls[path]}"
        self._show(name, "output", leaves[place])
        probed = self._probe(name, leaves[place])
        if output is leaves[place]:
            return probed
        leaves[place] = probed
        return keras.tree.pack_sequence_as(output, leaves)

    def _probe(self, name: str, output: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            if not self._forward:  # else it is of a gradient that loss_fn itself takes
                self._show(name, "cotangent", upstream)
            return upstream

        probed = tf.custom_gradient(lambda tensor: (tensor, gradient))(output)
        vars(probed).update(vars(output))  # Keras keeps masks and logits on tensors
        return probed

    def _show(self, name: str, what: What, tensor: Any) -> None:
        array = _wide(tensor)
        if what == "cotangent" and self._scale != 1.0:
            array = array / array.dtype.type(self._scale)
        self._see(name, what, array, dtype_name(tensor))


class _Shown(BoundModel):
    """A bound model that is no Keras layer, whose output passes through a probe."""

    def __init__(self, bound: BoundModel, through: Callable[[str, Any], Any]) -> None:
        vars(self).update(vars(bound))
        self._through = through

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._through("", super().__call__(*args, **kwargs))
