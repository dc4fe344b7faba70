"""Which operations ran in which module, and in which dtype. Called by `watch`.

A `TorchFunctionMode` below polyamp's own sees calls as these leave them, casts of the float32 islands included. What
autocast casts behind that shows in the dtype of the result, which is the one that is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from polyamp.contract.report import Operation
from polyamp_torch.arrays import dtype_name
from polyamp_torch.precision.gathers import GATHERS
from polyamp_torch.precision.op_list import ENTERED, ROWS, functions, without_dispatch
from polyamp_torch.precision.products import PLAIN, PRODUCTS

_COMPUTE: Final = """
linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc multi_dot chain_matmul
scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_MOVES: Final = """
get set to float double half bfloat16 type type_as cpu cuda detach clone contiguous copy item tolist numpy view view_as
reshape reshape_as permute transpose swapaxes movedim t flatten unflatten squeeze unsqueeze expand expand_as
broadcast_to repeat tile cat concat stack hstack vstack chunk split unbind getitem setitem slice select narrow roll flip
pad zeros ones empty full zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor
tensor as_tensor arange linspace eye tril triu masked_fill where fill zero requires_grad register_hook size dim numel
stride resolve_conj resolve_neg is_contiguous diagonal as_strided data_ptr retain_grad
"""
"""What only moves data, or makes it of nothing."""


class Operations(TorchFunctionMode):
    """Notes what runs while it is `active`.

    Attributes:
        active: whether a forward pass runs.
        modules: paths of the modules that run, the innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.modules: list[str] = []
        self._found: dict[tuple[str, str, str, str], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every call of a torch function passes here."""
        kwargs = kwargs or {}
        if not self.active or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in ENTERED and all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            body = without_dispatch(func)
            with self:
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        name, rule = _named(func)
        if name:
            dtype = _dtype(result)
            if dtype is not None:
                key = (self.modules[-1] if self.modules else "", name, dtype_name(dtype), rule)
                self._found[key] = self._found.get(key, 0) + 1
        return result

    @property
    def rows(self) -> list[Operation]:
        """What was seen, in the order in which it was seen first."""
        return [Operation(*key, count=count) for key, count in self._found.items()]


@functools.lru_cache(maxsize=4096)
def _named(func: Callable[..., Any]) -> tuple[str, str]:
    """The name of a function and the family that polyamp's list has it in; no name of what is not told."""
    name = str(getattr(func, "__name__", "")).partition(".")[0].strip("_")
    if not name or name in _words(_MOVES):
        return "", ""
    family = _families().get(func)
    if family is None:
        family = "compute" if name in _words(_COMPUTE) else ""
    return name, family


@functools.cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@functools.cache
def _families() -> Mapping[Any, str]:
    return {
        **{function: row.family for row in ROWS for _, function in functions(row)},
        **dict.fromkeys((*PRODUCTS, *PLAIN), "compute"),
        **dict.fromkeys(GATHERS, "gather"),
    }


def _dtype(result: Any) -> torch.dtype | None:
    """The dtype of the first floating tensor of a result."""
    if isinstance(result, torch.Tensor):
        return result.dtype if result.is_floating_point() else None
    if isinstance(result, list | tuple):
        return next((found for each in result if (found := _dtype(each)) is not None), None)
    return None
