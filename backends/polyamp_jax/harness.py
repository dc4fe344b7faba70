"""Test harness of the JAX backend: flax models for the conformance suite, the demo and the parity runner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import Mesh, PartitionSpec

import polyamp
from polyamp.contract.harness import DenseWeights, ObserveCallback
from polyamp.demo import digits
from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp_jax import compat
from polyamp_jax.arrays import to_numpy
from polyamp_jax.precision.op_list import register_rule

Array = np.ndarray[Any, Any]
DENSE_ARRAYS: Final = ("kernel", "bias")


class LinenMLP(linen.Module):  # type: ignore[misc]  # flax is not typed
    """MLP: dense -> [batch normalisation] -> relu -> [dropout] -> ... -> dense [-> selected rows of the batch]."""

    widths: tuple[int, ...]
    normalize: bool = False
    dropout: float = 0.0
    observe: ObserveCallback | None = None
    rows: tuple[int, ...] | None = None

    @linen.compact  # type: ignore[untyped-decorator]  # flax is not typed
    def __call__(self, x: Any) -> Any:
        for number, width in enumerate(self.widths):
            x = linen.Dense(width, name=f"dense{number}")(x)
            if self.observe is not None:
                x = _observe_dtype(x, self.observe)
            if number < len(self.widths) - 1:
                if self.normalize:
                    x = linen.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, name=f"norm{number}")(x)
                x = linen.relu(x)
                if self.dropout:
                    x = linen.Dropout(self.dropout, deterministic=False)(x)
        return x if self.rows is None else jnp.take(x, np.asarray(self.rows), axis=0)


class NnxConstrainedMLP(nnx.Module):  # type: ignore[misc]  # flax is not typed
    """nnx MLP that clips its first kernel in place before using it."""

    def __init__(self, layers: Sequence[DenseWeights], limit: float) -> None:
        self.limit, self.depth = limit, len(layers)
        for number, layer in enumerate(layers):
            dense = nnx.Linear(*layer.kernel.shape, rngs=nnx.Rngs(0))
            dense.kernel[...], dense.bias[...] = jnp.array(layer.kernel), jnp.array(layer.bias)
            setattr(self, f"dense{number}", dense)

    def __call__(self, x: Any) -> Any:
        kernel = self.dense0.kernel[...]  # straight-through: the gradient of the written kernel
        self.dense0.kernel[...] = kernel + jax.lax.stop_gradient(jnp.clip(kernel, -self.limit, self.limit) - kernel)
        for number in range(self.depth):
            x = getattr(self, f"dense{number}")(nnx.relu(x) if number else x)
        return x


class LinenBranches(linen.Module):  # type: ignore[misc]  # flax is not typed
    """Parallel dense layers on the same input; returns a tuple of outputs."""

    widths: tuple[int, ...]

    @linen.compact  # type: ignore[untyped-decorator]  # flax is not typed
    def __call__(self, x: Any) -> Any:
        return tuple(linen.Dense(width, name=f"dense{number}")(x) for number, width in enumerate(self.widths))


class LinenTransformer(linen.Module):  # type: ignore[misc]  # flax is not typed
    """One-block transformer of `polyamp.demo.digits`, with every layer written out."""

    @linen.compact  # type: ignore[untyped-decorator]  # flax is not typed
    def __call__(self, x: Any) -> Any:
        h = _dense("embed")(x)
        h = h + self._attention(_norm("norm1")(h))
        h = h + _dense("mlp2")(linen.relu(_dense("mlp1")(_norm("norm2")(h))))
        h = _norm("norm3")(h)
        return _dense("head")(h.reshape(h.shape[0], -1))

    def _attention(self, x: Any) -> Any:
        size = digits.WIDTH // digits.HEADS

        def heads(name: str) -> Any:
            return _dense(name)(x).reshape(*x.shape[:2], digits.HEADS, size)

        query, key, value = heads("query"), heads("key"), heads("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value)
        return _dense("out")(mixed.reshape(x.shape))


class JaxHarness:
    """`Harness` with flax models. If created before JAX starts, it requests two CPU devices, as replicas need."""

    def __init__(self) -> None:
        if "device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX is already initialised; then `replicate` raises
                jax.config.update("jax_num_cpu_devices", 2)  # type: ignore[no-untyped-call]  # JAX does not annotate it

    def array(self, value: Array) -> Any:
        return jnp.array(value)

    def float64(self) -> contextlib.AbstractContextManager[Any]:
        return compat.enable_float64()

    def mlp(self, layers: Sequence[DenseWeights], *, observe: ObserveCallback | None = None) -> Any:
        return LinenMLP(_widths(layers), observe=observe), {"params": _dense_params(layers)}

    def branches(self, layers: Sequence[DenseWeights]) -> Any:
        return LinenBranches(_widths(layers)), {"params": _dense_params(layers)}

    def normalized_mlp(self, layers: Sequence[DenseWeights]) -> Any:
        width = layers[0].bias.shape
        norm = {"scale": jnp.ones(width, jnp.float32), "bias": jnp.zeros(width, jnp.float32)}
        running = {"mean": jnp.zeros(width, jnp.float32), "var": jnp.ones(width, jnp.float32)}
        variables = {"params": {**_dense_params(layers), "norm0": norm}, "batch_stats": {"norm0": running}}
        return LinenMLP(_widths(layers), normalize=True), variables

    def dropout_mlp(self, layers: Sequence[DenseWeights]) -> tuple[Any, dict[str, Any]]:
        return (LinenMLP(_widths(layers), dropout=0.5), {"params": _dense_params(layers)}), {"rngs": {"dropout": 0}}

    def constrained_mlp(self, layers: Sequence[DenseWeights], limit: float) -> Any:
        return NnxConstrainedMLP(layers, limit)

    def digits(self, weights: Mapping[str, Array]) -> Any:
        params: dict[str, dict[str, Any]] = {}
        for path, value in weights.items():
            module, _, name = path.partition("/")
            params.setdefault(module, {})[name] = jnp.array(value)
        return LinenTransformer(), {"params": params}

    def weights(self, state: Any) -> list[DenseWeights]:
        params = state.params
        return [
            DenseWeights(
                *(
                    to_numpy(getattr(params[f"dense{n}"][part], "value", params[f"dense{n}"][part]))
                    for part in DENSE_ARRAYS
                )
            )
            for n in range(sum(name.startswith("dense") for name in params))
        ]

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        families: dict[str, dict[str, Callable[[Any], Any]]] = {
            "exponentials": {"exp": jnp.exp, "expm1": jnp.expm1},
            "logarithms": {"log": jnp.log, "log1p": jnp.log1p},
            "powers": {"pow": lambda x: jnp.power(x, 3.0), "rsqrt": jax.lax.rsqrt},
            "sums": {"sum": jnp.sum, "mean": jnp.mean, "var": lambda x: jnp.var(x, -1)},
            "cumulative sums": {"cumsum": jnp.cumsum},
            "softmax": {
                "softmax": jax.nn.softmax,
                "log_softmax": jax.nn.log_softmax,
                "logsumexp": jax.nn.logsumexp,
            },
            "normalisation": {
                "layer_norm": lambda x: jax.nn.standardize(x, epsilon=digits.EPSILON),
                "norm": lambda x: jnp.linalg.norm(x, axis=-1),
            },
            "losses": {"squared_error": lambda x: jnp.mean(optax.squared_error(x))},
            # after a product with a 16-bit result: JAX itself refuses 16-bit arguments at trace time
            "linear algebra": {
                "inv": lambda x: jnp.linalg.inv(x[:, :4] @ jnp.eye(4)),
                "qr": lambda x: jnp.linalg.qr((x[:, :4] @ jnp.eye(4)).T)[1],
            },
            "FFT": {
                "fft": lambda x: jnp.fft.fft(x[:, :4] @ jnp.eye(4)),
                "rfft": lambda x: jnp.fft.rfft(x[:, :4] @ jnp.eye(4)),
            },
        }
        # compiled as a whole: eagerly, JAX fuses functions that it jits internally, which changes rounding
        return {
            family: {name: jax.jit(operation) for name, operation in operations.items()}
            for family, operations in families.items()
        }

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        operations: dict[str, Callable[[Any], Any]] = {
            "log(p + eps) of sigmoid": lambda x: jnp.log(jax.nn.sigmoid(-x) + 1e-6),
            "log(1 - p) of sigmoid": lambda x: jnp.log(1 - jax.nn.sigmoid(x)),
            "log of erfc": lambda x: jnp.log(jax.lax.erfc(x)),
            "1 - p of sigmoid": lambda x: 1 - jax.nn.sigmoid(x),
        }
        return {name: jax.jit(operation) for name, operation in operations.items()}

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "einsum": lambda x: jnp.einsum("bi,bi->b", x, x),
            "vmap of dot": lambda x: jax.vmap(jnp.dot)(x, x),
        }

    def matmul(self, left: Any, right: Any) -> Any:
        return jnp.matmul(left, right)

    def selected(self, values: Any, mask: Any) -> Any:
        raise UnsupportedError("the length of a selection is not known to a compiler.")

    def outer(self, left: Any, right: Any) -> Any:
        return jnp.einsum("i,j->ij", left, right)

    def gathered(self, layers: Sequence[DenseWeights], rows: Array) -> Any:
        return LinenMLP(_widths(layers), rows=tuple(rows.tolist())), {"params": _dense_params(layers)}

    def unusable(self, kind: str) -> Any:
        if kind == "empty":
            return LinenMLP(()), {"params": {}}
        dtype = {"integer": jnp.int32, "complex": jnp.complex64, "float16": jnp.float16}[kind]
        layer = {"kernel": jnp.ones((2, 2), dtype), "bias": jnp.ones(2, dtype)}
        return LinenMLP((2,)), {"params": {"dense0": layer}}

    def complex_dense(self, kernel: Array) -> Any:
        raise UnsupportedError("the JAX backend trains no complex parameters.")

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        devices = jax.devices()[: len(batches)]
        if len(devices) < len(batches):
            raise UnsupportedError(
                f"{len(batches)} replicas need as many devices, set before JAX starts (XLA_FLAGS="
                f"--xla_force_host_platform_device_count={len(batches)}). Received: {len(devices)}."
            )
        same, own = PartitionSpec(), PartitionSpec("replica")  # type: ignore[no-untyped-call]  # untyped in JAX
        step = jax.shard_map(
            polyamp.train_step(loss_fn, recipe),
            mesh=Mesh(np.array(devices), ("replica",)),
            in_specs=(same, own),
            out_specs=(same, same),
        )
        state = polyamp.init(self.mlp(layers), recipe)
        for parts in zip(*batches, strict=True):
            whole = jax.tree.map(lambda *members: np.concatenate(members), *parts)
            state, result = jax.jit(step)(state, whole)
        return [
            jax.tree.map(lambda leaf, number=number: leaf.addressable_shards[number].data, (state, result))
            for number in range(len(batches))
        ]

    def with_head(self, state: Any, head: DenseWeights) -> Any:
        module, variables = state.model
        last = f"dense{len(module.widths) - 1}"
        widths = (*module.widths[:-1], head.kernel.shape[1])
        params = {**variables["params"], last: {"kernel": jnp.array(head.kernel), "bias": jnp.array(head.bias)}}
        return LinenMLP(widths), {**variables, "params": params}

    def with_frozen(self, state: Any, numbers: Collection[int]) -> Any:
        raise UnsupportedError("linen's parameters are all trained; nnx's and those of functions are divided by hand.")

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        if kind == "halving":
            return optax.sgd(optax.exponential_decay(learning_rate, 1, 0.5))
        if kind == "adamw":
            return optax.adamw(learning_rate, weight_decay=0.1)
        return optax.sgd(learning_rate)


def _observe_dtype(x: Any, observe: ObserveCallback) -> Any:
    """Return `x` and report its dtype to `observe` at lowering; during tracing the dtype is the one before autocast."""
    return _observe_p.bind(x, observe=observe)


def _lower_observed(ctx: Any, x: Any, *, observe: ObserveCallback) -> Any:
    observe(str(ctx.avals_in[0].dtype))
    return [x]


_observe_p: Final[Any] = Primitive("observe")
_observe_p.def_abstract_eval(lambda aval, *, observe: aval)
mlir.register_lowering(_observe_p, _lower_observed)
register_rule("observe", "follow")
ad.primitive_jvps[_observe_p] = lambda primals, tangents, *, observe: (
    _observe_p.bind(*primals, observe=observe),
    *tangents,
)


def _dense(name: str) -> Any:
    return linen.Dense(digits.DENSE[name][1], name=name)


def _norm(name: str) -> Any:
    # flax's fast variance, E[x^2] - E[x]^2, loses digits that the other frameworks keep
    return linen.LayerNorm(epsilon=digits.EPSILON, use_fast_variance=False, name=name)


def _widths(layers: Sequence[DenseWeights]) -> tuple[int, ...]:
    return tuple(layer.bias.shape[0] for layer in layers)


def _dense_params(layers: Sequence[DenseWeights]) -> dict[str, Any]:
    return {
        f"dense{n}": {"kernel": jnp.array(layer.kernel), "bias": jnp.array(layer.bias)}
        for n, layer in enumerate(layers)
    }
