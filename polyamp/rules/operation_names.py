"""Names of one operation in the frameworks, for `Policy.op_rules` in a recipe that goes to another framework (S4)."""

from __future__ import annotations

from typing import Final, NamedTuple


class OperationNames(NamedTuple):
    """Names of one operation, each field with several words where several operations compute it."""

    torch: str
    tensorflow: str
    jax: str


OPERATION_NAMES: Final = (
    OperationNames("linear", "dense", "dot_general"),
    *(OperationNames(name, name, "dot_general") for name in ("matmul", "einsum")),
    *(OperationNames(f"conv{rank}d", f"conv{rank}d", "conv_general_dilated") for rank in (1, 2, 3)),
    OperationNames("softmax", "softmax", "exp reduce_sum div"),
    OperationNames("log_softmax", "log_softmax", "exp reduce_sum log"),
    OperationNames("logsumexp", "logsumexp", "exp reduce_sum log"),
    OperationNames("layer_norm", "layer_normalization", "reduce_sum rsqrt"),
    OperationNames("batch_norm", "batch_normalization", "reduce_sum rsqrt"),
    OperationNames("group_norm", "group_normalization", "reduce_sum rsqrt"),
    OperationNames("rms_norm", "rms_normalization", "reduce_sum rsqrt"),
    *(OperationNames(name, name, "reduce_sum") for name in ("sum", "mean")),
    OperationNames("sigmoid", "sigmoid", "logistic"),
    OperationNames("pow", "power", "pow integer_pow"),
    OperationNames("cat", "concatenate", "concatenate"),
    OperationNames("mul", "multiply", "mul"),
    OperationNames("sub", "subtract", "sub"),
    OperationNames("div", "divide", "div"),
)
"""Operations whose names differ. A composition lists the sensitive primitives that JAX makes it of."""


_FRAMEWORKS: Final = {"torch": "torch", "tensorflow": "Keras", "jax": "JAX"}
"""Field -> the framework's name in messages."""


def translate_name(name: str, backend: str) -> str:
    """Return a sentence with the name in one framework of an operation that another framework calls `name`, or "".

    >>> translate_name("reduce_sum", "torch")
    " 'reduce_sum' of JAX is 'sum' or 'mean' here."
    >>> translate_name("layer_norm", "jax"), translate_name("exp", "jax")
    (" 'layer_norm' of torch is 'reduce_sum' and 'rsqrt' here.", '')
    """
    for framework, label in _FRAMEWORKS.items():
        rows = [row for row in OPERATION_NAMES if getattr(row, framework) == name]
        words = dict.fromkeys(" and ".join(map(repr, getattr(row, backend).split())) for row in rows)
        if framework != backend and words:
            return f" {name!r} of {label} is {' or '.join(words)} here."
    return ""
