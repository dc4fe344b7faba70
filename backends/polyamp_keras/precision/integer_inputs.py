"""Handling of integer batches that a functional model's floating `Input` casts to floating numbers (S2).

`keras.Input(shape)` is float32 by default, and Keras casts a batch of token ids to it. That is exact up to 2**24. The
following cast to 16 bits by a layer's policy is not: above 2048 in float16 and 256 in bfloat16, integers are rounded to
others, and an embedding reads and trains the wrong rows. So such a tensor is marked, and

- is passed unchanged to a layer that contains an `Embedding`;
- raises an error that names the layer whose own code converts its 16-bit form to integers;
- is cast like any other input elsewhere, since products with weights compute in 16 bits.

An `Embedding` refuses any 16-bit ids if its table has more rows than they can distinguish.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras

from polyamp.errors import ModelError
from polyamp.float_formats import FORMATS, HALF_DTYPES
from polyamp_keras.arrays import dtype_name, is_floating
from polyamp_keras.compat import (
    ADJUST_RANK,
    CONVERT_INPUTS,
    flatten_layers,
    get_tensor_attribute,
    is_keras_code,
    set_tensor_attribute,
)
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import is_container
from polyamp_keras.precision.layer_method_wrappers import copy_signature

LARGEST_EXACT_INTEGER: Final = {name: 2 ** (FORMATS[name].fraction_bits + 1) for name in HALF_DTYPES}
"""Largest integer up to which a 16-bit dtype represents all integers."""
_INTEGER_MARK: Final = "_polyamp_integers"
"""Attribute that marks a floating tensor cast from integers, and its 16-bit form."""
_WIDE_INTEGERS: Final = ("int16", "int32", "int64", "uint16", "uint32", "uint64")


def has_embedding(layer: Any) -> bool:
    """Return whether a layer contains an `Embedding`."""
    return any(isinstance(inner, keras.layers.Embedding) for inner in flatten_layers(layer) if inner is not layer)


def mark_integer_inputs(function: Any) -> dict[str, Callable[..., Any]]:
    """Return replacements of a functional model's methods that mark floating inputs cast from integers."""
    convert, adjust = (getattr(type(function), name).__get__(function) for name in (CONVERT_INPUTS, ADJUST_RANK))

    def convert_and_mark(flat_inputs: Any) -> Any:
        flat_inputs = list(flat_inputs)
        return _mark_tensors(convert(flat_inputs), [_is_integers(leaf) for leaf in flat_inputs])

    def adjust_and_mark(flat_inputs: Any) -> Any:
        return _mark_tensors(adjust(flat_inputs), [_is_marked(leaf) for leaf in flat_inputs])

    return {CONVERT_INPUTS: convert_and_mark, ADJUST_RANK: adjust_and_mark}


def integer_input_policy(policy: Any, layer: Any) -> Any:
    """Change `convert_input` of a layer's Keras policy: a marked tensor stays unchanged if the layer contains an
    `Embedding` or only calls its layers; otherwise its 16-bit form is marked."""
    keeps = is_container(layer) or has_embedding(layer)
    own = policy.convert_input

    def convert_input(x: Any, autocast: bool, dtype: Any) -> Any:
        if not _is_marked(x):
            return own(x, autocast, dtype)
        if keeps:
            return x
        narrow = own(x, autocast, dtype)
        if narrow is not x:
            set_tensor_attribute(narrow, _INTEGER_MARK, True)
        return narrow

    policy.convert_input = convert_input  # of this object, which only this layer uses
    return policy


def refuse_narrow_ids(call: Callable[..., Any], layer: Any, path: str) -> Callable[..., Any] | None:
    """Return `call` of a layer, wrapped to refuse 16-bit ids; None for a layer that needs no check."""
    name = f"layer {path or layer.name!r} ({type(layer).__name__})"
    if isinstance(layer, keras.layers.Embedding):
        return copy_signature(
            call, lambda inputs, *args, **kwargs: call(_check_ids(inputs, layer, name), *args, **kwargs)
        )
    if is_container(layer) or (is_keras_code(type(layer)) and not isinstance(layer, keras.layers.Lambda)):
        return None

    def checked_call(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _is_rounded(leaf)]
        if not given:
            return call(*args, **kwargs)
        with _forbid_integer_casts(given, name, path):
            return call(*args, **kwargs)

    return copy_signature(call, checked_call)


def _mark_tensors(tensors: Any, of_integers: list[bool]) -> Any:
    for tensor, marked in zip(tensors, of_integers, strict=False):
        if marked and ENGINE.is_tensor(tensor) and is_floating(tensor):
            set_tensor_attribute(tensor, _INTEGER_MARK, True)
    return tensors


def _is_integers(leaf: Any) -> bool:
    """Return whether a leaf has integers that 16 bits may round; one-byte integers are exact in both dtypes."""
    return hasattr(leaf, "dtype") and dtype_name(leaf) in _WIDE_INTEGERS


def _is_marked(leaf: Any) -> bool:
    return get_tensor_attribute(leaf, _INTEGER_MARK) is not None


def _is_rounded(leaf: Any) -> bool:
    return _is_marked(leaf) and dtype_name(leaf) in HALF_DTYPES


def _check_ids(inputs: Any, layer: Any, name: str) -> Any:
    dtype = dtype_name(inputs)
    largest = LARGEST_EXACT_INTEGER.get(dtype)
    if largest is not None and layer.input_dim > largest + 1:
        raise ModelError(
            f"{name} gets its ids in {dtype}, in which whole numbers above {largest} are rounded to others; its table "
            f"has {layer.input_dim} rows. Give it integers: keras.Input(shape, dtype='int32'), an integer batch, or "
            f"keras.ops.cast(ids, 'int32') before the layer that runs in {dtype}; or keep that layer in float32 "
            "(overrides)."
        )
    return inputs


@contextlib.contextmanager
def _forbid_integer_casts(given: list[Any], name: str, path: str) -> Iterator[None]:
    """Context manager in which no operation may convert the given tensors to integers.

    Raises:
        ModelError: at the end of the block; names the layer.
    """
    with ENGINE.integer_casts(given) as found:
        yield
    if found:
        narrow = dtype_name(given[0])
        keep = f", or keep the layer in float32: Policy(..., overrides={{{path!r}: 'float32'}})" if path else ""
        raise ModelError(
            f"{name} makes {found[0]} of its input, which the policy has rounded to {narrow}: there whole numbers "
            f"above {LARGEST_EXACT_INTEGER[narrow]} become others. The batch holds integers, and the model's Input "
            f"turns them into floating numbers. Declare it as what it is: keras.Input(shape, dtype='int32'){keep}."
        )
