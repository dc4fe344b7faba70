"""What `torch.compile` is told about functions, without importing it: `import torch._dynamo` takes two seconds.

Called by `op_list`, `bound`, `custom_function`, `autocast` and `islands`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_when_compiled(function: _Function) -> _Function:
    """Have a compiler run the function while it traces and take its result for a constant.

    It is the mark of `torch.compiler.assume_constant_result` (torch 2.7 to 2.13), which imports the compiler to set it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute
    return function


class _BackwardAsEager:
    """A block in which what is compiled gets the backward pass that eager code has: outside the region.

    The compiler traces the backward pass with the forward one and, unless told otherwise, under the same autocast: a
    float32 island inside a 16-bit region would have 16-bit products in its gradient. torch's setting for that is
    thread-local (in 2.7 it is the process's), and is what it was behind the block.
    """

    before: str | None = None

    def __enter__(self) -> None:
        from torch._functorch import config  # loaded with the compiler

        self.before = config.backward_pass_autocast
        config.backward_pass_autocast = "off"  # noqa: S105  # a pass, no password

    def __exit__(self, *_: object) -> None:
        """Put back what was there; nothing, if an interrupt came before it was noted."""
        from torch._functorch import config

        if self.before is not None:
            config.backward_pass_autocast = self.before


NOTHING: Final = contextlib.nullcontext()


def backward_as_eager() -> contextlib.AbstractContextManager[None]:
    """A block in which a compiled function's backward pass is that of eager code; free while there is no compiler."""
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        return NOTHING
    return _BackwardAsEager()
