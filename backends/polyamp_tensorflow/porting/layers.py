"""Keras's layers as canonical ones: dense, embeddings, normalisations, and those without arrays.

`walk` calls `parts_of`, which also looks into the tables of `convolutions`, `recurrent` and `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from polyamp.porting.layouts.forms import Rule, same
from polyamp.porting.layouts.operations import Reshape, Transpose
from polyamp_tensorflow.compat import built_with, layers_named
from polyamp_tensorflow.porting import activations, attention, convolutions, einsum, recurrent
from polyamp_tensorflow.porting.parts import Part, Reader, form, only, own, present


def parts_of(layer: Any) -> list[Part] | None:
    """The canonical layers that a Keras layer is; None of a class that the tables do not have: a container, or a
    user's own layer.

    A subclass is what its nearest base class in the tables is.
    """
    for kind in type(layer).__mro__:
        reader = _READERS.get(kind)
        if reader is not None:
            return reader(layer)
    return None


def _dense(layer: Any) -> list[Part]:
    arrays = own(layer)
    rules = present(same("kernel", "bias"), arrays)
    return [Part(form("dense", rules, **activations.said_of(layer.activation)), arrays)]


def _embedding(layer: Any) -> list[Part]:
    arrays = own(layer)
    table = Part(form("embedding", (Rule(("embeddings",), ("table",)),), padding_index=None), arrays)
    if not isinstance(layer, _REVERSIBLE):
        return [table]
    cap = layer.logit_soft_cap
    activation = "linear" if cap is None else f"soft_cap({cap:g})"
    if layer.tie_weights:  # one array in two places: a head that is the table the other way round
        rule = Rule(("reverse",), ("kernel",), (Transpose((1, 0)),))
        return [
            table,
            Part(form("dense", (rule,), activation=activation), {"reverse": arrays["embeddings"]}, "reverse"),
        ]
    names = {name: variable for name, variable in arrays.items() if name != "reverse_embeddings"}
    head = Rule(("reverse_embeddings",), ("kernel",))
    reverse = {"reverse_embeddings": arrays["reverse_embeddings"]}
    return [table._replace(arrays=names), Part(form("dense", (head,), activation=activation), reverse, "reverse")]


def _layer_norm(layer: Any) -> list[Part]:
    arrays = own(layer)
    rules = present((Rule(("gamma",), ("scale",)), Rule(("beta",), ("bias",))), arrays)
    axes = _last_axes(layer)
    if layer.rms_scaling:
        kind = only(layer, "rms_scaling: it divides by the deviation from the mean, and takes no mean away")
        return [Part(form(kind, rules, epsilon=float(layer.epsilon)), arrays)]
    if axes is None:
        return [Part(form(only(layer, f"over axes {layer.axis}"), rules, epsilon=float(layer.epsilon)), arrays)]
    return [Part(form("layer_norm", rules, epsilon=float(layer.epsilon), axes=axes), arrays)]


def _rms_norm(layer: Any) -> list[Part]:
    arrays = own(layer)
    axes = _last_axes(layer)
    kind = "rms_norm" if axes is not None else only(layer, f"over axes {layer.axis}")
    return [Part(form(kind, same("scale"), epsilon=float(layer.epsilon)), arrays)]


def _last_axes(layer: Any) -> int | None:
    """Over how many last axes a norm is; None where it is over others. One over the channels of what has them first
    counts as over the last one: the canonical layout has them there."""
    axes = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    rank = len(built_with(layer) or ())
    if len(axes) == 1 and (axes[0] == -1 or not rank or axes[0] % rank in (rank - 1, 1)):
        return 1
    if not rank:
        return len(axes) if list(axes) == list(range(-len(axes), 0)) else None
    return len(axes) if sorted(axis % rank for axis in axes) == list(range(rank - len(axes), rank)) else None


def _group_norm(layer: Any) -> list[Part]:
    arrays = own(layer)
    rules = present((Rule(("gamma",), ("scale",)), Rule(("beta",), ("bias",))), arrays)
    return [Part(form("group_norm", rules, epsilon=float(layer.epsilon), groups=int(layer.groups)), arrays)]


def _batch_norm(layer: Any) -> list[Part]:
    arrays = own(layer)
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "variance"}
    rules = present(tuple(Rule((native,), (canonical,)) for native, canonical in names.items()), arrays)
    said = {"epsilon": float(layer.epsilon), "momentum": float(layer.momentum), "unbiased": False}
    return [Part(form("batch_norm", rules, **said), {name: arrays[name] for name in names if name in arrays})]


def _prelu(layer: Any) -> list[Part]:
    arrays = own(layer)
    shape = tuple(arrays["alpha"].shape)
    if sum(length > 1 for length in shape) > 1:
        return [Part(form(only(layer, f"slopes of shape {list(shape)}"), same("alpha")), arrays)]
    operations = () if len(shape) == 1 else (Reshape(shape, (math.prod(shape),)),)
    return [Part(form("prelu", (Rule(("alpha",), ("slope",), operations),)), arrays)]


def _dropout(layer: Any) -> list[Part]:
    return [Part(form("dropout", (), rate=float(layer.rate)))]


def _other_dropout(layer: Any) -> list[Part]:
    return [Part(form(only(layer, "what it drops is not zero"), (), rate=float(layer.rate)))]


def _flatten(layer: Any) -> list[Part]:
    # Told of channels that are first, Keras puts them last before it flattens. `walk` says "first" where the model's
    # convolutions have them there and the flatten was not told.
    return [Part(form("flatten", (), channels="last"))]


def _reshape(layer: Any) -> list[Part]:
    return _flatten(layer) if len(layer.target_shape) == 1 else []


def _resize(layer: Any) -> list[Part]:
    size = layer.size if isinstance(layer.size, list | tuple) else (layer.size,)
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(word := getattr(layer, "interpolation", "nearest"), word)
    return [Part(form("resize", (), method=method, size=[int(factor) for factor in size], align_corners=False))]


_REVERSIBLE: Final = layers_named("ReversibleEmbedding")
_TABLE: Final[Mapping[str, Reader]] = {
    "Dense": _dense,
    "EinsumDense": einsum.parts_of,
    "Embedding": _embedding,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "BatchNormalization": _batch_norm,
    "PReLU": _prelu,
    **dict.fromkeys(("Activation", "ReLU", "LeakyReLU", "ELU", "Softmax"), activations.parts_of),
    **dict.fromkeys(("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"), _dropout),
    **dict.fromkeys(("AlphaDropout", "GaussianDropout"), _other_dropout),
    "Flatten": _flatten,
    "Reshape": _reshape,
    **dict.fromkeys(("UpSampling1D", "UpSampling2D", "UpSampling3D"), _resize),
    **convolutions.TABLE,
    **recurrent.TABLE,
    **attention.TABLE,
}
_READERS: Final[dict[type, Reader]] = {kind: reader for name, reader in _TABLE.items() for kind in layers_named(name)}
