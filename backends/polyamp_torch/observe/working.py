"""A copy of a model that can be trained while the model stays as it is. Called by `observer`.

`copy.deepcopy` does it but for what it refuses or loses, which is copied here and given to it: tensors (those that
share memory share it again, those that autograd made are plain ones, attributes and hooks of parameters stay), and
modules that `torch.compile` made.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from polyamp.errors import ModelError, UnsupportedError, described
from polyamp_torch.compat import inside_of_compiled
from polyamp_torch.observe.memory import copied_tensors
from polyamp_torch.porting.walk import wrapped


@contextlib.contextmanager
def working(model: Any, *, wide: bool = False) -> Iterator[nn.Module]:
    """`Observer.working`: a deep copy, on the model's devices.

    Raises:
        ModelError: it cannot be copied.
        UnsupportedError: `wide`, and it has tensors of a kind that has no float64.
    """
    yield copied(model, wide=wide)


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
    try:
        memo = copied_tensors(model, wide=wide)
        for module in reversed(list(model.modules())):  # what is inside of a wrapper first
            if _is_compiled(module):
                memo[id(module)] = _compiled_again(module, memo)
        twin: nn.Module = copy.deepcopy(model, memo)
    except UnsupportedError:
        raise
    except Exception as error:
        raise ModelError(
            f"the comparison trains a copy of the model, and {described(model)} cannot be copied: "
            f"{type(error).__name__}: {error}. Give the class of what cannot be copied a __deepcopy__, or compare with "
            "polyamp.parity.run, whose workers build the model in a process of their own."
        ) from error
    return twin


def _is_compiled(module: nn.Module) -> bool:
    return wrapped(module) is not None and inside_of_compiled(module) is not module


def _compiled_again(module: Any, memo: dict[int, Any]) -> nn.Module:
    """A copy of what `torch.compile` has wrapped, compiled with the same options."""
    again: nn.Module = type(module)(copy.deepcopy(inside_of_compiled(module), memo), module.dynamo_ctx)
    return again
