"""JAX as polyamp's array namespace, casting of pytrees, and paths of leaves. Called by every module of the backend."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.arrays import ArrayNamespace
from polyamp.errors import ModelError
from polyamp.rules.batches import host_array
from polyamp.rules.plan import Plan
from polyamp.rules.refusals import FLOATING

_MATMUL_PRECISION: Final = {"highest": "float32", "high": "tensorfloat32", "medium": "bfloat16"}
"""`Policy.float32_matmul` -> JAX's name; XLA picks the nearest that the device has."""


class JaxNamespace:
    """`ArrayNamespace` over jax.numpy."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        return jnp.where(condition, x, y)

    def minimum(self, x: Any, y: Any, /) -> Any:
        return jnp.minimum(x, y)

    def maximum(self, x: Any, y: Any, /) -> Any:
        return jnp.maximum(x, y)

    def asarray(self, value: Any, like: Any, /) -> Any:
        return jnp.asarray(value, jnp.result_type(like))

    def sqrt(self, x: Any, /) -> Any:
        return jnp.sqrt(x)

    def sign(self, x: Any, /) -> Any:
        return jnp.sign(x)

    def cos(self, x: Any, /) -> Any:
        return jnp.cos(x)

    def floor(self, x: Any, /) -> Any:
        return jnp.floor(x)

    def power(self, x: Any, y: Any, /) -> Any:
        return jnp.power(x, y)

    def expm1(self, x: Any, /) -> Any:
        return jnp.expm1(x)


XP: Final[ArrayNamespace] = JaxNamespace()


def is_array(leaf: Any) -> bool:
    """True for JAX arrays and tracers, and for NumPy arrays and scalars."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def dtype_name(leaf: Any) -> str:
    """Canonical name of an array's dtype; of anything else the name of its type."""
    return str(leaf.dtype) if is_array(leaf) else type(leaf).__name__


def is_key(leaf: Any) -> bool:
    """True for an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def cast(tree: Any, dtype: str, *, float64: bool = False) -> Any:
    """A pytree with its floating leaves in `dtype`; all else, and float64 unless asked for, as it is (S2)."""

    def one(leaf: Any) -> Any:
        name = dtype_name(leaf) if is_array(leaf) else None
        if name not in FLOATING or name == dtype or (name == "float64" and not float64):
            return leaf
        return jnp.asarray(leaf, dtype)

    return jax.tree.map(one, tree)


def cast_arguments(tree: Any, dtype: str, *, float64: bool) -> Any:
    """`cast` for what a model or function is called with: NumPy arrays become JAX arrays first.

    JAX holds NumPy's float64 as float32 unless x64 is on, also without a cast, so such an array counts as float32.
    """
    return cast(jax.tree.map(lambda x: jnp.asarray(x) if _numeric(x) else x, tree), dtype, float64=float64)


def entering(batch: Any, plan: Plan, *, compiled: bool) -> Any:
    """A batch on its way into a step, with NumPy's float64 as float32 (S26).

    `jax.jit` does so by itself unless x64 is on; then, and where nothing is compiled, the batch is walked through.
    """
    if compiled and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # set at run time
        return batch
    numbers = (np.ndarray, np.generic)
    return jax.tree.map(lambda x: host_array(x, plan.param) if isinstance(x, numbers) else x, batch)


def fresh(tree: Any) -> Any:
    """A pytree with every leaf copied into a JAX array of its own, strongly typed and safe to donate (S18)."""

    def one(leaf: Any) -> Any:
        if is_key(leaf):
            return leaf.copy()
        return jnp.array(leaf, dtype=jnp.result_type(leaf), copy=True)

    return jax.tree.map(one, tree)


def chosen(finite: Any | None, new: Any, old: Any) -> Any:
    """`new` where `finite`, else `old`, bit for bit (S12); `new` where nothing is checked."""
    if finite is None or new is old:
        return new
    return jax.tree.map(lambda a, b: a if is_key(b) else jnp.where(finite, a, b), new, old)


def made_first(tree: Any) -> Any:
    """A pytree as arrays of their own, that what comes after takes as they are: XLA fuses nothing across."""
    return jax.lax.optimization_barrier(tree)  # type: ignore[no-untyped-call]  # JAX does not annotate it


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """A copy on the host; of PRNG keys their data."""
    return np.array(jax.random.key_data(array) if is_key(array) else array)


def path_name(path: Any) -> str:
    """A key path as "dense0/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Path -> leaf of a pytree.

    Raises:
        ModelError: two leaves have one path.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if name in found:
            raise ModelError(f"two arrays of the model have the path {name!r}; rename one of the modules.")
        found[name] = leaf
    return found


def conform(new: Any, old: Any, *, what: str) -> Any:
    """`new` with the dtypes of `old`, strongly typed, so that no step is traced twice.

    Raises:
        ModelError: the structure or a shape changed; `what` says of what.
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


def matmul_precision(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    """The scope in which float32 matrix products have the policy's `float32_matmul` precision."""
    if plan.float32_matmul is None:
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[Any] = jax.default_matmul_precision(_MATMUL_PRECISION[plan.float32_matmul])
    return scope


def _numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and (leaf.dtype.kind in "biufc" or dtype_name(leaf) in FLOATING)
