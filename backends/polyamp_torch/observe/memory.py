"""Copies of a model's tensors that share memory as the tensors do. Called by `working`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from polyamp.errors import ModelError, UnsupportedError
from polyamp_torch.arrays import dtype_name
from polyamp_torch.compat import hooks_behind_gradient, hooks_of


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
        ModelError: two tensors of different dtypes share memory.
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
    together = {place: list(_touching(group)) for place, group in spans.items()}
    _check_one_dtype(together)
    for groups in together.values():
        for group in groups:
            _copy(group, memo, wide=wide)
    for tensor in list(tensors_of(model)):
        if id(tensor) in memo:
            _dress(memo[id(tensor)], tensor, memo)
    return memo


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that are plain attributes of modules; some of them twice."""
    yield from model.parameters()
    yield from model.buffers()
    for part in model.modules():
        yield from attributes_of(part).values()


def attributes_of(part: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that are plain attributes of a module."""
    return {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)}


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it is strided numbers in memory, and of torch's own classes."""
    own = type(tensor) in (torch.Tensor, nn.Parameter)
    return own and tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _reach(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _touching(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Spans that overlap or lie side by side: an RNN's weights stay one chunk, as cuDNN wants them."""
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
    """Refuse tensors that see one memory in two dtypes: their copies would be two memories."""
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


def _copy(together: list[_Span], memo: dict[int, Any], *, wide: bool) -> None:
    """Copies of tensors that lie in one piece of memory, in one piece of memory."""
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


def _dress(values: torch.Tensor, tensor: torch.Tensor, memo: dict[int, Any]) -> None:
    """Give a copy what else hangs on its tensor: attributes of Python's, and hooks on its gradient."""
    if vars(values) or hooks_of(values):  # it is there twice, under two names
        return
    vars(values).update(copy.deepcopy(vars(tensor), memo))
    if not tensor.is_leaf:
        return
    for hook in (hooks_of(tensor) or {}).values():
        values.register_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]  # torch's
    for hook in (hooks_behind_gradient(tensor) or {}).values():
        values.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]  # torch's
