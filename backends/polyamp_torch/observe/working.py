"""A copy of a model that can be trained while the model stays as it is. Called by `observer`.

`copy.deepcopy` does it but for what it refuses or loses, which is copied here and given to it: tensors (`memory`), what
`torch.compile` made, and functions that close over parts of the model (`rebinding`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polyamp.errors import ModelError, PolyampError, described
from polyamp_torch.compat import (
    comm_hooks_of,
    compile_in_place,
    compiled_in_place,
    compiler_of,
    inside_of_compiled,
    is_compiled,
)
from polyamp_torch.observe.memory import copied_tensors
from polyamp_torch.observe.rebinding import rebind
from polyamp_torch.porting.walk import short_paths


@contextlib.contextmanager
def working(model: Any, *, wide: bool, inference: bool) -> Iterator[nn.Module]:
    """`Observer.working`: a deep copy, on the model's devices. With `wide`, what is made without a dtype inside of the
    block is float64 too.

    Raises:
        ModelError: it cannot be copied.
        UnsupportedError: `wide`, and it has tensors of a kind that has no float64.
    """
    twin = copied(model, wide=wide)
    before = torch.get_default_dtype()
    try:
        if wide:
            torch.set_default_dtype(torch.float64)
        yield twin.eval() if inference else twin
    finally:
        torch.set_default_dtype(before)


def copied(model: Any, *, wide: bool = False) -> nn.Module:
    """A copy of a model: values, modes, hooks, wrappers; with `wide` in float64 where the model has floating numbers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> twin = copied(model, wide=True)
        >>> twin[0].weight.dtype, bool((twin[0].weight == model[0].weight).all()), twin[1].num_batches_tracked.dtype
        (torch.float64, True, torch.int64)
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"a model of torch's is an nn.Module. Received: {described(model)}.")
    _check(model)
    try:
        memo = copied_tensors(model, wide=wide)
        for module in reversed(list(model.modules())):  # what is inside of a wrapper first
            if is_compiled(module):
                memo[id(module)] = _compiled_again(module, memo)
        twin: nn.Module = copy.deepcopy(model, memo)
        for module in model.modules():
            _complete(module, memo)
        rebind(twin, memo)
    except PolyampError:
        raise
    except Exception as error:
        raise ModelError(
            f"the comparison trains a copy of the model, and {described(model)} cannot be copied: "
            f"{type(error).__name__}: {error}. Give the class of what cannot be copied a __deepcopy__ method, or take "
            "it out of the model."
        ) from error
    return twin


def _check(model: nn.Module) -> None:
    """Refuse models that are shared out over processes, and scripts."""
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


def _compiled_again(module: Any, memo: dict[int, Any]) -> nn.Module:
    """A copy of what `torch.compile` has wrapped, compiled with the same options, with the wrapper's own hooks."""
    inner = copy.deepcopy(inside_of_compiled(module), memo)
    compiler = compiler_of(module)
    if compiler is None:
        raise ModelError(f"torch {torch.__version__} does not tell how a model was compiled. Compare it uncompiled.")
    again: nn.Module = compiler(inner)
    for name, value in vars(module).items():
        if "hooks" in name and isinstance(value, dict):
            vars(again)[name].update(copy.deepcopy(value, memo))
    return again


def _complete(module: nn.Module, memo: dict[int, Any]) -> None:
    """Give a module's copy what `copy.deepcopy` leaves out."""
    twin = memo.get(id(module))
    if twin is None:  # its class copies itself in a way of its own
        return
    compiled = None if is_compiled(module) else compiled_in_place(module)
    if compiled is not None:
        compiler = compiler_of(compiled)
        if compiler is None:
            raise ModelError(
                f"{type(module).__name__}.compile() has compiled in place, and torch {torch.__version__} does not tell "
                "how. Compare torch.compile(model), which is a wrapper."
            )
        compile_in_place(twin, compiler)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        for hook, state in comm_hooks_of(module):
            twin.register_comm_hook(state, hook)
