"""Figures of a pass on their way out of a step, for a monitor (S35): of modules' outputs, and of products in 8 bits.

What measures them comes from above. The figures of a pass leave it beside the loss function's own `aux`, which JAX
stacks over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from polyamp.monitor.slots import MonitorSelection, MonitorSlots, OutputFigures
from polyamp.results import LossFunction
from polyamp_jax import compat
from polyamp_jax.distributed.replicas import AxisName
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine


class PassFigures(NamedTuple):
    """Figures of a pass; None of what is not selected.

    Attributes:
        activations, products: as in `MonitorSlots`.
    """

    activations: dict[str, OutputFigures] | None
    products: dict[str, Any] | None


class PassWatch(Protocol):
    """What measures the outputs of modules, and products in 8 bits, in a pass.

    Attributes:
        engine_class: the engine of the model, whose modules tag their outputs.
        selection: what is measured.
    """

    engine_class: type[PolicyEngine]
    selection: MonitorSelection

    def tagged(self) -> AbstractContextManager[None]:
        """Return a block in which products, and the modules of libraries with interceptors, tag their figures."""

    def measured(self, function: Callable[..., Any], due: Any) -> Callable[..., tuple[Any, dict[str, OutputFigures]]]:
        """Return `function` with the figures of the outputs that are tagged in it; zeros unless `due`, if that is a
        scalar and not None."""

    def run_backward(self, program: compat.ClosedJaxpr, cotangent: Any) -> tuple[list[Any], dict[str, Any]]:
        """Run the program of a backward pass; return its results, and the figures of the products that are tagged."""


class WatchedLoss(NamedTuple):
    """A loss function in whose passes figures are measured.

    Attributes:
        loss_fn: the user's.
        watch: what measures.
        due: boolean scalar, whether the figures are computed; None if they always are.
    """

    loss_fn: LossFunction
    watch: PassWatch
    due: Any


def with_pass_figures(slots: MonitorSlots, figures: PassFigures, axis_name: AxisName) -> MonitorSlots:
    """Return a step's slots with figures of its micro-batches, which have leading axes, over all of these and over all
    replicas."""
    outputs, products = figures
    if outputs is not None:
        outputs = {
            path: OutputFigures(_sum(each.sums, 1, axis_name), _maximum(each.largest, axis_name))
            for path, each in outputs.items()
        }
    if products is not None:
        products = {path: _sum(each, 2, axis_name) for path, each in products.items()}
    return slots._replace(activations=outputs, products=products)


def _sum(sums: Any, rank: int, axis_name: AxisName) -> Any:
    """Return the sum over the leading axes of sums of this rank, and over the replicas."""
    lax: Any = jax.lax  # JAX does not annotate its collectives
    total = jnp.sum(jnp.reshape(sums, (-1, *sums.shape[sums.ndim - rank :])), axis=0)
    return lax.psum(total, axes) if (axes := _axes(total, axis_name)) else total


def _maximum(values: Any, axis_name: AxisName) -> Any:
    """Return the largest value, over the replicas too."""
    lax: Any = jax.lax  # JAX does not annotate its collectives
    largest = jnp.max(values)
    return lax.pmax(largest, axes) if (axes := _axes(largest, axis_name)) else largest


def _axes(array: Any, axis_name: AxisName) -> tuple[str, ...]:
    """Return the axes over which the replicas' figures differ."""
    named = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return tuple(sorted(compat.varying_axes(array))) or named
