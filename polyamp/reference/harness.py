"""Harness of the reference backend for the conformance suite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, ObserveCallback
from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.reference import tensor as ops
from polyamp.reference.arrays import Array
from polyamp.reference.losses import ReferenceLosses
from polyamp.reference.models import EPSILON, MLP, GatheredMLP
from polyamp.results import LossFunction, StepResult


class Branches(MLP):
    """Dense layers in parallel instead of in sequence."""

    def __call__(self, x: Any, plan: ResolvedPolicy | None = None) -> Any:
        """Return one output per layer."""
        return [_single_layer_mlp(self.parameters, number)(x, plan) for number in range(self.depth)]


def _single_layer_mlp(parameters: Mapping[str, Any], number: int) -> MLP:
    """Return an MLP with one of the layers."""
    return MLP({f"dense0/{kind}": parameters[f"dense{number}/{kind}"] for kind in ("kernel", "bias")})


class ReferenceHarness:
    """`Harness` over NumPy, for a backend of this shape."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def array(self, value: Array) -> Any:
        return np.array(value)

    def float64(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def mlp(self, layers: Sequence[DenseWeights], *, observe: ObserveCallback | None = None) -> MLP:
        return MLP(_parameters_by_path(layers), observe=observe)

    def branches(self, layers: Sequence[DenseWeights]) -> MLP:
        return Branches(_parameters_by_path(layers))

    def normalized_mlp(self, layers: Sequence[DenseWeights]) -> MLP:
        width = layers[0].bias.shape
        scale = {"norm0/scale": np.ones(width, np.float32), "norm0/bias": np.zeros(width, np.float32)}
        running = {"norm0/mean": np.zeros(width, np.float32), "norm0/variance": np.ones(width, np.float32)}
        return MLP({**_parameters_by_path(layers), **scale}, running)

    def dropout_mlp(self, layers: Sequence[DenseWeights]) -> None:
        """Return None: the reference's models have no randomness."""

    def constrained_mlp(self, layers: Sequence[DenseWeights], limit: float) -> None:
        """Return None: the parameters of the reference's models are plain values."""

    def digits(self, weights: Mapping[str, Array]) -> Any:
        raise UnsupportedError("the reference backend trains MLPs only; the digits transformer needs a framework.")

    def weights(self, state: Any) -> list[DenseWeights]:
        model = state.model
        return [
            DenseWeights(np.array(model.parameters[f"dense{i}/kernel"]), np.array(model.parameters[f"dense{i}/bias"]))
            for i in range(model.depth)
        ]

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        losses = ReferenceLosses()
        return {
            "exponentials": {"exp": ops.exp},
            "logarithms": {"log": ops.log},
            "powers": {"pow": lambda x: ops.power(x, 3.0), "rsqrt": lambda x: ops.power(x, -0.5)},
            "sums": {"sum": ops.total, "mean": ops.mean},
            "cumulative sums": {"cumsum": ops.cumulative_sum},
            "softmax": {"softmax": ops.softmax, "log_softmax": ops.log_softmax, "logsumexp": ops.log_sum_exp},
            "normalisation": {"layer_norm": lambda x: ops.normalize(x, EPSILON)},
            "losses": {"mean_squared_error": lambda x: losses.mean_squared_error(x, np.zeros((), np.float32))},
        }

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "log(p + eps) of sigmoid": lambda x: ops.log(ops.sigmoid(ops.tensor(x) * -1.0) + 1e-6),
            "log(1 - p) of sigmoid": lambda x: ops.log(1.0 - ops.sigmoid(x)),
            "1 - p of sigmoid": lambda x: 1.0 - ops.sigmoid(x),
        }

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"inner": lambda x: ops.inner(x, x)}

    def matmul(self, left: Any, right: Any) -> Any:
        return ops.matmul(left, right)

    def selected(self, values: Any, mask: Any) -> Any:
        return values[mask]

    def outer(self, left: Any, right: Any) -> Any:
        return ops.outer(left, right)

    def gathered(self, layers: Sequence[DenseWeights], rows: Array) -> MLP:
        return GatheredMLP(_parameters_by_path(layers), rows)

    def unusable(self, kind: str) -> MLP:
        if kind == "empty":
            return MLP({})
        dtype = {"integer": np.int32, "complex": np.complex64, "float16": np.float16}[kind]
        return MLP({"dense0/kernel": np.ones((2, 2), dtype), "dense0/bias": np.ones(2, dtype)})

    def complex_dense(self, kernel: Array) -> Any:
        raise UnsupportedError("the reference trains no complex parameters.")

    def with_head(self, state: Any, head: DenseWeights) -> MLP:
        last = f"dense{state.model.depth - 1}"
        new = {f"{last}/kernel": np.array(head.kernel), f"{last}/bias": np.array(head.bias)}
        return MLP({**state.model.parameters, **new})

    def with_frozen(self, state: Any, numbers: Collection[int]) -> MLP:
        raise UnsupportedError("every parameter of the reference's models is trained.")

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        raise UnsupportedError("NumPy has no optimizers of its own.")

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        """Train one state per replica; `batches[r]` is replica r's. Gradients are averaged before the flag (S9)."""
        backend = self.backend
        states = [backend.init(self.mlp(layers), recipe) for _ in batches]
        run = backend.value_and_grad(loss_fn)
        results: list[StepResult] = []
        for parts in zip(*batches, strict=True):
            own = [run([state], part)[1][0] for state, part in zip(states, parts, strict=True)]
            with np.errstate(all="ignore"):
                shared = {name: np.mean([item.values[name] for item in own], axis=0) for name in own[0].values}
            outcomes = [
                backend.apply_gradients([state], [item._replace(values=shared)], "all")
                for state, item in zip(states, own, strict=True)
            ]
            states = [made[0] for made, _ in outcomes]
            results = [result[0] for _, result in outcomes]
        return list(zip(states, results, strict=True))


def _parameters_by_path(layers: Sequence[DenseWeights]) -> dict[str, Array]:
    named: dict[str, Array] = {}
    for number, layer in enumerate(layers):
        named[f"dense{number}/kernel"] = np.array(layer.kernel)
        named[f"dense{number}/bias"] = np.array(layer.bias)
    return named
