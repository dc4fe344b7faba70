"""Copy of a model that can be trained without changing the model.

`copy.deepcopy` copies most of it. This module adds what it rejects or loses: tensors (`alias_preserving_copy`), results
of `torch.compile`, and functions that close over parts of the model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterator, Mapping
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
from polyamp_torch.observe.torch_only.alias_preserving_copy import copy_tensors
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
        _rebind_closures(twin, memo)
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


def _rebind_closures(twin: nn.Module, memo: Mapping[int, Any]) -> None:
    """Rebind the functions in the modules of a copy to the copy.

    `copy.deepcopy` treats a function as a constant. A function that a library adds to a model (a patched `forward`, a
    hook) may reference the model's modules or tensors. In a copy it would still run, and train, the model itself.

    Args:
        twin: the copy.
        memo: id of each part of the model -> its copy.
    """
    known: dict[int, Any] = {}
    for part in twin.modules():
        attributes = vars(part)
        hooks = [value for name, value in attributes.items() if "hooks" in name and isinstance(value, dict) and value]
        for where in (attributes, *hooks):
            for name, value in list(where.items()):
                if value is None or isinstance(value, bool | int | float | str | dict):
                    continue
                again = _rebind_value(value, memo, known)
                if again is not value:
                    where[name] = again


def _rebind_value(value: Any, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    """Return the value rebound to the copy; itself if it references nothing of the model."""
    if isinstance(value, nn.Module | torch.Tensor):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = memo.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        return _rebind_partial(value, memo, known)
    if not isinstance(value, types.FunctionType):
        return value
    if id(value) not in known:
        known[id(value)] = value  # a function may reference itself
        known[id(value)] = _rebind_function(value, memo, known)
    return known[id(value)]


def _rebind_partial(value: functools.partial[Any], memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    parts = (value.func, *value.args, *value.keywords.values())
    made = [_rebind_value(part, memo, known) for part in parts]
    if all(one is other for one, other in zip(parts, made, strict=True)):
        return value
    count = len(value.args)
    return functools.partial(made[0], *made[1 : count + 1], **dict(zip(value.keywords, made[count + 1 :], strict=True)))


def _rebind_function(value: types.FunctionType, memo: Mapping[int, Any], known: dict[int, Any]) -> Any:
    cells = [_rebind_cell(cell, memo, known) for cell in value.__closure__ or ()]
    defaults = tuple(_rebind_value(each, memo, known) for each in value.__defaults__ or ())
    named = {name: _rebind_value(each, memo, known) for name, each in (value.__kwdefaults__ or {}).items()}
    same = all(one is other for one, other in zip(cells, value.__closure__ or (), strict=True))
    same = same and all(one is other for one, other in zip(defaults, value.__defaults__ or (), strict=True))
    if same and all(each is (value.__kwdefaults__ or {})[name] for name, each in named.items()):
        return value
    closure = tuple(cells) if value.__closure__ else None
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, closure)
    made.__kwdefaults__ = named or None
    vars(made).update(vars(value))
    made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
    return made


def _rebind_cell(cell: types.CellType, memo: Mapping[int, Any], known: dict[int, Any]) -> types.CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # the cell is empty
        return cell
    again = _rebind_value(content, memo, known)
    return cell if again is content else types.CellType(again)
