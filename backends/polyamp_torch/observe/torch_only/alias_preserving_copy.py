"""Copies of a model's tensors that share memory with each other as the originals do."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp.errors import ModelError, UnsupportedError
from polyamp_torch.arrays import dtype_name, memory_address
from polyamp_torch.compat import backward_hooks, post_accumulate_grad_hooks
from polyamp_torch.porting.inventory import module_tensors


class _Span(NamedTuple):
    """Range of a storage that a tensor covers, in elements of its dtype."""

    begin: int
    end: int
    tensor: torch.Tensor


def copy_tensors(model: nn.Module, *, wide: bool) -> dict[int, Any]:
    """Return the id of each tensor of the model's modules -> its copy, as a memo for `copy.deepcopy`.

    Args:
        model: the model.
        wide: copy floating tensors to float64.

    Raises:
        UnsupportedError: `wide`, and a tensor is of a kind without float64.
        ModelError: two tensors of different dtypes share memory.
    """
    memo: dict[int, Any] = {}
    spans: dict[Any, list[_Span]] = {}
    for tensor in {id(tensor): tensor for tensor in module_tensors(model)}.values():
        if _is_plain(tensor):
            begin = int(tensor.storage_offset())
            place = (tensor.device, memory_address(tensor), tensor.dtype)
            spans.setdefault(place, []).append(_Span(begin, begin + _extent(tensor), tensor))
        elif wide and tensor.is_floating_point():
            raise UnsupportedError(
                f"a tensor of kind {type(tensor).__name__}, layout {tensor.layout} and dtype "
                f"{dtype_name(tensor.dtype)} has no float64, so that the model has no run in it to judge by."
            )
    together = {place: list(_adjacent_groups(group)) for place, group in spans.items()}
    _check_one_dtype(together)
    for groups in together.values():
        for group in groups:
            _copy_group(group, memo, wide=wide)
    for tensor in list(module_tensors(model)):
        if id(tensor) in memo:
            _copy_hooks(memo[id(tensor)], tensor, memo)
    return memo


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided, in memory, and of one of torch's own classes."""
    own = type(tensor) in (torch.Tensor, nn.Parameter)
    return own and tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _adjacent_groups(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Yield groups of overlapping or adjacent spans: an RNN's weights stay one chunk, as cuDNN requires."""
    group: list[_Span] = []
    end = 0
    for span in sorted(spans, key=lambda each: each[:2]):
        if group and span.begin > end:
            yield group
            group, end = [], 0
        group.append(span)
        end = max(end, span.end)
    if group:
        yield group


def _check_one_dtype(together: dict[Any, list[list[_Span]]]) -> None:
    """Reject tensors that share memory in two dtypes: their copies would not share memory."""
    seen: dict[Any, list[tuple[int, int, torch.dtype]]] = {}
    for (device, storage, dtype), groups in together.items():
        for group in groups:
            size = dtype.itemsize
            begin, end = group[0].begin * size, max(span.end for span in group) * size
            for other_begin, other_end, other in seen.get((device, storage), ()):
                if other is not dtype and begin < other_end and other_begin < end:
                    raise ModelError(
                        f"two tensors of the model are one memory in {dtype_name(other)} and in {dtype_name(dtype)}, "
                        "which no copy of the model keeps together."
                    )
            seen.setdefault((device, storage), []).append((begin, end, dtype))


def _copy_group(together: list[_Span], memo: dict[int, Any], *, wide: bool) -> None:
    """Copy tensors of one contiguous range of memory into one contiguous range."""
    first = together[0].tensor
    begin, end = together[0].begin, max(span.end for span in together)
    with torch.inference_mode(False), torch.no_grad():
        memory = first.detach().as_strided((end - begin,), (1,), begin)
        dtype = first.dtype
        if wide and (first.is_floating_point() or first.is_complex()):
            dtype = torch.complex128 if first.is_complex() else torch.float64
        memory = torch.empty_like(memory, dtype=dtype).copy_(memory)
        for span in together:
            tensor = span.tensor
            values = memory.as_strided(tensor.shape, tensor.stride(), span.begin - begin)
            if tensor.is_conj():
                values = values.conj()
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, tensor.requires_grad)
            elif tensor.requires_grad and tensor.is_leaf:
                values.requires_grad_()
            memo[id(tensor)] = values


def _copy_hooks(values: torch.Tensor, tensor: torch.Tensor, memo: dict[int, Any]) -> None:
    """Copy the Python attributes of a tensor and the hooks on its gradient to its copy."""
    if vars(values) or backward_hooks(values):  # the tensor has two names and is visited twice
        return
    vars(values).update(copy.deepcopy(vars(tensor), memo))
    if not tensor.is_leaf:
        return
    for hook in (backward_hooks(tensor) or {}).values():
        values.register_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]  # torch's
    for hook in (post_accumulate_grad_hooks(tensor) or {}).values():
        values.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]  # torch's
