"""Conversion of torch paddings to canonical names. torch pads by numbers for each axis; some of these equal "same"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

PaddingPairs = list[list[int]]
ZERO_PADDINGS: Final = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
"""Modules that pad with a constant; `nn.ZeroPad2d` is a subclass."""


def canonical_padding(
    pairs: PaddingPairs, kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> Any:
    """Return the padding's name if it is valid for every input size, else its numbers.

    >>> canonical_padding([[1, 1]], [3], [1], [1]), canonical_padding([[0, 0]], [3], [2], [1])
    ('same', 'valid')
    >>> canonical_padding([[1, 1]], [3], [2], [1])
    [[1, 1]]
    """
    reach = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if not any(map(any, pairs)):
        return "valid"
    if set(strides) == {1} and pairs == [[total // 2, total - total // 2] for total in reach]:
        return "same"
    return "causal" if len(pairs) == 1 and pairs[0] == [reach[0], 0] else pairs


def convolution_padding(module: Any) -> PaddingPairs:
    """Return the zeros that a convolution adds before and after each spatial axis."""
    if module.padding == "same":  # torch accepts it only with strides of 1
        totals = [step * (size - 1) for size, step in zip(module.kernel_size, module.dilation, strict=True)]
        return [[total // 2, total - total // 2] for total in totals]
    if module.padding == "valid":
        return [[0, 0] for _ in module.kernel_size]
    return [[number, number] for number in module.padding]


def pad_module_padding(module: nn.Module, rank: int) -> PaddingPairs | None:
    """Return the zeros that a padding module adds; None if the module adds none, or other values."""
    if not isinstance(module, ZERO_PADDINGS) or module.value != 0 or len(module.padding) != 2 * rank:
        return None
    numbers = list(module.padding)  # the last axis first
    return [numbers[2 * axis : 2 * axis + 2] for axis in reversed(range(rank))]


def padding_line(module: str, value: Any) -> str:
    """Return the line of code that sets a convolution's padding."""
    if value == "valid":
        return f"{module}.padding = 0  # on each axis, as a tuple"
    if value == "same":
        return f'{module}.padding = "same"  # with strides: F.pad of its input, the odd zero behind'
    if value == "causal":
        return f"{module} = torch.nn.Sequential(torch.nn.ZeroPad1d((reach, 0)), {module})  # reach: kernel - 1, dilated"
    if all(before == after for before, after in value):
        return f"{module}.padding = {tuple(before for before, _ in value)}"
    flat = tuple(number for pair in reversed(value) for number in pair)
    return f"{module} = torch.nn.Sequential(torch.nn.ZeroPad{len(value)}d({flat}), {module})"
