"""What `torch.compile` is told about functions, without importing it: `import torch._dynamo` takes two seconds.

Called by `op_lists`, `binding` and `functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_compiled(function: _Function) -> _Function:
    """Have a compiler run the function while it traces and take its result for a constant.

    It is the mark of `torch.compiler.assume_constant_result` (torch 2.7 to 2.13), which imports the compiler to set it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute
    return function
