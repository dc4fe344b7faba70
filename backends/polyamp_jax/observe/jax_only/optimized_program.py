"""`optimized_operations`: the operations of a program after XLA's optimization, by JAX's names.

XLA keeps JAX's name of each operation with the scopes and transformations around it:
`op_name="jit(f)/transpose(jvp(head))/dot_general"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from polyamp.contract.optimized_program import optimized_instructions

_REDUCERS: Final = frozenset({"add", "maximum", "minimum", "multiply", "and", "or"})
"""Instructions that a reduction repeats: their own program has the name of the reduction."""
_WRAPPED: Final = re.compile(r"^(?:\w+\()*([^()]*)\)*$")
_CALL: Final = re.compile(r"^p?jit\(")


class OptimizedOperation(NamedTuple):
    """An instruction that computes.

    Attributes:
        scopes: names of the scopes around it, outermost first.
        name: JAX's name of the operation.
        dtype: of its result.
        is_backward: whether it is part of a backward pass.
    """

    scopes: tuple[str, ...]
    name: str
    dtype: str
    is_backward: bool


def optimized_operations(text: str) -> Iterator[OptimizedOperation]:
    """Yield the operations with floating results.

    Args:
        text: of a compiled program.

    >>> line = '%d.1 = bf16[5,8]{1,0} dot(%a, %b), metadata={op_name="jit(f)/transpose(jvp(head))/dot_general"}'
    >>> list(optimized_operations(line))
    [OptimizedOperation(scopes=('head',), name='dot_general', dtype='bfloat16', is_backward=True)]
    """
    for instruction in optimized_instructions(text):
        *around, name = instruction.op_name.split("/")
        if name.startswith("reduce_") and instruction.opcode in _REDUCERS:
            continue
        scopes = [_WRAPPED.sub(r"\1", part) for part in around if not _CALL.match(part)]
        is_backward = any("transpose(" in part for part in around)
        yield OptimizedOperation(tuple(filter(None, scopes)), name, instruction.dtype, is_backward)
