"""`Probes`: what the outputs of a model's layers pass through while a pass is watched. Called by `watching`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from polyamp.parity.observing import What
from polyamp.results import LossFunction
from polyamp_tensorflow.arrays import dense, dtype_name, is_floating
from polyamp_tensorflow.compat import EagerTensor
from polyamp_tensorflow.models.layers import Module, is_layer, modules, with_calls
from polyamp_tensorflow.observe.operations import Operations
from polyamp_tensorflow.observe.parts import replica
from polyamp_tensorflow.precision.bound import BoundModel
from polyamp_tensorflow.precision.stand_ins import signature_of

Array = np.ndarray[Any, Any]


class Sees(Protocol):
    """Gets what a replica's layers give."""

    def __call__(self, replica: int, path: str, what: What, array: Array, dtype: str) -> None: ...


class Probes:
    """What the layers' outputs pass through during one pass.

    Args:
        see: gets the arrays.
        scale: the loss scale, by which cotangents are divided.
        operations: are told which layer runs.
    """

    def __init__(self, see: Sees, scale: float, operations: Operations) -> None:
        self._see, self._scale, self._operations = see, scale, operations
        self._calls: Counter[tuple[int, str]] = Counter()
        self._forward: set[int] = set()  # the replicas that are in loss_fn

    def inside(self, model: Any, paths: Mapping[int, str]) -> contextlib.AbstractContextManager[None]:
        """Probes behind the `call` of every layer of a model, whose paths are given by the layers' ids.

        A recurrent layer's cells, which Keras calls as often as it needs, are parts of that layer.
        """
        found = modules(model)
        cells = {id(part.layer) for each in found for part in _cells(each.layer)}
        shown = [each for each in found if id(each.layer) not in cells]
        holders = {id(each.parent) for each in shown}

        def probe(module: Module) -> tuple[Any, Callable[..., Any]]:
            layer, path = module.layer, paths.get(id(module.layer), module.stable_path)
            return layer, self._around(self._operations.inside(layer, path), path, takes=id(layer) not in holders)

        return with_calls(map(probe, shown))

    def around(self, loss_fn: LossFunction, model: Any) -> LossFunction:
        """`loss_fn`, in which the forward pass is; a model that is no layer gets its probe here."""

        def watched(bound: Any, batch: Any) -> Any:
            number, _ = replica()
            self._forward.add(number)
            try:
                with contextlib.nullcontext() if number else self._operations.noted():
                    return loss_fn(bound if is_layer(model) else _Shown(bound, self._through), batch)
            finally:
                self._forward.discard(number)

        return watched

    def _around(self, call: Callable[..., Any], path: str, *, takes: bool) -> Callable[..., Any]:
        """A layer's `call` with a probe behind it; its input is shown if `takes` is set."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return self._through(path, call(*args, **kwargs), args if takes else ())

        return signature_of(call, called)

    def _through(self, path: str, output: Any, inputs: Any = ()) -> Any:
        """The output with a probe behind its first array; the first array of the inputs is shown before.

        A layer that Keras runs again for the backward pass, to spare memory (`remat`), is seen once: its output in the
        forward pass, and the cotangent where it runs again.
        """
        leaves = keras.tree.flatten(output)
        place = _first(leaves)
        if place is None:
            return output
        number, _ = replica()
        name = path
        if number in self._forward:
            self._calls[number, path] += 1
            count = self._calls[number, path]
            name = path if count == 1 else f"{path}#{count}"
            taken = keras.tree.flatten(inputs)
            first = _first(taken)
            if first is not None:
                self._show(number, name, "input", taken[first])
            self._show(number, name, "output", leaves[place])
        elif self._calls[number, path] != 1:
            return output  # which of the calls runs again cannot be told
        probed = self._probe(number, name, leaves[place])
        if output is leaves[place]:
            return probed
        leaves[place] = probed
        return keras.tree.pack_sequence_as(output, leaves)

    def _probe(self, number: int, name: str, output: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            if number not in self._forward:  # else it is of a gradient that loss_fn itself takes
                self._show(number, name, "cotangent", dense(upstream, output), dtype_name(upstream))
            return upstream

        probed = tf.custom_gradient(lambda tensor: (tensor, gradient))(output)
        vars(probed).update(vars(output))  # Keras keeps masks and logits on tensors
        return probed

    def _show(self, number: int, name: str, what: What, tensor: Any, dtype: str = "") -> None:
        array = wide(tensor)
        if what == "cotangent" and self._scale != 1.0:
            array = array / array.dtype.type(self._scale)
        self._see(number, name, what, array, dtype or dtype_name(tensor))


def wide(tensor: Any) -> Array:
    """On the host, in float32 or float64."""
    array = np.asarray(tensor if tensor.shape.rank else tensor.numpy())  # NumPy takes no scalar of 16 bits
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _first(leaves: list[Any]) -> int | None:
    """The place of the first floating array that is no scalar, else of the first scalar; None if there is none."""
    found = [place for place, leaf in enumerate(leaves) if isinstance(leaf, EagerTensor) and is_floating(leaf)]
    return next((place for place in found if leaves[place].shape.rank), found[0] if found else None)


def _cells(layer: Any) -> list[Any]:
    return modules(layer.cell) if isinstance(layer, keras.layers.RNN) else []


class _Shown(BoundModel):
    """A bound model that is no Keras layer, whose output passes through a probe."""

    def __init__(self, bound: BoundModel, through: Callable[[str, Any], Any]) -> None:
        vars(self).update(vars(bound))
        self._through = through

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._through("", super().__call__(*args, **kwargs))
