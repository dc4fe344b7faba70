"""What the TensorFlow benchmarks need of TensorFlow: versions, peak memory of a step, and reads of it on the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import script_ops

from benchmarks.common import results

MEBIBYTE: Final = 2**20
_DEVICE: Final = "CPU:0"
_PRODUCTS: Final = ("MatMul", "BatchMatMul", "BatchMatMulV2", "Einsum")


def environment() -> dict[str, Any]:
    """Versions and the machine."""
    return {"tensorflow": tf.__version__, "keras": keras.__version__, **results.machine()}


def count_memory() -> None:
    """Make TensorFlow allocate the CPU's tensors with its BFC allocator, which knows its peak; malloc does not tell.

    Call it before TensorFlow's first operation. Both sides then also work in memory that was touched before, as with
    `paired.keep_freed_memory`.

    Raises:
        RuntimeError: the allocator does not count an allocation of known size.
    """
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    size = 1024
    two = tf.function(
        lambda x: tf.reduce_sum(tf.sin(tf.fill((size, size), x)) * tf.cos(tf.fill((size, size), x + 1.0)))
    )
    found = peak_memory(lambda: two(tf.constant(1.0)).numpy())
    if not 2 * 4 * size**2 <= found * MEBIBYTE < 2 * 4 * size**2 + 4 * size:
        raise RuntimeError(
            f"two float32 tensors of {size} x {size} at a time must count as 8 MiB. Counted: {found} MiB."
        )


def peak_memory(step: Callable[[], Any]) -> float:
    """MiB that a warm step takes at its peak, above what was held before it."""
    step()
    before = tf.config.experimental.get_memory_info(_DEVICE)["current"]
    tf.config.experimental.reset_memory_stats(_DEVICE)
    step()
    return (tf.config.experimental.get_memory_info(_DEVICE)["peak"] - before) / MEBIBYTE


def check_products(step: Callable[[], Any], dtype: str) -> None:
    """Look into the graph of a step that reads nothing: what it is named for is what its matrix products run in.

    Raises:
        RuntimeError: they run in another dtype, or there are none.
    """
    graph = tf.function(step, autograph=False).get_concrete_function().graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    found = {tf.as_dtype(node.attr["T"].type).name for node in nodes if node.op in _PRODUCTS}
    if found != {dtype}:
        raise RuntimeError(
            f"the step's matrix products must run in {dtype}. Found: {', '.join(sorted(found)) or 'none'}."
        )


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Everything inside that takes a tensor's value to the host: `numpy()`, `float()`, `bool()` and the like,
    `np.asarray(tensor)`, and Python functions that a graph calls.
    """
    seen: list[str] = []
    tensor, registry = ops._EagerTensorBase, type(script_ops._py_funcs)
    originals = [(tensor, "_numpy"), (registry, "__call__"), (np, "asarray"), (np, "array")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in originals]

    def watched(name: str, native: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if always or (args and isinstance(args[0], tensor)):
                seen.append(name)
            return native(*args, **kwargs)

        return call

    for owner, name, native in kept:
        setattr(owner, name, watched(name, native, always=owner is not np))
    try:
        yield seen
    finally:
        for owner, name, native in kept:
            setattr(owner, name, native)


def check_host_reads() -> None:
    """See that `host_reads` sees each kind.

    Raises:
        RuntimeError: it does not.
    """
    value = tf.constant(1.0)
    calls_back = tf.function(lambda x: tf.py_function(lambda y: y, [x], tf.float32))
    calls_back(value)
    ways: dict[str, Callable[[], Any]] = {
        "numpy()": value.numpy,
        "float()": lambda: float(value),
        "bool()": lambda: bool(value),
        "np.asarray()": lambda: np.asarray(value),
        "py_function": lambda: calls_back(value),
    }
    for name, way in ways.items():
        with host_reads() as seen:
            way()
        if not seen:
            raise RuntimeError(f"host_reads did not see {name}.")
