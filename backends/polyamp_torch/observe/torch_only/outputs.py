"""Selection of the observed tensor in a module's output, and its values on the host."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from polyamp_torch.compat import without_function_modes

Array = np.ndarray[Any, Any]


def output_tensor(module: nn.Module, output: Any) -> torch.Tensor | None:
    """Return the first floating tensor of an output that is not a scalar, else the first floating one, or None. Of a
    recurrent or attention layer that is the sequence; a dataclass (transformers' `ModelOutput`) is read in the order of
    its fields."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        output = output[0]
    found = [tensor for tensor in _flat_tensors(output) if tensor.is_floating_point() and tensor.numel()]
    return next((tensor for tensor in found if tensor.dim()), found[0] if found else None)


def host_array(tensor: torch.Tensor, *, copy: bool = True) -> Array:
    """Return the values on the host, as float64 for a float64 tensor, else as float32.

    Args:
        tensor: the tensor.
        copy: False if no other code will write to the tensor: the result may then share its memory.
    """
    with without_function_modes():
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        values: Array = tensor.detach().to("cpu", dtype, copy=copy).resolve_conj().resolve_neg().numpy()
    return values


def array_digest(values: Array) -> bytes:
    """Return a digest that distinguishes the results of two calls."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


def _flat_tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree.to_dense() if tree.is_sparse else tree
    elif isinstance(tree, nn.utils.rnn.PackedSequence):
        yield tree.data
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _flat_tensors(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat_tensors(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _flat_tensors(getattr(tree, field.name, None))
