"""`TaggedFigures`: figures of what is tagged in one pass of the training step (S35): outputs of modules in the forward
pass, and products in 8 bits in the backward pass.

A pass is traced, and run with figures as further results. Nested jit is opened; recomputation, scans and branches are
rebuilt around their inner programs, so that what a backward pass runs again is not counted again. Other loops and
custom rules of differentiation stay closed: what is in them has no figures.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.context_values import temporary_value
from polyamp.monitor.slots import MonitorSelection, OutputFigures, check_selected_outputs, output_limits
from polyamp_jax import compat
from polyamp_jax.observe.capture import TaggingEngine
from polyamp_jax.observe.jax_only.library_observer import observer_of
from polyamp_jax.observe.jax_only.output_tags import inline_program, run_equations, tag_module_outputs, tagged_paths
from polyamp_jax.precision.interpreter.float8_products import PRODUCT_TAG, measures_products
from polyamp_jax.precision.interpreter.tag_primitive import TAG_PRIMITIVE
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine

_SUMS: Final = (6,)
_PRODUCT_SUMS: Final = (3, 4)
Found = dict[str, OutputFigures]


class TaggedFigures:
    """Measures the outputs of a model's modules, and its products in 8 bits.

    Args:
        selection: which of them, and the dtype that outputs are judged in.

    Attributes:
        engine_class: the engine of the model.
        selection: as given.
    """

    def __init__(self, selection: MonitorSelection) -> None:
        self.selection = selection
        self.engine_class: type[PolicyEngine] = _OutputEngine if selection.activations else _ProductEngine

    @contextlib.contextmanager
    def tagged(self) -> Iterator[None]:
        """Context manager in which products, and the modules of linen and haiku, tag their figures."""
        outputs = tag_module_outputs() if self.selection.activations else contextlib.nullcontext()
        with temporary_value(measures_products, self.selection.products), outputs:
            yield

    def measured(self, function: Callable[..., Any], due: Any) -> Callable[..., tuple[Any, Found]]:
        """Return a function of pytrees with the figures of the outputs that are tagged in it, if any are selected.

        Raises:
            ArgumentError: when it is called: the selection matches no module.
        """

        def run(*args: Any) -> tuple[Any, Found]:
            if not self.selection.activations:
                return function(*args), {}
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            measure = _OutputMeasurement(self.selection, due)
            found: Found = {}
            out = measure.run(program.jaxpr, program.consts, jax.tree.leaves(args), found)
            check_selected_outputs(self.selection, measure.seen)
            return jax.tree.unflatten(jax.tree.structure(shapes), out), found

        return run

    def run_backward(self, program: compat.ClosedJaxpr, cotangent: Any) -> tuple[list[Any], dict[str, Any]]:
        """Run the program of a backward pass; return its results, and the figures of the products that are tagged."""
        found: Found = {}
        out = _ProductMeasurement().run(program.jaxpr, program.consts, [cotangent], found)
        return out, {path: each.sums for path, each in found.items()}


class _OutputEngine(TaggingEngine):
    """Engine of a model whose modules tag their outputs, and its products in 8 bits."""

    def watch_layers(self) -> contextlib.AbstractContextManager[None]:
        model = self.view()
        return observer_of(model).tag_figures(model, outputs=True)


class _ProductEngine(PolicyEngine):
    """Engine of a model whose products in 8 bits are tagged."""

    def watch_layers(self) -> contextlib.AbstractContextManager[None]:
        model = self.view()
        return observer_of(model).tag_figures(model, outputs=False)


class _TagMeasurement:
    """One run of a program whose tags of one kind are measured. Figures of any kind are an `OutputFigures`.

    Attributes:
        what: the kind.
        shape: shape of the sums of its figures.
    """

    what: str
    shape: tuple[int, ...]

    def see(self, path: str, value: Any, found: Found) -> None:
        """Add the figures of a tagged value to `found`."""
        raise NotImplementedError  # each kind of figures defines it

    def selects(self, path: str) -> bool:
        """Return whether a module is measured."""
        raise NotImplementedError  # each kind of figures defines it

    def run(self, jaxpr: compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], found: Found) -> list[Any]:
        """Run a program and return its outputs; add the figures of the tags in it to `found`."""
        return run_equations(jaxpr, consts, args, functools.partial(self._equation, found=found))

    def _equation(self, eqn: compat.JaxprEqn, operands: list[Any], *, found: Found) -> list[Any]:
        if eqn.primitive is TAG_PRIMITIVE:
            if eqn.params["what"] == self.what:
                self.see(eqn.params["path"], operands[0], found)
            return operands
        inline = inline_program(eqn)
        name = compat.primitive_name(eqn)
        if name in _REBUILT and tagged_paths(eqn, self.what):
            out, own = _REBUILT[name](self, eqn, operands)
            for path, figures in own.items():
                found[path] = _together(found.get(path), figures)
            return out
        if inline is not None:
            return self.run(*inline, operands, found)
        return compat.bind_equation(eqn, operands, eqn.params)

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
        paths = [path for path in tagged_paths(eqn, self.what) if self.selects(path)]

        def branch(closed: compat.ClosedJaxpr) -> Callable[..., tuple[list[Any], Found]]:
            def inner(*args: Any) -> tuple[list[Any], Found]:
                found: Found = {}
                out = self.run(closed.jaxpr, closed.consts, args, found)
                return out, {path: found.get(path, _nothing(jnp.zeros(()), self.shape)) for path in paths}

            return inner

        index, *arrays = operands
        out: tuple[list[Any], Found] = jax.lax.switch(index, [branch(each) for each in eqn.params["branches"]], *arrays)
        return out


_REBUILT: Final = {"remat": _TagMeasurement.remat, "scan": _TagMeasurement.scan, "cond": _TagMeasurement.cond}


class _OutputMeasurement(_TagMeasurement):
    """Outputs of modules in a forward pass.

    Args:
        selection: of the monitor.
        due: whether figures are computed, boolean scalar; None if they always are.

    Attributes:
        seen: the paths of the modules whose outputs are reached.
    """

    what = "output"
    shape = _SUMS

    def __init__(self, selection: MonitorSelection, due: Any) -> None:
        self._selection, self._due = selection, due
        self._limits = output_limits(selection.compute)
        self.seen: dict[str, None] = {}

    def selects(self, path: str) -> bool:
        """Return whether a module is selected."""
        return self._selection.measures_output_of(path)

    def see(self, path: str, value: Any, found: Found) -> None:
        """Add the figures of a module's output to `found`, if it is selected."""
        self.seen[path] = None
        if self.selects(path):
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


class _ProductMeasurement(_TagMeasurement):
    """Products in 8 bits in a backward pass, whose tagged values are the figures."""

    what = PRODUCT_TAG
    shape = _PRODUCT_SUMS

    def selects(self, path: str) -> bool:
        """Return True: all products are measured."""
        return True

    def see(self, path: str, value: Any, found: Found) -> None:
        """Add the figures of a product to `found`."""
        axes = sorted(compat.varying_axes(value))
        largest = jnp.zeros((), jnp.float32)
        figures = OutputFigures(value, compat.vary_over_axes(largest, axes) if axes else largest)
        found[path] = _together(found.get(path), figures)


def _nothing(value: Any, shape: tuple[int, ...] = _SUMS) -> OutputFigures:
    """Return the figures of no element, varying over the axes of `value`."""
    axes = sorted(compat.varying_axes(value))
    sums, largest = jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.float32)
    return OutputFigures(*(compat.vary_over_axes(each, axes) if axes else each for each in (sums, largest)))


def _together(one: OutputFigures | None, other: OutputFigures) -> OutputFigures:
    """Return the figures of two calls together."""
    if one is None:
        return other
    return OutputFigures(one.sums + other.sums, jnp.maximum(one.largest, other.largest))
