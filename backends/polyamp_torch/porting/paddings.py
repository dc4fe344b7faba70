"""Padding in the canonical words. torch pads with numbers of each axis, of which some are what others call "same".

Called by `layers` and `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import nn

Pairs = list[list[int]]
ZERO_PADS: Final = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
"""The modules that pad; `nn.ZeroPad2d` is a subclass."""


def canonical(pairs: Pairs, kernel: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> Any:
    """The name of a padding where it has one, whatever the input's size; the numbers where it has none.

    >>> canonical([[1, 1]], [3], [1], [1]), canonical([[0, 0]], [3], [2], [1]), canonical([[1, 1]], [3], [2], [1])
    ('same', 'valid', [[1, 1]])
    """
    reach = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if not any(map(any, pairs)):
        return "valid"
    if set(strides) == {1} and pairs == [[total // 2, total - total // 2] for total in reach]:
        return "same"
    return "causal" if len(pairs) == 1 and pairs[0] == [reach[0], 0] else pairs


def of_convolution(module: Any) -> Pairs:
    """The zeros before and after each spatial axis that a convolution adds."""
    if module.padding == "same":  # torch takes it with strides of 1 alone
        totals = [step * (size - 1) for size, step in zip(module.kernel_size, module.dilation, strict=True)]
        return [[total // 2, total - total // 2] for total in totals]
    if module.padding == "valid":
        return [[0, 0] for _ in module.kernel_size]
    return [[number, number] for number in module.padding]


def of_pad(module: nn.Module, rank: int) -> Pairs | None:
    """The zeros that a module adds before another one; None if it adds none, or something else."""
    if not isinstance(module, ZERO_PADS) or module.value != 0 or len(module.padding) != 2 * rank:
        return None
    numbers = list(module.padding)  # the last axis first
    return [numbers[2 * axis : 2 * axis + 2] for axis in reversed(range(rank))]


def line(module: str, value: Any) -> str:
    """How a convolution gets a padding."""
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
