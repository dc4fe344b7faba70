"""Copies of a model's tensors that share memory as the tensors do. Called by `working`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp_torch.arrays import dtype_name


class _Span(NamedTuple):
    """The part of a storage that a tensor reaches over, in elements of its dtype."""

    begin: int
    end: int
    tensor: torch.Tensor


def copied_tensors(model: nn.Module, *, wide: bool) -> dict[int, Any]:
    """Id of each tensor of the model's modules -> its copy, as `copy.deepcopy` takes it for its memo.

    Args:
        model: the model.
        wide: floating ones in float64.

    Raises:
        UnsupportedError: `wide`, and a tensor is of a kind that has no float64.
    """
    memo: dict[int, Any] = {}
    spans: dict[Any, list[_Span]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors_of(model)}.values():
        if _plain(tensor):
            begin = int(tensor.storage_offset())
            place = (tensor.device, tensor.untyped_storage().data_ptr() or id(tensor), tensor.dtype)
            spans.setdefault(place, []).append(_Span(begin, begin + _reach(tensor), tensor))
        elif wide and tensor.is_floating_point():
            raise UnsupportedError(
                f"a tensor of kind {type(tensor).__name__}, layout {tensor.layout} and dtype "
                f"{dtype_name(tensor.dtype)} has no float64, so that the model has no run in it to judge by."
            )
    for group in spans.values():
        for together in _touching(group):
            _copy(together, memo, wide=wide)
    return memo


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes of modules; some of them twice."""
    yield from model.parameters()
    yield from model.buffers()
    for part in model.modules():
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it is strided numbers in memory, and of torch's own classes."""
    own = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return own and tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _reach(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _touching(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Spans that overlap or lie side by side: an RNN's weights stay one chunk, as cuDNN wants them."""
    group: list[_Span] = []
    end = -1
    for span in sorted(spans, key=lambda each: each[:2]):
        if group and span.begin > end:
            yield group
            group = []
        group.append(span)
        end = max(end, span.end) if len(group) > 1 else span.end
    if group:
        yield group


def _copy(together: list[_Span], memo: dict[int, Any], *, wide: bool) -> None:
    """Copies of tensors that lie in one piece of memory, in one piece of memory."""
    first = together[0].tensor
    begin, end = together[0].begin, max(span.end for span in together)
    with torch.inference_mode(False), torch.no_grad():
        memory = first.detach().as_strided((end - begin,), (1,), begin)
        floating = first.is_floating_point() or first.is_complex()
        dtype = (torch.complex128 if first.is_complex() else torch.float64) if wide and floating else first.dtype
        memory = torch.empty_like(memory, dtype=dtype).copy_(memory)
        for span in together:
            shape, strides = span.tensor.shape, span.tensor.stride()
            _dress(memory.as_strided(shape, strides, span.begin - begin), span.tensor, memo)


def _dress(values: torch.Tensor, tensor: torch.Tensor, memo: dict[int, Any]) -> None:
    """Have the values be the copy of a tensor: with its class, its attributes, and trained if it is."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, tensor.requires_grad)
    elif tensor.requires_grad and tensor.is_leaf:
        values.requires_grad_()
    memo[id(tensor)] = values
    vars(values).update(copy.deepcopy(vars(tensor), memo))
