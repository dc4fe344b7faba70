"""Figures of modules' outputs on their way out of a step, for a monitor (S35). What measures them comes from above.

The figures of a pass leave it beside the loss function's own `aux`, which JAX stacks over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from polyamp.monitor.slots import MonitorSlots, OutputFigures
from polyamp.results import LossFunction
from polyamp_jax import compat
from polyamp_jax.distributed.replicas import AxisName
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine


class OutputWatch(Protocol):
    """What measures the outputs of modules in a pass.

    Attributes:
        engine_class: the engine of the model, whose modules tag their outputs.
    """

    engine_class: type[PolicyEngine]

    def tagged(self) -> AbstractContextManager[None]:
        """Return a block in which the modules of libraries with interceptors tag their outputs."""

    def measured(self, function: Callable[..., Any], due: Any) -> Callable[..., tuple[Any, dict[str, OutputFigures]]]:
        """Return `function` with the figures of the outputs that are tagged in it; zeros unless `due`, if that is a
        scalar and not None."""


class WatchedLoss(NamedTuple):
    """A loss function in whose passes outputs are measured.

    Attributes:
        loss_fn: the user's.
        watch: what measures.
        due: boolean scalar, whether the figures are computed; None if they always are.
    """

    loss_fn: LossFunction
    watch: OutputWatch
    due: Any


def with_output_figures(slots: MonitorSlots, figures: dict[str, OutputFigures], axis_name: AxisName) -> MonitorSlots:
    """Return a step's slots with figures of its micro-batches, which have leading axes, over all of these and over all
    replicas."""
    return slots._replace(activations={path: _total(each, axis_name) for path, each in figures.items()})


def _total(figures: OutputFigures, axis_name: AxisName) -> OutputFigures:
    sums = jnp.sum(jnp.reshape(figures.sums, (-1, figures.sums.shape[-1])), axis=0)
    largest = jnp.max(figures.largest)
    named = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    axes = tuple(sorted(compat.varying_axes(sums))) or named
    lax: Any = jax.lax  # JAX does not annotate its collectives
    return OutputFigures(lax.psum(sums, axes), lax.pmax(largest, axes)) if axes else OutputFigures(sums, largest)
