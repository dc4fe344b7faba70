"""NumPy reference backend, the oracle of the conformance suite.

It differentiates multi-layer perceptrons with a short tape, computes in real float16 and bfloat16 (`ml_dtypes`), and
follows `semantics.md` line by line. It is for checking and learning, not for speed.
"""

from polyamp.reference.backend import BACKEND, ReferenceBackend, ReferenceState
from polyamp.reference.models import MLP
from polyamp.reference.tensor import Tensor

__all__ = ["BACKEND", "MLP", "ReferenceBackend", "ReferenceState", "Tensor"]
