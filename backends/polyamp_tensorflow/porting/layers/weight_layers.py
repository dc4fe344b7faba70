"""Readers of Keras's dense layers, embeddings, normalisations and layers without arrays.

`read_layer` also covers the tables of `convolutions`, `recurrent` and `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Rule, same
from polyamp.porting.layouts.operations import Reshape, Transpose
from polyamp_tensorflow.compat import build_shapes, layer_classes
from polyamp_tensorflow.porting.layers import activations, attention, convolutions, einsum_dense, recurrent
from polyamp_tensorflow.porting.layers.layer_record import (
    LayerReader,
    LayerRecord,
    available_rules,
    opaque_kind,
    own_variables,
    plain_form,
)


def read_layer(layer: Any) -> list[LayerRecord] | None:
    """Return the canonical layers of a Keras layer; None for a class outside the tables: a container or custom layer.

    A subclass is read as its nearest base class in the tables.
    """
    for kind in type(layer).__mro__:
        reader = _READERS.get(kind)
        if reader is not None:
            return reader(layer)
    return None


def _dense(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    rules = available_rules(same("kernel", "bias"), arrays)
    return [LayerRecord(plain_form("dense", rules, **activations.activation_attributes(layer.activation)), arrays)]


def _embedding(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    table = LayerRecord(plain_form("embedding", (Rule(("embeddings",), ("table",)),), padding_index=None), arrays)
    if not isinstance(layer, _REVERSIBLE):
        return [table]
    cap = layer.logit_soft_cap
    activation = "linear" if cap is None else f"soft_cap({cap:g})"
    if layer.tie_weights:  # one array in two places: the head is the transposed table
        rule = Rule(("reverse",), ("kernel",), (Transpose((1, 0)),))
        return [
            table,
            LayerRecord(
                plain_form("dense", (rule,), activation=activation), {"reverse": arrays["embeddings"]}, "reverse"
            ),
        ]
    names = {name: variable for name, variable in arrays.items() if name != "reverse_embeddings"}
    head = Rule(("reverse_embeddings",), ("kernel",))
    reverse = {"reverse_embeddings": arrays["reverse_embeddings"]}
    return [
        table._replace(arrays=names),
        LayerRecord(plain_form("dense", (head,), activation=activation), reverse, "reverse"),
    ]


def _layer_norm(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    rules = available_rules((Rule(("gamma",), ("scale",)), Rule(("beta",), ("bias",))), arrays)
    axes = _last_axes(layer)
    if layer.rms_scaling:
        kind = opaque_kind(layer, "rms_scaling: it divides by the deviation from the mean, and takes no mean away")
        return [LayerRecord(plain_form(kind, rules, epsilon=float(layer.epsilon)), arrays)]
    if axes is None:
        return [
            LayerRecord(
                plain_form(opaque_kind(layer, f"over axes {layer.axis}"), rules, epsilon=float(layer.epsilon)), arrays
            )
        ]
    return [LayerRecord(plain_form("layer_norm", rules, epsilon=float(layer.epsilon), axes=axes), arrays)]


def _rms_norm(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    axes = _last_axes(layer)
    kind = "rms_norm" if axes is not None else opaque_kind(layer, f"over axes {layer.axis}")
    return [LayerRecord(plain_form(kind, same("scale"), epsilon=float(layer.epsilon)), arrays)]


def _last_axes(layer: Any) -> int | None:
    """Return the number of trailing axes that a norm covers; None if it covers other axes.

    A norm over the channels of channels-first inputs counts as 1: channels are last in the canonical layout.
    """
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    rank = len(build_shapes(layer) or ())
    if len(axes) == 1 and (axes[0] == -1 or not rank or axes[0] % rank in (rank - 1, 1)):
        return 1
    if not rank:
        return len(axes) if list(axes) == list(range(-len(axes), 0)) else None
    return len(axes) if sorted(axis % rank for axis in axes) == list(range(rank - len(axes), rank)) else None


def _group_norm(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    rules = available_rules((Rule(("gamma",), ("scale",)), Rule(("beta",), ("bias",))), arrays)
    return [
        LayerRecord(plain_form("group_norm", rules, epsilon=float(layer.epsilon), groups=int(layer.groups)), arrays)
    ]


def _batch_norm(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
    rules = available_rules(tuple(Rule((native,), (canonical,)) for native, canonical in names.items()), arrays)
    said = {"epsilon": float(layer.epsilon), "momentum": float(layer.momentum), "unbiased": False}
    return [
        LayerRecord(plain_form("batch_norm", rules, **said), {name: arrays[name] for name in names if name in arrays})
    ]


def _prelu(layer: Any) -> list[LayerRecord]:
    arrays = own_variables(layer)
    shape = tuple(arrays["alpha"].shape)
    if sum(length > 1 for length in shape) > 1:
        return [LayerRecord(plain_form(opaque_kind(layer, f"slopes of shape {list(shape)}"), same("alpha")), arrays)]
    operations = () if len(shape) == 1 else (Reshape(shape, (math.prod(shape),)),)
    return [LayerRecord(plain_form("prelu", (Rule(("alpha",), ("slope",), operations),)), arrays)]


def _dropout(layer: Any) -> list[LayerRecord]:
    return [LayerRecord(plain_form("dropout", (), rate=float(layer.rate)))]


def _other_dropout(layer: Any) -> list[LayerRecord]:
    return [LayerRecord(plain_form(opaque_kind(layer, "what it drops is not zero"), (), rate=float(layer.rate)))]


def _flatten(layer: Any) -> list[LayerRecord]:
    # With data_format="channels_first" Keras moves the channels last before it flattens. `inventory` sets "first" where
    # the model's convolutions are channels-first and the flatten layer does not have that setting.
    return [LayerRecord(plain_form("flatten", (), channels="last"))]


def _reshape(layer: Any) -> list[LayerRecord]:
    return _flatten(layer) if len(layer.target_shape) == 1 else []


def _resize(layer: Any) -> list[LayerRecord]:
    size = layer.size if isinstance(layer.size, list | tuple) else (layer.size,)
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(word := getattr(layer, "interpolation", "nearest"), word)
    return [
        LayerRecord(plain_form("resize", (), method=method, size=[int(factor) for factor in size], align_corners=False))
    ]


_REVERSIBLE: Final = layer_classes("ReversibleEmbedding")
_TABLE: Final[Mapping[str, LayerReader]] = {
    "Dense": _dense,
    "EinsumDense": einsum_dense.read_einsum_dense,
    "Embedding": _embedding,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "PReLU": _prelu,
    **dict.fromkeys(("Activation", "ReLU", "LeakyReLU", "ELU", "Softmax"), activations.read_activation),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"), _dropout),
    **dict.fromkeys(("AlphaDropout", "GaussianDropout"), _other_dropout),
    "Flatten": _flatten,
    "Reshape": _reshape,
    **dict.fromkeys(("UpSampling1D", "UpSampling2D", "UpSampling3D"), _resize),
    **convolutions.READERS,
    **recurrent.READERS,
    **attention.READERS,
}
_READERS: Final[dict[type, LayerReader]] = {
    kind: reader for name, reader in _TABLE.items() for kind in layer_classes(name)
}
