"""Copy of a model that can be trained without changing the model.

`copy.deepcopy` copies most of it. This module adds what it rejects or loses: tensors (`tensor_copies`), results of
`torch.compile`, and functions that close over parts of the model (`closure_rebinding`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polyamp.errors import ModelError, PolyampError, describe_value
from polyamp_torch.compat import (
    compile_in_place,
    compiled_call_of_module,
    compiler_like,
    ddp_comm_hooks,
    is_compiled,
    uncompiled_module,
)
from polyamp_torch.observe.torch_only.closure_rebinding import rebind_closures
from polyamp_torch.observe.torch_only.tensor_copies import copy_tensors
from polyamp_torch.porting.inventory import short_paths


@contextlib.contextmanager
def model_copy(model: Any, *, wide: bool, inference: bool) -> Iterator[nn.Module]:
    """Context manager that yields a deep copy of a model, on its devices (`Observer.model_copy`). With `wide`, the
    default dtype inside is float64.

    Raises:
        ModelError: the model cannot be copied.
        UnsupportedError: `wide`, and the model has tensors of a kind without float64.
    """
    twin = copy_model(model, wide=wide)
    before = torch.get_default_dtype()
    try:
        if wide:
            torch.set_default_dtype(torch.float64)
        yield twin.eval() if inference else twin
    finally:
        torch.set_default_dtype(before)


def copy_model(model: Any, *, wide: bool = False) -> nn.Module:
    """Return a copy of a model: values, modes, hooks and wrappers; with `wide`, floating tensors are float64.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> twin = copy_model(model, wide=True)
        >>> twin[0].weight.dtype, bool((twin[0].weight == model[0].weight).all()), twin[1].num_batches_tracked.dtype
        (torch.float64, True, torch.int64)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model of torch's is an nn.Module. Received: {describe_value(model)}.")
    _check_copyable(model)
    try:
        memo = copy_tensors(model, wide=wide)
        for module in reversed(list(model.modules())):  # a wrapped module before its wrapper
            if is_compiled(module):
                memo[id(module)] = _recompile_copy(module, memo)
        twin: nn.Module = copy.deepcopy(model, memo)
        for module in model.modules():
            _complete_copy(module, memo)
        rebind_closures(twin, memo)
    except PolyampError:
        raise
    except Exception as error:
        raise ModelError(
            f"the comparison trains a copy of the model, and {describe_value(model)} cannot be copied: "
            f"{type(error).__name__}: {error}. Give the class of what cannot be copied a __deepcopy__ method, or take "
            "it out of the model."
        ) from error
    return twin


def _check_copyable(model: nn.Module) -> None:
    """Reject models that are sharded over processes, and scripted modules."""
    short = short_paths(model)
    for place, part in model.named_modules():
        named = repr(short[place]) if short[place] else "the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"{named} is a scripted module, whose parts are not seen. Compare the module it was made of."
            )
        owners = (type(part), *map(type, part.parameters(recurse=False)))
        if any(kind.__module__.startswith(("torch.distributed.fsdp", "torch.distributed.tensor")) for kind in owners):
            raise ModelError(
                f"{named} holds a share of its arrays (FullyShardedDataParallel, or DTensor parameters), so that no "
                "process has a whole model to compare. Compare the model as it is before it is sharded."
            )


def _recompile_copy(module: Any, memo: dict[int, Any]) -> nn.Module:
    """Copy a module that `torch.compile` has wrapped, compiled with the same options, with the wrapper's own hooks."""
    inner = copy.deepcopy(uncompiled_module(module), memo)
    compiler = compiler_like(module)
    if compiler is None:
        raise ModelError(f"torch {torch.__version__} does not tell how a model was compiled. Compare it uncompiled.")
    again: nn.Module = compiler(inner)
    for name, value in vars(module).items():
        if "hooks" in name and isinstance(value, dict):
            vars(again)[name].update(copy.deepcopy(value, memo))
    return again


def _complete_copy(module: nn.Module, memo: dict[int, Any]) -> None:
    """Add to a module's copy what `copy.deepcopy` omits."""
    twin = memo.get(id(module))
    if twin is None:  # its class defines its own copy
        return
    compiled = None if is_compiled(module) else compiled_call_of_module(module)
    if compiled is not None:
        compiler = compiler_like(compiled)
        if compiler is None:
            raise ModelError(
                f"{type(module).__name__}.compile() has compiled in place, and torch {torch.__version__} does not tell "
                "how. Compare torch.compile(model), which is a wrapper."
            )
        compile_in_place(twin, compiler)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        for hook, state in ddp_comm_hooks(module):
            twin.register_comm_hook(state, hook)
