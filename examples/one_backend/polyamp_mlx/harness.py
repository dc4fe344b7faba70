"""`MLXHarness`: the models of the conformance suite in MLX, with weights from NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from polyamp.contract.harness import DenseWeights, ObserveCallback
from polyamp.demo.digits import DENSE, EPSILON, HEADS, NORMS, WIDTH
from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp_mlx.arrays import Array, dtype_name, to_device, to_numpy


def dense_layer(layer: DenseWeights) -> nn.Linear:
    """Return a layer with these weights; MLX's kernels are (out, in)."""
    made = nn.Linear(*layer.kernel.shape)
    made.weight, made.bias = mx.array(layer.kernel.T), mx.array(layer.bias)
    return made


class MLXMLP(nn.Module):  # type: ignore[misc]  # to mypy, all of MLX is Any
    """MLP: dense0 -> relu -> dense1 -> ...; `between` is applied between the first two."""

    def __init__(
        self, layers: Sequence[DenseWeights], observe: ObserveCallback | None = None, between: Any = None
    ) -> None:
        super().__init__()
        self.depth, self.observe, self.between = len(layers), observe, between
        for number, layer in enumerate(layers):
            self[f"dense{number}"] = dense_layer(layer)

    def __call__(self, x: mx.array) -> mx.array:
        for number in range(self.depth):
            x = self[f"dense{number}"](x)
            if self.observe is not None:
                self.observe(dtype_name(x))
            if number == 0 and isinstance(self.between, nn.BatchNorm):
                x = self.between(x)
            if number < self.depth - 1:
                x = nn.relu(x)
            if number == 0 and isinstance(self.between, nn.Dropout):
                x = self.between(x)
        return x


class MLXConstrainedMLP(MLXMLP):
    """MLP that clips its first kernel before it uses it."""

    def __init__(self, layers: Sequence[DenseWeights], limit: float) -> None:
        super().__init__(layers)
        self.limit = limit

    def __call__(self, x: mx.array) -> mx.array:
        kernel = self.dense0.weight
        self.dense0.weight = kernel + mx.stop_gradient(mx.clip(kernel, -self.limit, self.limit) - kernel)
        return super().__call__(x)


class MLXBranches(MLXMLP):
    """Dense layers in parallel."""

    def __call__(self, x: mx.array) -> tuple[mx.array, ...]:
        return tuple(self[f"dense{number}"](x) for number in range(self.depth))


class MLXGatheredMLP(MLXMLP):
    """MLP whose output is gathered at some rows of the batch."""

    def __init__(self, layers: Sequence[DenseWeights], rows: Array) -> None:
        super().__init__(layers)
        self.rows = rows.tolist()

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x)[mx.array(self.rows)]


class MLXDigits(nn.Module):  # type: ignore[misc]  # to mypy, all of MLX is Any
    """Transformer of `polyamp.demo.digits`."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__()
        for name in DENSE:
            self[name] = dense_layer(DenseWeights(weights[f"{name}/kernel"], weights[f"{name}/bias"]))
        for name in NORMS:
            self[name] = nn.LayerNorm(WIDTH, eps=EPSILON)
            self[name].weight, self[name].bias = (mx.array(weights[f"{name}/{part}"]) for part in ("scale", "bias"))

    def __call__(self, x: mx.array) -> mx.array:
        h = self.embed(x)
        normal = self.norm1(h)
        q, k, v = (
            layer(normal).reshape(len(x), -1, HEADS, WIDTH // HEADS).swapaxes(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = mx.softmax(q @ k.swapaxes(2, 3) / (WIDTH / HEADS) ** 0.5, axis=-1)
        h = h + self.out((scores @ v).swapaxes(1, 2).reshape(h.shape))
        h = h + self.mlp2(nn.relu(self.mlp1(self.norm2(h))))
        logits: mx.array = self.head(self.norm3(h).reshape(len(x), -1))
        return logits


class MLXHarness:
    """`Harness` over MLX."""

    def array(self, value: Array) -> mx.array:
        return to_device(value)

    def float64(self) -> contextlib.AbstractContextManager[Any]:
        raise UnsupportedError("MLX computes float64 on the CPU alone.")

    def mlp(self, layers: Sequence[DenseWeights], *, observe: ObserveCallback | None = None) -> nn.Module:
        return MLXMLP(layers, observe)

    def branches(self, layers: Sequence[DenseWeights]) -> nn.Module:
        return MLXBranches(layers)

    def normalized_mlp(self, layers: Sequence[DenseWeights]) -> nn.Module:
        return MLXMLP(layers, between=nn.BatchNorm(len(layers[0].bias)))

    def dropout_mlp(self, layers: Sequence[DenseWeights]) -> tuple[nn.Module, dict[str, Any]]:
        return MLXMLP(layers, between=nn.Dropout(0.5)), {"seed": 7}

    def constrained_mlp(self, layers: Sequence[DenseWeights], limit: float) -> nn.Module:
        return MLXConstrainedMLP(layers, limit)

    def digits(self, weights: Mapping[str, Array]) -> nn.Module:
        return MLXDigits(weights)

    def weights(self, state: Any) -> list[DenseWeights]:
        layers = [state.model[name] for name in sorted(state.model) if name.startswith("dense")]
        return [DenseWeights(to_numpy(layer.weight).T, to_numpy(layer.bias)) for layer in layers]

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        return {
            "exponentials": {"exp": lambda x: mx.exp(x), "method": lambda x: x.exp()},
            "logarithms": {"log": lambda x: mx.log(x)},
            "powers": {"pow": lambda x: x**3.0, "rsqrt": lambda x: mx.rsqrt(x)},
            "sums": {"sum": lambda x: x.sum(), "mean": lambda x: mx.mean(x, axis=-1), "var": lambda x: mx.var(x, -1)},
            "cumulative sums": {"cumsum": lambda x: mx.cumsum(x, axis=-1)},
            "softmax": {
                "softmax": lambda x: mx.softmax(x, axis=-1),
                "log_softmax": lambda x: x - mx.logsumexp(x, axis=-1, keepdims=True),
            },
            "normalisation": {
                "layer_norm": lambda x: mx.fast.layer_norm(x, None, None, EPSILON),
                "norm": lambda x: mx.linalg.norm(x, axis=-1),
            },
            "losses": {"mse_loss": lambda x: nn.losses.mse_loss(x, mx.zeros_like(x))},
            "linear algebra": {
                "inv": lambda x: mx.linalg.inv(x[:, :4], stream=mx.cpu),
                "qr": lambda x: mx.linalg.qr(x[:, :4], stream=mx.cpu)[1],
            },
            "FFT": {"fft": lambda x: mx.fft.fft(x), "rfft": lambda x: mx.fft.rfft(x)},
        }

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "log(p + eps) of sigmoid": lambda x: mx.log(mx.sigmoid(-x) + 1e-6),
            "log(1 - p) of sigmoid": lambda x: mx.log(1.0 - mx.sigmoid(x)),
            "1 - p of nn.sigmoid": lambda x: 1.0 - nn.sigmoid(x),
            "1 - erf": lambda x: 1.0 - mx.erf(x),
        }

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "einsum": lambda x: mx.einsum("bi,bi->b", x, x),
            "matmul under vmap": mx.vmap(lambda row: row @ row),
            "vecdot": lambda x: mx.vecdot(x, x, axis=-1),
        }

    def matmul(self, left: Any, right: Any) -> Any:
        return left @ right

    def selected(self, values: Any, mask: Any) -> Any:
        raise UnsupportedError("MLX has no boolean indices that read.")

    def outer(self, left: Any, right: Any) -> Any:
        return mx.einsum("i,j->ij", left, right)

    def gathered(self, layers: Sequence[DenseWeights], rows: Array) -> nn.Module:
        return MLXGatheredMLP(layers, rows)

    def unusable(self, kind: str) -> nn.Module:
        if kind == "empty":
            return MLXMLP([])
        dtype = {"integer": np.int32, "complex": np.complex64, "float16": np.float16}[kind]
        return MLXMLP([DenseWeights(np.ones((2, 2), dtype), np.ones(2, dtype))])

    def complex_dense(self, kernel: Array) -> Any:
        raise UnsupportedError("the MLX backend trains no complex parameters.")

    def with_head(self, state: Any, head: DenseWeights) -> nn.Module:
        model = state.model
        model[f"dense{model.depth - 1}"] = dense_layer(head)
        return model

    def with_frozen(self, state: Any, numbers: Collection[int]) -> nn.Module:
        model = state.model
        for number in range(model.depth):
            layer = model[f"dense{number}"]
            layer.freeze() if number in numbers else layer.unfreeze()
        return model

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        from mlx.optimizers import SGD

        return SGD(learning_rate)

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        raise UnsupportedError("the mlx backend trains on one device; mx.distributed is not used.")
