"""Private names of TensorFlow, and differences between its versions (from 2.19). Keras's are in `polyamp_keras.compat`.

No other module of this package uses a private name; `tests/core/house/test_private_names.py` checks the syntax trees.
The docstring of each name states the behaviour that polyamp relies on.
"""

from __future__ import annotations

import random
from typing import Any, Final

import tensorflow as tf

# TensorFlow.

FunctionGraph: Final[Any] = tf.__internal__.FuncGraph
"""Graph of a `tf.function`. A condition's branch or a loop's body is a subclass; `outer_graph` is the enclosing one."""


def is_merge_call_unavailable() -> bool:
    """Return whether replicas never synchronise, as on one device: `merge_call` is then refused or useless."""
    return bool(tf.__internal__.distribute.strategy_supports_no_merge_call())


# Writes in a graph.


def resource_writes(operation: Any) -> list[Any]:
    """Return the handles of variables that an operation writes to, itself or in a function that it calls. Functions
    record which of their resources they only read."""
    from tensorflow.python.framework import auto_control_deps_utils

    return list(auto_control_deps_utils.get_read_write_resource_inputs(operation)[1])


def callee_graph(operation: Any, name: str) -> Any:
    """Return the graph of a function that an operation calls; None if it is unknown."""
    return getattr(operation.graph._get_function(name), "graph", None)


def untraced_function(function: Any) -> Any:
    """Return an untraced copy of a `tf.function`; None if `function` is not a `tf.function`."""
    clone = getattr(function, "_clone", None)
    return None if clone is None or not hasattr(function, "python_function") else clone(None)


# Random numbers.


def operation_seed_source() -> random.Random | None:
    """Return the generator of seeds for TensorFlow's unseeded random operations; None before `tf.random.set_seed`."""
    from tensorflow.python.eager import context

    return getattr(context.context(), "_rng", None)


def random_functions() -> dict[str, list[tuple[Any, str]]]:
    """Return the functions behind all random numbers of TensorFlow and Keras, by kind, as (module, name) pairs. Callers
    look each name up at every call.

    "dropout" has the arguments `(x, rate, noise_shape, ...)`; "uniform", "normal" and "truncated" `(shape, ...)` and a
    `dtype`; "integers" `(shape, ..., minval, maxval)`; "unsupported" return numbers of other distributions.
    """
    from tensorflow.python.ops import (
        gen_random_ops,
        gen_stateless_random_ops,
        gen_stateless_random_ops_v2,
        nn_ops,
    )

    stateful, old, new = gen_random_ops, gen_stateless_random_ops, gen_stateless_random_ops_v2
    return {
        "dropout": [(nn_ops, "_dropout")],
        "uniform": [(stateful, "random_uniform"), (new, "stateless_random_uniform_v2")],
        "normal": [(stateful, "random_standard_normal"), (new, "stateless_random_normal_v2")],
        "truncated": [(stateful, "truncated_normal"), (new, "stateless_truncated_normal_v2")],
        "integers": [(stateful, "random_uniform_int"), (new, "stateless_random_uniform_int_v2")],
        "unsupported": [
            *((stateful, name) for name in ("multinomial", "random_gamma", "random_poisson_v2", "random_shuffle")),
            *((old, name) for name in ("stateless_multinomial", "stateless_random_binomial")),
            *((old, name) for name in ("stateless_random_poisson", "stateless_parameterized_truncated_normal")),
            *((new, name) for name in ("stateless_random_gamma_v3", "stateless_shuffle")),
        ],
    }
