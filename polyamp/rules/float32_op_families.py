"""S4: families of operations that autocast keeps in float32, with reasons. They key every backend's op list.

A family is a reason, not a list of names: each backend's op list assigns its own operations. It may add families, such
as the recurrent kernels of torch. The conformance suite tests operations of each of these families on every backend.
"""

from __future__ import annotations

from typing import Final

OP_FAMILIES: Final[dict[str, str]] = {
    "exponentials": "exp and its like: float16 ends at exp(11)",
    "logarithms": "log and its like, and what feeds one: 16 bits lose every digit next to 0 or 1",
    "powers": "pow, rsqrt, reciprocal: squares overflow, inverses of small numbers too",
    "sums": "sum, mean, variance: a 16-bit sum forgets what is added to a large one",
    "cumulative sums": "cumsum, cumprod: as sums",
    "softmax": "softmax, log-softmax, logsumexp: exponentials and their sum",
    "normalisation": "layer, group and batch statistics, norms of vectors: sums of squares",
    "losses": "the numbers that gradients start from",
    "linear algebra": "inverses, decompositions, determinants: they amplify rounding",
    "FFT": "sums over the whole axis, with cancellation",
}
"""Family -> reason why it is numerically sensitive."""
