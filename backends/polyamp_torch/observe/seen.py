"""What is looked at in what a module gave. Called by `watch`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, Any]


def tensor_of(module: nn.Module, output: Any) -> torch.Tensor | None:
    """The first floating tensor of an output that is no scalar, else the first; of a recurrent layer or an attention
    the sequence, of a dataclass (transformers' `ModelOutput`) in the order of its fields. None if there is none."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        output = output[0]
    found = [tensor for tensor in _flat(output) if tensor.is_floating_point() and tensor.numel()]
    return next((tensor for tensor in found if tensor.dim()), found[0] if found else None)


def array_of(tensor: torch.Tensor, *, copy: bool = True) -> Array:
    """The values on the host, float32 or, where that would lose digits, float64.

    Args:
        tensor: the tensor.
        copy: False where nobody else will write to it: then it may be its own memory.
    """
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    values: Array = tensor.detach().to("cpu", dtype, copy=copy).resolve_conj().resolve_neg().numpy()
    return values


def digest(values: Array) -> bytes:
    """What tells the results of two calls apart."""
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()


def _flat(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree.to_dense() if tree.is_sparse else tree
    elif isinstance(tree, nn.utils.rnn.PackedSequence):
        yield tree.data
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _flat(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _flat(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _flat(getattr(tree, field.name, None))
