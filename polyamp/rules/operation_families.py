"""Families of operations in which casting reports of two frameworks, or of eager and compiled code, are compared.

They are those of S4, and the families below. Each backend assigns its own operations. What a framework has as one
operation, such as a softmax, is in another one, or once compiled, a program of several: `COMPOSITE_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MATRIX_PRODUCTS: Final = "matrix products"
CONVOLUTIONS: Final = "convolutions"
ATTENTION: Final = "attention"
RECURRENT: Final = "recurrent layers"
SATURATING: Final = "saturating functions"
ELEMENTWISE: Final = "elementwise"
"""Everything else: additions, activations, maxima, and operations that no op list names."""

_EXPONENTIAL_PARTS: Final = ("exponentials", "logarithms", "sums")
COMPOSITE_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = {
    "softmax": _EXPONENTIAL_PARTS,
    "losses": (*_EXPONENTIAL_PARTS, "softmax", "powers"),
    "normalisation": ("sums", "powers"),
    ATTENTION: (MATRIX_PRODUCTS,),
    RECURRENT: (MATRIX_PRODUCTS,),
}
"""Family of whole functions -> families of the operations that they are programs of elsewhere, and whose dtypes are
those of the function's operands. A fused attention takes 16-bit arrays and has a float32 softmax inside, so that its
dtype is that of its products."""
