"""`TaggedOutputs`: figures of the outputs that modules tag, in one pass of the training step (S35).

The forward pass is traced, and run with figures as further results. Nested jit is opened; recomputation, scans and
branches are rebuilt around their inner programs, so that what a backward pass runs again is not counted again. Other
loops and custom rules of differentiation stay closed: the modules that are called in them have no figures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.monitor.slots import MonitorSelection, OutputFigures, check_selected_outputs, output_limits
from polyamp_jax import compat
from polyamp_jax.observe.capture import TaggingEngine
from polyamp_jax.observe.jax_only.output_tags import inline_program, run_equations, tag_module_outputs, tagged_paths
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine

_SUMS: Final = 6
Found = dict[str, OutputFigures]


class TaggedOutputs:
    """Measures the outputs of a model's modules.

    Args:
        selection: which of them, and the dtype that they are judged in.
    """

    engine_class: type[PolicyEngine] = TaggingEngine

    def __init__(self, selection: MonitorSelection) -> None:
        self._selection = selection

    def tagged(self) -> AbstractContextManager[None]:
        """Return a block in which the modules of linen and haiku tag their outputs."""
        return tag_module_outputs()

    def measured(self, function: Callable[..., Any], due: Any) -> Callable[..., tuple[Any, Found]]:
        """Return a function of pytrees with the figures of the outputs that are tagged in it.

        Raises:
            ArgumentError: when it is called: the selection matches no module.
        """

        def run(*args: Any) -> tuple[Any, Found]:
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            measure = _Measurement(self._selection, due)
            found: Found = {}
            out = measure.run(program.jaxpr, program.consts, jax.tree.leaves(args), found)
            check_selected_outputs(self._selection, measure.seen)
            return jax.tree.unflatten(jax.tree.structure(shapes), out), found

        return run


class _Measurement:
    """One pass.

    Args:
        selection: of the monitor.
        due: whether figures are computed, boolean scalar; None if they always are.

    Attributes:
        seen: the paths of the modules whose outputs are reached.
    """

    def __init__(self, selection: MonitorSelection, due: Any) -> None:
        self._selection, self._due = selection, due
        self._limits = output_limits(selection.compute)
        self.seen: dict[str, None] = {}

    def run(self, jaxpr: compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], found: Found) -> list[Any]:
        """Run a program and return its outputs; add the figures of the outputs in it to `found`."""
        return run_equations(jaxpr, consts, args, functools.partial(self._equation, found=found))

    def _equation(self, eqn: compat.JaxprEqn, operands: list[Any], *, found: Found) -> list[Any]:
        if eqn.primitive is TAG_PRIMITIVE:
            self._see(eqn.params, operands[0], found)
            return operands
        inline = inline_program(eqn)
        name = compat.primitive_name(eqn)
        if name in _REBUILT and tagged_paths(eqn):
            out, own = _REBUILT[name](self, eqn, operands)
            for path, figures in own.items():
                found[path] = _together(found.get(path), figures)
            return out
        if inline is not None:
            return self.run(*inline, operands, found)
        return compat.bind_equation(eqn, operands, eqn.params)

    def _see(self, params: Mapping[str, Any], value: Any, found: Found) -> None:
        path = params["path"]
        if params["what"] != "output":
            return
        self.seen[path] = None
        if self._selection.measures_output_of(path):
            found[path] = _together(found.get(path), self._figures(jax.lax.stop_gradient(value)))

    def _figures(self, value: Any) -> OutputFigures:
        if self._due is None:
            return self._measured(value)
        found: OutputFigures = jax.lax.cond(self._due, self._measured, _nothing, value)
        return found

    def _measured(self, value: Any) -> OutputFigures:
        wide = jnp.abs(value.astype(jnp.promote_types(value.dtype, jnp.float32)))
        zeros, lost = jnp.sum(wide == 0.0), jnp.sum(wide <= self._limits.zero)
        below, within = jnp.sum(wide < self._limits.normal), jnp.sum(wide < self._limits.overflow)
        shares = [wide.size, zeros, lost - zeros, below - lost, wide.size - within, jnp.sum(jnp.square(wide))]
        largest = jnp.max(wide, initial=0.0).astype(jnp.float32)
        sums = jnp.stack([jnp.asarray(each).astype(jnp.float32) for each in shares])
        return OutputFigures(sums, jnp.where(jnp.isnan(largest), jnp.inf, largest))

    def remat(self, eqn: compat.JaxprEqn, operands: list[Any]) -> tuple[list[Any], Found]:
        """Rebuild a recomputed function, whose figures are those of its forward pass."""

        def inner(*args: Any) -> tuple[list[Any], Found]:
            found: Found = {}
            return self.run(eqn.params["jaxpr"], (), args, found), found

        how = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        out: tuple[list[Any], Found] = jax.checkpoint(inner, **how)(*operands)
        return out

    def scan(self, eqn: compat.JaxprEqn, operands: list[Any]) -> tuple[list[Any], Found]:
        """Rebuild a scan, whose figures are those of all iterations."""
        closed = eqn.params["jaxpr"]
        first, carried = compat.scan_counts(eqn)
        split = first + carried

        def body(carry: list[Any], items: list[Any]) -> tuple[list[Any], tuple[list[Any], Found]]:
            found: Found = {}
            out = self.run(closed.jaxpr, closed.consts, [*operands[:first], *carry, *items], found)
            return out[:carried], (out[carried:], found)

        how = compat.scan_options(eqn)
        final, (stacked, found) = jax.lax.scan(body, operands[first:split], operands[split:], **how)
        totals = {
            path: OutputFigures(jnp.sum(each.sums, axis=0), jnp.max(each.largest, axis=0, initial=0.0))
            for path, each in found.items()
        }
        return [*final, *stacked], totals

    def cond(self, eqn: compat.JaxprEqn, operands: list[Any]) -> tuple[list[Any], Found]:
        """Rebuild a branch; modules of branches that are not taken have no elements."""
        paths = [path for path in tagged_paths(eqn) if self._selection.measures_output_of(path)]

        def branch(closed: compat.ClosedJaxpr) -> Callable[..., tuple[list[Any], Found]]:
            def inner(*args: Any) -> tuple[list[Any], Found]:
                found: Found = {}
                out = self.run(closed.jaxpr, closed.consts, args, found)
                return out, {path: found.get(path, _nothing(jnp.zeros(()))) for path in paths}

            return inner

        index, *arrays = operands
        out: tuple[list[Any], Found] = jax.lax.switch(index, [branch(each) for each in eqn.params["branches"]], *arrays)
        return out


_REBUILT: Final = {"remat": _Measurement.remat, "scan": _Measurement.scan, "cond": _Measurement.cond}


def _nothing(value: Any) -> OutputFigures:
    """Return the figures of no element, varying over the axes of `value`."""
    axes = sorted(compat.varying_axes(value))
    sums, largest = jnp.zeros(_SUMS, jnp.float32), jnp.zeros((), jnp.float32)
    return OutputFigures(*(compat.vary_over_axes(each, axes) if axes else each for each in (sums, largest)))


def _together(one: OutputFigures | None, other: OutputFigures) -> OutputFigures:
    """Return the figures of two calls together."""
    if one is None:
        return other
    return OutputFigures(one.sums + other.sums, jnp.maximum(one.largest, other.largest))
