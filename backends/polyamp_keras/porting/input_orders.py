"""Orders of the values that layers take, as the functional and sequential models in a Keras model prove them.

What the `call` of a user's class does with its values is unknown, and so are layers with the channels first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import keras

from polyamp.porting.layouts.input_order import InputOrder, InputOrderRecorder, ValueFlow
from polyamp_keras.compat import functional_model, inbound_nodes, keras_history
from polyamp_keras.models.layers import is_container, list_layers, own_class

_CONVOLUTIONS: Final = ("Conv", "ConvTranspose", "DepthwiseConv")
_PER_CHANNEL: Final = ("MaxPooling", "AveragePooling", "UpSampling", "ZeroPadding", "Cropping", "SpatialDropout")
_GLOBAL: Final = ("GlobalMaxPooling", "GlobalAveragePooling")
_ELEMENTWISE: Final = ("Activation", "ReLU", "LeakyReLU", "ELU", "Dropout", "GaussianNoise", "Identity")
_NORMS: Final = ("BatchNormalization", "GroupNormalization", "LayerNormalization")
_ACTIVATIONS: Final = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "celu", "mish"),
    *("sigmoid", "hard_sigmoid", "log_sigmoid", "hard_silu", "tanh", "hard_tanh", "softplus", "softsign"),
)
"""Activations that take each value for itself."""


def input_orders(model: Any, paths: Mapping[int, str]) -> dict[str, InputOrder]:
    """Return path of a layer -> the order of what it takes.

    Args:
        model: the model.
        paths: id of a layer -> its path in the inventory.
    """
    walk = _GraphWalk(paths)
    for module in list_layers(model):  # the outer one first
        if is_container(module.layer) and id(module.layer) not in walk.called:
            walk.follow(module.layer, [])
    return walk.recorder.inputs


class _GraphWalk:
    """Walk through the graphs of functional models, each node once for each call of its model.

    Args:
        paths: id of a layer -> its path in the inventory.

    Attributes:
        recorder: what the layers take.
        called: ids of the models that were followed.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.recorder = InputOrderRecorder()
        self.called: set[int] = set()
        self._paths = paths

    def follow(self, model: Any, given: Sequence[ValueFlow | None]) -> list[ValueFlow | None]:
        """Return the outputs of a functional or sequential model that takes `given`; unknown values if it is empty."""
        self.called.add(id(model))
        function = functional_model(model)
        if function is None:
            return []
        known: dict[int, ValueFlow | None] = dict.fromkeys(map(id, function.inputs))
        known |= dict(zip(map(id, function.inputs), given, strict=False))
        own: list[str] | None = [] if isinstance(model, keras.Sequential) else None
        waiting = list(function.outputs)
        while waiting:  # a graph may be deeper than Python's stack
            tensor = waiting[-1]
            operation, node, _ = keras_history(tensor)
            call = inbound_nodes(operation)[node]
            unknown = [each for each in call.input_tensors if id(each) not in known]
            if id(tensor) in known or unknown:
                waiting = waiting[:-1] if id(tensor) in known else [*waiting, *unknown]
                continue
            taken = [known[id(each)] for each in call.input_tensors]
            made = self._call(operation, taken, own)
            for number, output in enumerate(call.outputs):
                known[id(output)] = made[number] if number < len(made) else None
        return [known[id(each)] for each in function.outputs]

    def _call(
        self, operation: Any, taken: Sequence[ValueFlow | None], own: list[str] | None
    ) -> Sequence[ValueFlow | None]:
        """Return the outputs of an operation. `own` lists the dense layers of the sequential model that it is in, whose
        outputs nothing else takes; None elsewhere."""
        if is_container(operation):
            return self.follow(operation, taken)
        if len(taken) != 1 or id(operation) not in self._paths:
            return []
        return [self._call_layer(operation, taken[0], own)]

    def _call_layer(self, layer: Any, flow: ValueFlow | None, own: list[str] | None) -> ValueFlow | None:
        path, recorder, kind = self._paths[id(layer)], self.recorder, own_class(layer)
        name = kind.__name__ if getattr(keras.layers, kind.__name__, None) is kind else ""
        stem = name.replace("1D", "").replace("2D", "").replace("3D", "")
        if getattr(layer, "data_format", "channels_last") != "channels_last" or not _is_elementwise(layer):
            recorder.forget(path)
            return None
        if stem in _CONVOLUTIONS:
            return recorder.convolution(flow, path)
        if name == "Dense":
            if own is not None:
                own.append(path)
            return recorder.dense(flow, path, takes_channels=True)
        if stem in _NORMS:
            return recorder.norm(flow, path) if layer.axis in (-1, [-1], (-1,)) else None
        if name == "Flatten" or (name == "Reshape" and len(layer.target_shape) == 1):
            return recorder.flatten(flow, "last")
        if name == "Reshape":
            return recorder.reshape(flow, "last") if flow is not None and flow.order.layer in (own or ()) else None
        if stem in _GLOBAL and not layer.keepdims:
            return recorder.global_pooling(flow)
        is_kept = stem in _ELEMENTWISE or (stem in (*_PER_CHANNEL, *_GLOBAL) and flow is not None and flow.is_image)
        return flow if is_kept else None


def _is_elementwise(layer: Any) -> bool:
    """Return whether a layer's activation, if it has one, takes each value for itself."""
    activation = getattr(layer, "activation", None)
    return activation is None or getattr(activation, "__name__", "") in _ACTIVATIONS
