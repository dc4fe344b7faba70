"""`Policy.op_rules` in every framework (S4): where they act, and the names of one operation in another framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES


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


def check_rules_act(op_rules: Mapping[str, str], mode: str | None, param: str, compute: str) -> None:
    """Reject the `op_rules` of a policy that computes in 16 bits without autocast, and so without an op list (S20).

    Args:
        op_rules, mode, param, compute: the policy's; `mode` is None for the default, autocast.

    Raises:
        UnsupportedError: names what to write.

    >>> check_rules_act({"exp": "compute"}, "autocast", "float32", "float16")
    """
    if op_rules and compute in HALF_DTYPES and (mode == "cast" or param == compute):
        why = "mode='cast'" if mode == "cast" else f"param={param!r}"
        raise UnsupportedError(
            f"op_rules change the op list of autocast, which does not act with {why}. Received: "
            f"op_rules={dict(op_rules)}. Use mode='autocast' with param='float32', or policy.replace(op_rules={{}})."
        )
