"""Adapters for equinox modules, with or without `eqx.nn.State`. Loaded by `models.adapt`."""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, ClassVar

import equinox as eqx
import jax

from polyamp.errors import ModelError, PolyampError, TraceError
from polyamp_jax.arrays import named_leaves, path_name
from polyamp_jax.models.bound_equinox import bind
from polyamp_jax.models.call_hook import calling, set_class
from polyamp_jax.models.parameter_writes import writes
from polyamp_jax.models.parts import Keys, Opaque, Parts, Running, owners
from polyamp_jax.models.routes import Route, accepts, narrowed
from polyamp_jax.models.scopes import Casts


@dataclasses.dataclass(frozen=True)
class EquinoxAdapter:
    """An equinox module: inexact arrays are trained, other arrays and the `State` run with the step.

    Without `axis_name` the bound model is called as the module itself is, less its state. With it, positional
    arguments are mapped over axis 0 (equinox modules take one example), every example has a random key of its own,
    and the `State` is shared.
    """

    static: Opaque
    stateful: bool
    axis_name: str | None
    pinned: frozenset[str]
    stream: str | None = "key"
    mutable: ClassVar[bool] = False
    module: ClassVar[type | tuple[type, ...]] = eqx.Module

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        buffers, state = running.statistics
        module = self._cast(eqx.combine(params, buffers, self.static.value), casts)
        own = named_leaves(eqx.filter(module, eqx.is_inexact_array))
        function = route.function(module)
        keys = {name: key for name, key in keys.items() if name not in kwargs}
        stateful = self.stateful
        if route.steps:  # a part takes what it names; of the model itself it is known
            keys = {name: key for name, key in keys.items() if accepts(function, name)}
            stateful = stateful and "state" not in kwargs and accepts(function, "state")
        args, kwargs = narrowed(route, casts, args, kwargs)

        def run(axis_name: str | None, keys: Any) -> tuple[Any, Any]:
            own = jax.tree.map(lambda leaf: leaf, state)  # a State dies when it is used; the copy dies in its place

            def one(args: Any, keys: Any) -> tuple[Any, Any]:
                if not stateful:
                    return function(*args, **keys, **kwargs), own
                output, changed = function(*args, own, **keys, **kwargs)
                return output, changed

            if axis_name is not None and jax.tree.leaves(args):
                size = jax.tree.leaves(args)[0].shape[0]
                keys = {name: jax.random.split(key, size) for name, key in keys.items()}
                one = jax.vmap(one, in_axes=(0, 0), out_axes=(0, None), axis_name=axis_name)
            return one(args, keys)

        with calling(casts), casts.scope(route.path if route.is_method and casts.scoped else ""):
            try:
                output, changed = run(self.axis_name, keys)
            except Exception as error:
                self._refuse_unpaired(run, args, keys, error)
                raise
        if lost := writes(own, eqx.filter(module, eqx.is_inexact_array)):
            raise TraceError(
                f"the forward pass writes to {next(iter(lost))!r} of an equinox module with object.__setattr__. These "
                "modules are immutable, and the write would be lost. Compute the new value where it is needed, or keep "
                "it in an eqx.nn.State."
            )
        return output, running._replace(statistics=(buffers, changed))

    def _refuse_unpaired(self, run: Callable[..., Any], args: Any, keys: Keys, error: Exception) -> None:
        """After a call failed: say which of `axis_name=` and `rngs=` is missing or too much, if the call works so.

        Raises:
            ModelError: with both lines.
        """
        if isinstance(error, PolyampError):
            return
        drawn = dict(keys) or {"key": jax.random.key(0)}
        name = _unbound_axis(error) or self.axis_name or "batch"
        for mapped, streams in ((True, keys), (True, drawn), (True, {}), (False, drawn), (False, {})):
            axis_name = name if mapped else None
            failure = _failure(run, axis_name, streams)
            if mapped and (other := _unbound_axis(failure)):
                axis_name = other  # that of a module inside
                failure = _failure(run, axis_name, streams)
            if failure is not None or (axis_name, bool(streams)) == (self.axis_name, bool(keys)):
                continue
            options = {"axis_name": axis_name, "rngs": 0 if streams else None}
            given = [f"{key}={value!r}" for key, value in options.items() if value is not None]
            line = f"polyamp.init({', '.join(['model, recipe', *given])})"
            if not mapped and streams:
                line += ", with axis_name='batch' where loss_fn maps the module by jax.vmap"
            raise ModelError(
                "the equinox module does not run as polyamp.init has it: axis_name= maps a module that is written for "
                "one example over the rows of the batch, and rngs= gives it a random key, with axis_name= one for "
                f"every row. Write {line}, and in loss_fn model(x), without jax.vmap and key=. Received: "
                f"axis_name={self.axis_name!r} {'and' if keys else 'and no'} rngs=. ({_first_line(error)})"
            ) from error

    def view(self, params: Any, running: Running) -> Any:
        return eqx.combine(params, running.statistics[0], self.static.value)

    def with_part(self, route: Route, part: Any, params: Any, running: Running) -> tuple[EquinoxAdapter, Any, Running]:
        """The model with a copy in the place of the module that `route` leads to or belongs to."""
        model, steps = self.view(params, running), route.steps[:-1] if route.is_method else route.steps
        whole = eqx.tree_at(Route(steps).walked, model, part) if steps else part
        params, rest = eqx.partition(whole, eqx.is_inexact_array)
        buffers, static = eqx.partition(rest, eqx.is_array)
        made = dataclasses.replace(self, static=Opaque(static))
        return made, params, running._replace(statistics=(buffers, running.statistics[1]))

    def bound(self, engine: Any) -> Any:
        owner = weakref.ref(engine) if engine.shared is None else lambda: engine
        engine.root = bind(self.view(engine.masters, engine.start), owner)
        return engine.root

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return route.walked(params)

    def state_of(self, running: Running) -> Any:
        state = running.statistics[1]
        return jax.tree.map(lambda leaf: leaf, state) if self.stateful else None

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        module = eqx.combine(params, running.statistics[0], self.static.value)
        return [*owners(params), *(path for path, _ in modules_in(module))]

    def join(self, params: Any, running: Running) -> Any:
        buffers, state = running.statistics
        module = eqx.combine(params, buffers, self.static.value)
        return (module, jax.tree.map(lambda leaf: leaf, state)) if self.stateful else module

    def check_streams(self, names: Collection[str]) -> None:
        """Every stream is a keyword argument, so any name will do."""

    def _cast(self, module: Any, casts: Casts) -> Any:
        """The module with copies in place of those inside it that cast their inputs or open scopes."""
        if not casts.scoped and not casts.dtypes and not self.pinned:
            return module
        plan = casts.plan

        def copied(node: Any, keys: tuple[Any, ...]) -> Any:
            children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
            if jax.tree_util.treedef_is_leaf(structure) or _is_index(node):
                return node
            made = jax.tree.unflatten(structure, [copied(child, keys + key) for key, child in children])
            if isinstance(node, eqx.Module):
                path = path_name(keys)
                if casts.scoped:
                    casts.expect([path])
                    set_class(made, path, casts)
                elif path in self.pinned and plan.at(path).named is None and plan.compute != plan.param:
                    set_class(made, path, casts, inputs=plan.param, outputs=plan.compute, kept=(eqx.nn.State,))
                elif path in casts.dtypes:  # what an override narrows narrows its state: the dtypes must agree
                    set_class(made, path, casts, kept=() if path in self.pinned else (eqx.nn.State,))
            return made

        return copied(module, ())


def _failure(run: Callable[..., Any], axis_name: str | None, keys: Any) -> Exception | None:
    """What a call raises, or None."""
    try:
        jax.eval_shape(lambda: run(axis_name, keys))
    except Exception as error:  # noqa: BLE001  # whatever a model raises
        return error
    return None


def _unbound_axis(error: Exception | None) -> str | None:
    """The mapped axis that a call asked for in vain, by JAX's words."""
    found = re.search(r"unbound axis name: (\w+)", str(error))
    return found[1] if found else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def adapt_equinox(model: Any, axis_name: str | None) -> Parts:
    """The parts of an equinox module, or of `(module, eqx.nn.State)`."""
    module, state = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(module, eqx.Module) or (state is not None and not isinstance(state, eqx.nn.State)):
        raise ModelError(
            "pass an equinox model as the module, or as (module, state) with the eqx.nn.State that "
            f"eqx.nn.make_with_state(...) returned. Received: {model!r}."
        )
    params, rest = eqx.partition(module, eqx.is_inexact_array)
    buffers, static = eqx.partition(rest, eqx.is_array)
    adapter = EquinoxAdapter(Opaque(static), state is not None, axis_name, _pinned(module))
    return Parts(adapter, params, Running((buffers, state), ()))


def modules_in(node: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(path, module) of an equinox module and of those inside it."""
    children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
    if jax.tree_util.treedef_is_leaf(structure) or _is_index(node):
        return
    if isinstance(node, eqx.Module):
        yield path_name(keys), node
    for key, child in children:
        yield from modules_in(child, keys + key)


def _pinned(module: Any) -> frozenset[str]:
    """Paths of the modules that keep a state, which are equinox's BatchNorm and SpectralNorm.

    BatchNorm selects between its statistics (float32) and its input's, which must agree in dtype.
    """
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_index)
    return frozenset(path_name(keys[:-1]) for keys, leaf in leaves if _is_index(leaf))


def _is_index(value: Any) -> bool:
    return isinstance(value, eqx.nn.StateIndex)
