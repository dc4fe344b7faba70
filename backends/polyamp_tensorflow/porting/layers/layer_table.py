"""Table of Keras's layers, with the forms of dense layers, embeddings, norms and layers without arrays.

`convolutions`, `recurrent`, `attention` and `einsum_dense` have the other rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.layouts.layer_layout import Form, Rule, same
from polyamp.porting.layouts.operations import Reshape, Shape, Transpose
from polyamp_tensorflow.compat import build_shapes, layer_classes
from polyamp_tensorflow.porting.layers import activations, attention, convolutions, einsum_dense, recurrent
from polyamp_tensorflow.porting.layers.layer_record import (
    LayerRecord,
    LayerRow,
    array_rules,
    opaque_kind,
    own_variables,
    plain_form,
    read_variables,
    weight_layer,
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


def file_row(word: str) -> LayerRow | None:
    """Return the row of the class after which Keras named a group in a weights file; None if it has no such row.

    >>> file_row("p_re_lu").variables
    (('alpha',),)
    """
    return _FILE_ROWS.get(word)


def _dense(shapes: Mapping[str, Shape]) -> Form:
    return Form("dense", array_rules(shapes, kernel="kernel", bias="bias"))


def _dense_attributes(layer: Any) -> dict[str, Any]:
    return activations.activation_attributes(layer.activation)


def _embedding(shapes: Mapping[str, Shape]) -> Form:
    return Form("embedding", (Rule(("embeddings",), ("table",)),))


def _embedding_attributes(layer: Any) -> dict[str, Any]:
    return {"padding_index": None}


def _read_reversible_embedding(layer: Any) -> list[LayerRecord]:
    (table,) = read_variables(layer, _embedding, _embedding_attributes(layer))
    cap = layer.logit_soft_cap
    activation = "linear" if cap is None else f"soft_cap({cap:g})"
    if layer.tie_weights:  # one array in two places: the head is the transposed table
        variable = {"reverse": table.arrays["embeddings"]}
        rule = Rule(("reverse",), ("kernel",), (Transpose((1, 0)),))
    else:
        variable = {"reverse_embeddings": own_variables(layer)["reverse_embeddings"]}
        rule = Rule(("reverse_embeddings",), ("kernel",))
    return [table, LayerRecord(plain_form("dense", (rule,), activation=activation), variable, "reverse")]


def _layer_norm(shapes: Mapping[str, Shape]) -> Form:
    return Form("layer_norm", array_rules(shapes, gamma="scale", beta="bias"))


def _read_layer_norm(layer: Any) -> list[LayerRecord]:
    axes, attributes = _last_axes(layer), _epsilon(layer)
    if layer.rms_scaling:
        kind = opaque_kind(layer, "rms_scaling: it divides by the deviation from the mean, and takes no mean away")
        return read_variables(layer, _layer_norm, attributes, kind)
    if axes is None:
        return read_variables(layer, _layer_norm, attributes, opaque_kind(layer, f"over axes {layer.axis}"))
    return read_variables(layer, _layer_norm, {**attributes, "axes": axes})


def _rms_norm(shapes: Mapping[str, Shape]) -> Form:
    return Form("rms_norm", array_rules(shapes, scale="scale"))


def _read_rms_norm(layer: Any) -> list[LayerRecord]:
    kind = opaque_kind(layer, f"over axes {layer.axis}") if _last_axes(layer) is None else ""
    return read_variables(layer, _rms_norm, _epsilon(layer), kind)


def _epsilon(layer: Any) -> dict[str, Any]:
    return {"epsilon": float(layer.epsilon)}


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


def _group_norm(shapes: Mapping[str, Shape]) -> Form:
    return Form("group_norm", array_rules(shapes, gamma="scale", beta="bias"))


def _batch_norm(shapes: Mapping[str, Shape]) -> Form:
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
    return Form("batch_norm", array_rules(shapes, **names))


def _prelu(shapes: Mapping[str, Shape]) -> Form:
    shape = shapes["alpha"]
    if sum(length > 1 for length in shape) > 1:
        raise ValueError(f"slopes of shape {list(shape)}")
    operations = () if len(shape) == 1 else (Reshape(shape, (math.prod(shape),)),)
    return Form("prelu", (Rule(("alpha",), ("slope",), operations),))


def _read_prelu(layer: Any) -> list[LayerRecord]:
    try:
        return read_variables(layer, _prelu, {})
    except ValueError as error:
        arrays = own_variables(layer)
        return [LayerRecord(plain_form(opaque_kind(layer, str(error)), same("alpha")), arrays)]


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


_ROWS: Final[Mapping[str, LayerRow]] = {
    "Dense": weight_layer(_dense, _dense_attributes, "kernel bias", "kernel"),
    "EinsumDense": LayerRow(einsum_dense.read_einsum_dense, (("kernel", "bias"), ("kernel",)), einsum_dense.file_forms),
    "Embedding": weight_layer(_embedding, _embedding_attributes, "embeddings"),
    "ReversibleEmbedding": LayerRow(
        _read_reversible_embedding, (("embeddings",),), lambda shapes: [_embedding(shapes)]
    ),
    "LayerNormalization": LayerRow(
        _read_layer_norm, (("gamma", "beta"), ("gamma",), ("beta",)), lambda shapes: [_layer_norm(shapes)]
    ),
    "RMSNormalization": LayerRow(_read_rms_norm, (("scale",),), lambda shapes: [_rms_norm(shapes)]),
    "GroupNormalization": weight_layer(
        _group_norm, lambda layer: {**_epsilon(layer), "groups": int(layer.groups)}, "gamma beta", "gamma", "beta"
    ),
    "BatchNormalization": weight_layer(
        _batch_norm,
        lambda layer: {**_epsilon(layer), "momentum": float(layer.momentum), "unbiased": False},
        "gamma beta moving_mean moving_variance",
        "beta moving_mean moving_variance",
        "gamma moving_mean moving_variance",
        "moving_mean moving_variance",
    ),
    "PReLU": LayerRow(_read_prelu, (("alpha",),), lambda shapes: [_prelu(shapes)]),
    **dict.fromkeys(("Activation", "ReLU", "LeakyReLU", "ELU", "Softmax"), LayerRow(activations.read_activation)),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"), LayerRow(_dropout)),
    **dict.fromkeys(("AlphaDropout", "GaussianDropout"), LayerRow(_other_dropout)),
    "Flatten": LayerRow(_flatten),
    "Reshape": LayerRow(_reshape),
    **dict.fromkeys(("UpSampling1D", "UpSampling2D", "UpSampling3D"), LayerRow(_resize)),
    **convolutions.ROWS,
    **recurrent.ROWS,
    **attention.ROWS,
}
"""Name in `keras.layers` -> its row."""
_READERS: Final = {kind: row.read for name, row in _ROWS.items() for kind in layer_classes(name)}


def _group_name(name: str) -> str:
    """Return the name that Keras gives to a layer of a class, without a number: "conv2d" for "Conv2D"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)).lower()


_FILE_ROWS: Final = {_group_name(name): row for name, row in _ROWS.items() if row.variables}
