"""`optimized_operations`: the operations of a program after XLA's optimization, read from its text.

XLA keeps JAX's name of each operation with the scopes and transformations around it:
`op_name="jit(f)/transpose(jvp(head))/dot_general"`. What it makes itself has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_DTYPES: Final = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_INSTRUCTION: Final = re.compile(
    r'^\s*(?:ROOT )?%?[\w.-]+ = \(?(?P<dtype>\w+)\[.*? (?P<opcode>[a-z][a-z0-9-]*)\(.*op_name="(?P<name>[^"]*)"'
)
_MOVES: Final = """
parameter constant broadcast convert bitcast bitcast-convert transpose copy reshape tuple get-tuple-element fusion call
while conditional slice dynamic-slice gather concatenate pad reverse iota copy-start copy-done async-start async-done
"""
_DATA_MOVEMENT: Final = frozenset(_MOVES.split())
"""Instructions that only move or create data, or hold other instructions."""
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
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None or found["opcode"] in _DATA_MOVEMENT or found["dtype"] not in _DTYPES:
            continue
        *around, name = found["name"].split("/")
        if name.startswith("reduce_") and found["opcode"] in _REDUCERS:
            continue
        scopes = [_WRAPPED.sub(r"\1", part) for part in around if not _CALL.match(part)]
        is_backward = any("transpose(" in part for part in around)
        yield OptimizedOperation(tuple(filter(None, scopes)), name, _DTYPES[found["dtype"]], is_backward)
