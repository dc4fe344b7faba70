"""Snapshot of the attributes of a model's modules, other than parameters and buffers, restored after a pass.

`value_and_grad` itself restores buffers and gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from polyamp_torch.compat import tensor_version
from polyamp_torch.porting.inventory import tensor_attributes, wrapper_attribute

_MODULE_ATTRIBUTES: Final = frozenset(vars(nn.Module()))
"""Attributes of every module. Its parameters, buffers and hooks are preserved elsewhere."""


@contextlib.contextmanager
def preserve_attributes(model: nn.Module) -> Iterator[None]:
    """Context manager that restores the attributes of modules on exit: reassigned ones, the contents of lists, dicts
    and sets, and the values of tensors. It skips wrappers, whose attributes affect no result."""
    kept = [_AttributeSnapshot(part) for part in model.modules() if wrapper_attribute(part) is None]
    try:
        yield
    finally:
        for each in kept:
            each.restore()


class _AttributeSnapshot:
    """Snapshot of the attributes of one module."""

    def __init__(self, part: nn.Module) -> None:
        self.slots = vars(part)
        self.values = {
            name: value for name, value in self.slots.items() if name not in _MODULE_ATTRIBUTES or name == "training"
        }
        self.inside = [(value, value.copy()) for value in self.values.values() if type(value) in (list, dict, set)]
        self.tensors = [
            (value, _version(value), value.detach().clone())
            for value in tensor_attributes(part).values()
            if value.is_leaf and not value.is_sparse
        ]

    def restore(self) -> None:
        for name in [name for name in self.slots if name not in _MODULE_ATTRIBUTES and name not in self.values]:
            del self.slots[name]
        self.slots.update((name, value) for name, value in self.values.items() if self.slots.get(name) is not value)
        for value, before in self.inside:
            _refill(value, before)
        with torch.no_grad():
            for tensor, version, copy in self.tensors:
                if _version(tensor) != version:
                    tensor.detach().copy_(copy)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor_version(tensor)


def _refill(value: Any, before: Any) -> None:
    if len(value) == len(before) and all(
        one is other for one, other in zip(_items(value), _items(before), strict=True)
    ):
        return
    value.clear()
    value.extend(before) if isinstance(value, list) else value.update(before)


def _items(value: Any) -> Iterator[Any]:
    yield from value
    if isinstance(value, dict):
        yield from value.values()
