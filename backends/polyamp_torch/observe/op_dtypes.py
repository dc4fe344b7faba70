"""`OpDtypeRecorder`: records which operations ran in which module, and in which dtype.

It is a `TorchFunctionMode` below polyamp's own modes, so it sees calls after the casts of the float32 islands. Casts
that autocast makes later are visible in the dtype of the result, which is the recorded one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from polyamp.contract.casting_report import OperationCount
from polyamp_torch.arrays import dtype_name
from polyamp_torch.precision.op_list import (
    FUNCTIONS_WITHOUT_DISPATCH,
    TORCH_OP_FAMILIES,
    copy_without_dispatch,
    family_functions,
)
from polyamp_torch.precision.torch_only.float32_gathers import GATHER_FUNCTIONS
from polyamp_torch.precision.torch_only.op_rules_mode import RUNNING_RULE
from polyamp_torch.precision.torch_only.product_classification import PLAIN_MATMULS, PRODUCT_CLASSIFIERS

_COMPUTE: Final = """
linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc multi_dot chain_matmul
scaled_dot_product_attention lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
"""
_DATA_MOVEMENT: Final = """
get set to float double half bfloat16 type type_as cpu cuda detach clone contiguous copy item tolist numpy view view_as
reshape reshape_as permute transpose swapaxes movedim t flatten unflatten squeeze unsqueeze expand expand_as
broadcast_to repeat tile cat concat stack hstack vstack chunk split unbind getitem setitem slice select narrow roll flip
pad zeros ones empty full zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor
tensor as_tensor arange linspace eye tril triu masked_fill where fill zero requires_grad register_hook size dim numel
stride resolve_conj resolve_neg is_contiguous diagonal as_strided data_ptr retain_grad
"""
"""Functions that only move or create data."""
_FLOAT8_PRODUCTS: Final = frozenset({"matmul", "scaled_mm"})
"""Functions that multiply the 8-bit numbers, emulated and not."""


class OpDtypeRecorder(TorchFunctionMode):
    """Mode that records operations while it is `active`.

    Attributes:
        active: whether a forward pass is running.
        modules: paths of the running modules, innermost last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = False
        self.modules: list[str] = []
        self._found: dict[tuple[str, str, str, str], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function and record it."""
        kwargs = kwargs or {}
        if not self.active or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in FUNCTIONS_WITHOUT_DISPATCH and all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            body = copy_without_dispatch(func)
            with self:
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        name, rule = _name_and_rule(func)
        if RUNNING_RULE.word == "float8" and name not in _FLOAT8_PRODUCTS:
            return result  # a product in 8 bits counts as one operation
        if name:
            dtype = _result_dtype(result)
            if RUNNING_RULE.word == "float8":  # an emulated one is float32 until it is rounded (S36)
                dtype = torch.get_autocast_dtype(result.device.type)
            if dtype is not None:
                key = (self.modules[-1] if self.modules else "", name, dtype_name(dtype), rule)
                self._found[key] = self._found.get(key, 0) + 1
        return result

    @property
    def rows(self) -> list[OperationCount]:
        """The recorded operations, in the order of their first call."""
        return [OperationCount(*key, count=count) for key, count in self._found.items()]


@functools.lru_cache(maxsize=4096)
def _name_and_rule(func: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's name and its family in polyamp's list; the name is empty if it is not recorded."""
    name = str(getattr(func, "__name__", "")).partition(".")[0].strip("_")
    if not name or name in _split_words(_DATA_MOVEMENT):
        return "", ""
    family = _family_by_function().get(func)
    if family is None:
        family = "compute" if name in _split_words(_COMPUTE) else ""
    return name, family


@functools.cache
def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@functools.cache
def _family_by_function() -> Mapping[Any, str]:
    return {
        **{function: row.family for row in TORCH_OP_FAMILIES for _, function in family_functions(row)},
        **dict.fromkeys((*PRODUCT_CLASSIFIERS, *PLAIN_MATMULS), "compute"),
        **dict.fromkeys(GATHER_FUNCTIONS, "gather"),
    }


def _result_dtype(result: Any) -> torch.dtype | None:
    """Return the dtype of the first floating tensor of a result, or None."""
    if isinstance(result, torch.Tensor):
        return result.dtype if result.is_floating_point() else None
    if isinstance(result, list | tuple):
        return next((found for each in result if (found := _result_dtype(each)) is not None), None)
    return None
