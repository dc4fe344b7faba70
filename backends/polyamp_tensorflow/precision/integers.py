"""Integers of a batch that a functional model's floating `Input` turns into floating numbers (S2).

`keras.Input(shape)` is float32 unless it is told otherwise, and Keras casts a batch of token ids to it. That is exact
up to 2**24; the cast to 16 bits that a layer's policy makes of it is not: above 2048 in float16 and 256 in bfloat16
whole numbers are rounded to others, and an embedding reads, and trains, other rows. So such a tensor is marked, and

- goes as it is into what holds an `Embedding`;
- is refused, by name, where a layer's own code makes integers of its 16-bit form again;
- is cast as any other input elsewhere: what multiplies it by weights computes in 16 bits.

An `Embedding` refuses 16-bit ids wherever they come from, if its table has more rows than they can tell apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.errors import ModelError
from polyamp.rules.plan import NARROW
from polyamp_tensorflow.arrays import dtype_name, is_floating
from polyamp_tensorflow.compat import (
    ADJUST_RANK,
    CONVERT_INPUTS,
    every_layer,
    is_kerass,
    operations_told,
)
from polyamp_tensorflow.models.layers import only_contains
from polyamp_tensorflow.precision.op_list import names
from polyamp_tensorflow.precision.stand_ins import signature_of

LARGEST: Final = {"float16": 2**11, "bfloat16": 2**8}
"""The largest whole number up to which a 16-bit dtype holds all of them."""
_INTEGERS: Final = "_polyamp_integers"
"""Mark of a floating tensor that was made of integers, and of its 16-bit form."""
_KEEPING: Final = names(
    "Identity IdentityN EnsureShape StopGradient Reshape Transpose ExpandDims Squeeze StridedSlice Slice Split SplitV "
    "Unpack Pack Concat ConcatV2 Tile Pad PadV2 GatherV2 GatherNd ReverseV2 Roll BroadcastTo Select SelectV2 Cast "
    "Maximum Minimum ClipByValue Relu Abs Neg Add AddV2 Sub Mul Round Rint Floor Ceil FloorMod FloorDiv"
)
"""Operations whose results are still such numbers, or sums and products of them."""


def holds_embedding(layer: Any) -> bool:
    """True for a layer that has an `Embedding` inside."""
    return any(isinstance(inner, keras.layers.Embedding) for inner in every_layer(layer) if inner is not layer)


def marking(function: Any) -> dict[str, Callable[..., Any]]:
    """What stands in for methods of a functional model: floating inputs that were made of integers are marked."""
    convert, adjust = (getattr(type(function), name).__get__(function) for name in (CONVERT_INPUTS, ADJUST_RANK))

    def converting(flat_inputs: Any) -> Any:
        flat_inputs = list(flat_inputs)
        return _marked(convert(flat_inputs), [_is_integers(leaf) for leaf in flat_inputs])

    def adjusting(flat_inputs: Any) -> Any:
        return _marked(adjust(flat_inputs), [hasattr(leaf, _INTEGERS) for leaf in flat_inputs])

    return {CONVERT_INPUTS: converting, ADJUST_RANK: adjusting}


def taking_integers(policy: Any, layer: Any) -> Any:
    """A layer's Keras policy, whose `convert_input` leaves a marked tensor as it is where the layer hands it on to an
    `Embedding` or to its layers, and marks the 16-bit form of it elsewhere."""
    keeps = only_contains(layer) or holds_embedding(layer)
    own = policy.convert_input

    def convert_input(x: Any, autocast: bool, dtype: Any) -> Any:
        if not hasattr(x, _INTEGERS):
            return own(x, autocast, dtype)
        if keeps:
            return x
        narrow = own(x, autocast, dtype)
        if narrow is not x:
            setattr(narrow, _INTEGERS, True)
        return narrow

    policy.convert_input = convert_input  # of this object, which is the layer's alone
    return policy


def refusing(call: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any] | None:
    """`call` of a layer that refuses 16-bit ids; None for a layer that needs none."""
    name = f"layer {path or layer.name!r} ({type(layer).__name__})"
    if isinstance(layer, keras.layers.Embedding):
        return signature_of(call, lambda inputs, *args, **kwargs: call(_checked(inputs, layer, name), *args, **kwargs))
    if only_contains(layer) or (is_kerass(type(layer)) and not isinstance(layer, keras.layers.Lambda)):
        return None

    def watching(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _is_rounded(leaf)]
        if not given:
            return call(*args, **kwargs)
        with _refused_integers(given, name, path):
            return call(*args, **kwargs)

    return signature_of(call, watching)


def _marked(tensors: Any, of_integers: list[bool]) -> Any:
    for tensor, marked in zip(tensors, of_integers, strict=False):
        if marked and isinstance(tensor, tf.Tensor) and is_floating(tensor):
            setattr(tensor, _INTEGERS, True)
    return tensors


def _is_integers(leaf: Any) -> bool:
    """True for integers that 16 bits may not hold: those of one byte are exact in both dtypes."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and tf.as_dtype(dtype).is_integer and tf.as_dtype(dtype).size > 1


def _is_rounded(leaf: Any) -> bool:
    return hasattr(leaf, _INTEGERS) and dtype_name(leaf) in NARROW


def _checked(inputs: Any, layer: Any, name: str) -> Any:
    dtype = dtype_name(inputs)
    largest = LARGEST.get(dtype)
    if largest is not None and layer.input_dim > largest + 1:
        raise ModelError(
            f"{name} gets its ids in {dtype}, in which whole numbers above {largest} are rounded to others; its table "
            f"has {layer.input_dim} rows. Give it integers: keras.Input(shape, dtype='int32'), an integer batch, or "
            f"keras.ops.cast(ids, 'int32') before the layer that runs in {dtype}; or keep that layer in float32 "
            "(overrides)."
        )
    return inputs


@contextlib.contextmanager
def _refused_integers(given: list[Any], name: str, path: str) -> Iterator[None]:
    """A block in which no operation may make integers of the given tensors.

    Raises:
        ModelError: at the end of the block; names the layer.
    """
    known = {tensor.ref() for tensor in given}
    found: list[str] = []

    def told(operation: str, inputs: Any, outputs: Any) -> None:
        if operation not in _KEEPING or not any(tf.is_tensor(one) and one.ref() in known for one in inputs):
            return
        for output in outputs:
            if is_floating(output):
                known.add(output.ref())
            elif operation == "Cast" and output.dtype.is_integer:
                found.append(output.dtype.name)

    with operations_told(told):
        yield
    if found:
        narrow = dtype_name(given[0])
        keep = f", or keep the layer in float32: Policy(..., overrides={{{path!r}: 'float32'}})" if path else ""
        raise ModelError(
            f"{name} makes {found[0]} of its input, which the policy has rounded to {narrow}: there whole numbers "
            f"above {LARGEST[narrow]} become others. The batch holds integers, and the model's Input turns them into "
            f"floating numbers. Declare it as what it is: keras.Input(shape, dtype='int32'){keep}."
        )
