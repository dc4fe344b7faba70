"""`MLP`: model family of the reference backend, with optional batch normalisation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import numpy as np

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.reference import float8
from polyamp.reference import tensor as ops
from polyamp.reference.arrays import Array, dtype_name
from polyamp.reference.tensor import Tensor

MOMENTUM: Final = 0.9
EPSILON: Final = 1e-5


class MLP:
    """Multi-layer perceptron: dense -> [batch normalisation] -> relu -> ... -> dense.

    Args:
        parameters: "dense0/kernel" (in, out), "dense0/bias" (out,), ...; with normalisation also "norm0/scale" and
            "norm0/bias".
        running: "norm0/mean" and "norm0/variance" for each normalised layer; empty without normalisation.
        observe: called with the dtype name of every dense layer's result.

    Example:
        >>> model = MLP.random([2, 3, 1], seed=0)
        >>> model(np.ones((4, 2), np.float32)).shape
        (4, 1)
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        running: Mapping[str, Any] | None = None,
        observe: Callable[[str], None] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.running = dict(running or {})
        self.observe = observe
        self.shown: Callable[[str, Tensor, Tensor | None], Tensor] | None = None
        """Hook called with path, output and input of every layer and, with path "" and no input, of the network; it
        returns the output to use."""

    @classmethod
    def random(cls, sizes: Sequence[int], *, seed: int) -> MLP:
        """Return an MLP with layers of these sizes, kernels uniform in +-sqrt(3 / inputs) and biases 0."""
        rng = np.random.default_rng(seed)
        parameters: dict[str, Array] = {}
        for number, (inputs, outputs) in enumerate(pairwise(sizes)):
            limit = (3.0 / inputs) ** 0.5
            parameters[f"dense{number}/kernel"] = rng.uniform(-limit, limit, (inputs, outputs)).astype(np.float32)
            parameters[f"dense{number}/bias"] = np.zeros(outputs, np.float32)
        return cls(parameters)

    def with_arrays(self, parameters: Mapping[str, Any], running: Mapping[str, Any]) -> Self:
        """Return the same network with other parameters and running statistics."""
        made = copy.copy(self)
        made.parameters, made.running = dict(parameters), dict(running)
        return made

    @property
    def depth(self) -> int:
        """Number of dense layers."""
        return sum(name.startswith("dense") and name.endswith("/kernel") for name in self.parameters)

    def module_paths(self) -> list[str]:
        """Paths of the modules, as a policy's overrides use them."""
        return sorted({name.partition("/")[0] for name in self.parameters})

    def __call__(self, x: Any, plan: ResolvedPolicy | None = None) -> Tensor:
        """Return the network's output for x, shape (batch, in); under a policy if `plan` is given."""
        h = self.last(x, plan)
        return self._show("", h if plan is None else ops.cast(h, plan.output))

    def last(self, x: Any, plan: ResolvedPolicy | None) -> Tensor:
        """Return the last layer's output before the cast to the policy's output dtype."""
        h: Any = ops.tensor(x)
        if plan is not None and plan.cast:
            h = ops.cast(h, plan.compute)
        for number in range(self.depth):
            h = self._dense(f"dense{number}", h, plan)
            if number < self.depth - 1:
                if f"norm{number}/scale" in self.parameters:
                    h = self._normalize(f"norm{number}", h, plan)
                h = ops.relu(h)
        result: Tensor = ops.tensor(h)
        return result

    def _dense(self, path: str, h: Tensor, plan: ResolvedPolicy | None) -> Tensor:
        kernel, bias = self.parameters[f"{path}/kernel"], self.parameters[f"{path}/bias"]
        if plan is None:
            result: Tensor = ops.matmul(h, kernel) + bias
        else:
            place = plan.at(path)
            with ops.casting_mode(place.dtype, sensitive=plan.kept):
                if place.float8 is not None and float8.accepts(ops.tensor(kernel).data, place.float8):
                    product = float8.matmul(h, kernel, place.dtype, place.float8)
                else:
                    product = ops.matmul(h, kernel)
                result = product + ops.cast(bias, place.dtype)
        if self.observe is not None:
            self.observe(dtype_name(result.dtype))
        return self._show(path, result, h)

    def _normalize(self, path: str, h: Tensor, plan: ResolvedPolicy | None) -> Tensor:
        given = h
        if plan is not None:
            place = plan.at(path)
            h = ops.cast(h, place.dtype if place.named or plan.cast else "float32")
        transposed = Tensor(h.data.T, [(h, lambda g: g.T)])
        normal = ops.normalize(transposed, EPSILON)
        back = Tensor(normal.data.T, [(normal, lambda g: g.T)])
        wide = h.data.astype(np.float32)
        for name, now in (("mean", wide.mean(axis=0)), ("variance", wide.var(axis=0))):
            old = self.running[f"{path}/{name}"]
            self.running[f"{path}/{name}"] = (MOMENTUM * old + (1.0 - MOMENTUM) * now).astype(np.float32)
        dtype = dtype_name(h.dtype)
        scale, bias = self.parameters[f"{path}/scale"], self.parameters[f"{path}/bias"]
        return self._show(path, back * ops.cast(scale, dtype) + ops.cast(bias, dtype), given)

    def _show(self, path: str, output: Tensor, given: Tensor | None = None) -> Tensor:
        return output if self.shown is None else self.shown(path, output, given)


class GatheredMLP(MLP):
    """MLP whose output is gathered at some rows of the batch, before the cast to the policy's output dtype.

    Args:
        parameters: as `MLP` has them.
        rows: row numbers, shape (reads,).
    """

    def __init__(self, parameters: Mapping[str, Any], rows: Array) -> None:
        super().__init__(parameters)
        self.rows = rows

    def last(self, x: Any, plan: ResolvedPolicy | None) -> Tensor:
        """Return the last layer's output at the rows, shape (reads, out)."""
        return super().last(x, plan)[self.rows]


class PolicyMLP(NamedTuple):
    """Model under its resolved policy, as `loss_fn` receives it."""

    model: MLP
    plan: ResolvedPolicy

    def __call__(self, x: Any) -> Tensor:
        return self.model(x, self.plan)
