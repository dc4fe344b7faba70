"""JAX array namespace, and helpers for pytrees: casts, copies, leaf paths and structure checks."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.array_namespace import array_namespace
from polyamp.errors import ModelError, UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.recipe.float8 import Float8
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.batches import host_array

_MATMUL_PRECISION: Final = {"highest": "float32", "high": "tensorfloat32", "medium": "bfloat16"}
"""`Policy.float32_matmul` -> JAX's name; XLA uses the nearest precision that the device has."""

_NATIVE_CAPABILITY: Final = (8, 9)
"""Compute capability from which NVIDIA's GPUs multiply 8-bit floats (docs.nvidia.com/cuda, "Compute Capabilities")."""


def _asarray(value: Any, like: Any) -> Any:
    return jnp.asarray(value, jnp.result_type(like))


def _cast(x: Any, dtype: Any) -> Any:
    return x.astype(dtype if isinstance(dtype, str) else dtype.dtype)


XP: Final = array_namespace(
    jnp,
    _asarray,
    norm=lambda x: jnp.sqrt(jnp.sum(x * x)),
    mean=lambda x, axis: jnp.mean(x, axis, keepdims=True),
    matmul=lambda x, y: jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST),
    swapaxes=jnp.swapaxes,
    astype=_cast,
)
"""The array namespace of jax.numpy."""


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is a JAX array or tracer, or a NumPy array or scalar."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def dtype_name(leaf: Any) -> str:
    """Return the canonical name of an array's dtype; for anything else the name of its type."""
    return str(leaf.dtype) if is_array(leaf) else type(leaf).__name__


def device_name(device: Any) -> str:
    """Return platform and number of a JAX device: `cpu:0`."""
    return f"{device.platform}:{device.id}"


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def shape_struct(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a `jax.ShapeDtypeStruct`."""
    struct: Any = jax.ShapeDtypeStruct  # JAX does not annotate it
    return struct(shape, dtype)


def cast(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """Cast a pytree's floating leaves to `dtype`. float64 leaves are cast only with `float64=True` (S2)."""

    def one(leaf: Any) -> Any:
        name = dtype_name(leaf) if is_array(leaf) else None
        if name not in FLOAT_DTYPES or name == dtype or (name == "float64" and not float64):
            return leaf
        return jnp.asarray(leaf, dtype)

    return jax.tree.map(one, tree)


def cast_arguments(tree: Any, dtype: str, *, float64: bool) -> Any:
    """Cast the arguments of a model or function like `cast`; NumPy arrays become JAX arrays first.

    Without x64, JAX converts NumPy's float64 to float32 even without a cast, so such an array counts as float32.
    """
    return cast(jax.tree.map(lambda x: jnp.asarray(x) if _is_numeric(x) else x, tree), dtype, float64=float64)


def prepare_batch(batch: Any, plan: ResolvedPolicy, *, compiled: bool) -> Any:
    """Convert NumPy float64 arrays of a batch to float32 for the step (S26).

    `jax.jit` does this itself unless x64 is on. With x64, or without compilation, the leaves are converted here.
    """
    if compiled and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # set at run time
        return batch
    numbers = (np.ndarray, np.generic)
    return jax.tree.map(lambda x: host_array(x, plan.param) if isinstance(x, numbers) else x, batch)


def is_same_tree(one: Any, other: Any) -> bool:
    """Return whether two pytrees have the same structure and the very same objects as leaves."""
    leaves, other_leaves = jax.tree.leaves(one), jax.tree.leaves(other)
    structure: Any = jax.tree.structure(one)
    return bool(structure == jax.tree.structure(other)) and all(map(operator.is_, leaves, other_leaves))


def copy_arrays(tree: Any) -> Any:
    """Copy every leaf of a pytree into a new, strongly typed JAX array that is safe to donate (S18)."""

    def one(leaf: Any) -> Any:
        if is_key(leaf):
            return leaf.copy()
        return jnp.array(leaf, dtype=jnp.result_type(leaf), copy=True)

    return jax.tree.map(one, tree)


def select_if_finite(finite: Any | None, new: Any, old: Any) -> Any:
    """Return `new` if `finite`, else `old`, bit for bit (S12). `finite` None means no check: return `new`."""
    if finite is None or new is old:
        return new
    return jax.tree.map(lambda a, b: a if is_key(b) else jnp.where(finite, a, b), new, old)


def materialize(tree: Any) -> Any:
    """Materialize a pytree's arrays with an optimization barrier, across which XLA fuses nothing."""
    return jax.lax.optimization_barrier(tree)  # type: ignore[no-untyped-call]  # JAX does not annotate it


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return a copy on the host; for PRNG keys a copy of their data."""
    return np.array(jax.random.key_data(array) if is_key(array) else array)


def path_name(path: Any) -> str:
    """Format a key path as "dense0/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def join_path(path: str, name: str) -> str:
    """Return a path with a name appended. Either may be empty."""
    return f"{path}/{name}" if path and name else path or name


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return a dict from path to leaf of a pytree.

    Raises:
        ModelError: two leaves have the same path.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if name in found:
            raise ModelError(f"two arrays of the model have the path {name!r}; rename one of the modules.")
        found[name] = leaf
    return found


def conform_tree(new: Any, old: Any, *, what: str) -> Any:
    """Return `new` with the dtypes of `old`, strongly typed, so that no step is traced twice.

    Raises:
        ModelError: the structure or a shape changed; `what` names the tree in the message.
    """
    before_structure: Any = jax.tree.structure(old)
    if before_structure != jax.tree.structure(new):
        raise ModelError(
            f"{what} changed its structure in a step, which a compiled step cannot carry. Before: "
            f"{sorted(named_leaves(old))}. After: {sorted(named_leaves(new))}. Initialise the model with every "
            "collection that training uses, and without sown intermediates."
        )

    def one(path: Any, after: Any, before: Any) -> Any:
        if jnp.shape(after) != jnp.shape(before):
            raise ModelError(
                f"{what} changed its shape at {path_name(path)!r} from {jnp.shape(before)} to {jnp.shape(after)}, "
                "which a compiled step cannot carry."
            )
        return after if is_key(before) else jnp.asarray(after, jnp.result_type(before))

    return jax.tree_util.tree_map_with_path(one, new, old)


def matmul_precision(plan: ResolvedPolicy) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager in which float32 matrix products use the policy's `float32_matmul` precision."""
    if plan.float32_matmul is None:
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = jax.default_matmul_precision(_MATMUL_PRECISION[plan.float32_matmul])
    return scope


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and (
        leaf.dtype.kind in "biufc" or dtype_name(leaf) in FLOAT_DTYPES
    )


def check_float8_device(float8: Float8 | None) -> None:
    """Reject products in 8 bits on a device that has none (S20, S36).

    Raises:
        UnsupportedError: there are none, and the policy does not emulate them.
    """
    if float8 is None or float8.emulate:
        return
    device = jax.devices()[0]
    if multiplies_float8(device):
        return
    raise UnsupportedError(
        f"float8: this device ({device.device_kind!r}) multiplies no 8-bit floats; NVIDIA's GPUs of compute capability "
        "8.9 and later do. Use Policy('mixed_float8', float8=polyamp.Float8(emulate=True)) to compute the same 8-bit "
        "numbers' products in float32, or Policy('mixed_bfloat16')."
    )


def multiplies_float8(device: Any) -> bool:
    """Return whether a device multiplies 8-bit floats."""
    capability = str(getattr(device, "compute_capability", "0"))
    version = tuple(int(part) for part in capability.split(".") if part.isdigit())
    return bool(device.platform == "gpu" and version >= _NATIVE_CAPABILITY)
