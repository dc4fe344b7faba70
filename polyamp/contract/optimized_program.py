"""`optimized_instructions`: what computes in a program after XLA's optimization, read from its text.

A framework's name of the operation stands in the metadata of an instruction. What XLA makes itself has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from polyamp.float_formats import FORMATS

_DTYPES: Final = {
    **{each.aliases[0]: each.name for each in FORMATS.values()},
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_INSTRUCTION: Final = re.compile(
    r'^\s*(?:ROOT )?%?[\w.-]+ = \(?(?P<dtype>\w+)\[.*? (?P<opcode>[a-z][a-z0-9-]*)\(.*op_name="(?P<name>[^"]*)"'
)
_MOVES: Final = """
parameter constant broadcast convert bitcast bitcast-convert transpose copy reshape tuple get-tuple-element fusion call
while conditional slice dynamic-slice dynamic-update-slice gather concatenate pad reverse iota copy-start copy-done
async-start async-done
"""
_DATA_MOVEMENT: Final = frozenset(_MOVES.split())
"""Instructions that only move or create data, or hold other instructions."""


class OptimizedInstruction(NamedTuple):
    """An instruction that computes.

    Attributes:
        opcode: XLA's name of what it does.
        dtype: of its result, a floating one.
        op_name: the framework's name of the operation, with its scopes.
    """

    opcode: str
    dtype: str
    op_name: str


def optimized_instructions(text: str) -> Iterator[OptimizedInstruction]:
    """Yield the instructions with floating results that compute and have a name of the framework's.

    Args:
        text: of a compiled program.

    >>> list(optimized_instructions('%d.1 = bf16[5,8]{1,0} dot(%a, %b), metadata={op_name="head/MatMul"}'))
    [OptimizedInstruction(opcode='dot', dtype='bfloat16', op_name='head/MatMul')]
    """
    for line in text.splitlines():
        found = _INSTRUCTION.match(line)
        if found is not None and found["opcode"] not in _DATA_MOVEMENT and found["dtype"] in _DTYPES:
            yield OptimizedInstruction(found["opcode"], _DTYPES[found["dtype"]], found["name"])
