"""Adapter of equinox modules, with or without `eqx.nn.State`, and their proxies: the model that `loss_fn` receives.

A proxy (S29) is a real equinox module, so equinox's own functions accept it. Its class is a subclass of the user's
class, with a static field that stores its path in the model. Copies that `eqx.tree_at`, `eqx.combine`,
`eqx.nn.inference_mode` or `jax.tree.map` make keep this path. A call of such a copy runs the model with the copy at
that path.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax

from polyamp.errors import ModelError, PolyampError, TraceError
from polyamp_jax.arrays import named_leaves, path_name
from polyamp_jax.models.adapter import ModelAdapter, ModelParts, OpaqueValue
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.call_hook import NATIVE_CLASS_ATTRIBUTE, native_class
from polyamp_jax.models.module_path import ROOT_PATH, ModulePath, PathStep, has_argument, path_kind
from polyamp_jax.models.module_proxy import (
    Binding,
    ModuleEngine,
    dispatch_method,
    has_computed_arrays,
    missing_attribute_message,
    proxy_class_attributes,
)
from polyamp_jax.models.parameter_writes import find_writes
from polyamp_jax.models.running_state import ModelInputs, RandomKeys, RunningState


@dataclasses.dataclass(frozen=True)
class EquinoxAdapter(ModelAdapter):
    """Adapter of an equinox module. Trains inexact arrays; other arrays and the `State` are running state.

    Without `axis_name` the bound model has the call signature of the module itself, without its state. With it,
    positional arguments are mapped over axis 0 (equinox modules take one example). Every example then has a separate
    random key, and the `State` is shared.
    """

    static: OpaqueValue
    stateful: bool
    axis_name: str | None
    pinned: frozenset[str]
    stream: ClassVar[str | None] = "key"
    module: ClassVar[type | tuple[type, ...]] = eqx.Module

    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        buffers, state = inputs.running.statistics
        kwargs = inputs.kwargs
        module = self._hook_modules(self.view(inputs.params, inputs.running), casts)
        own = named_leaves(eqx.filter(module, eqx.is_inexact_array))
        function = route.function(module)
        keys = {name: key for name, key in inputs.keys.items() if name not in kwargs}
        stateful = self.stateful
        if route.steps:  # a part receives only the arguments in its signature
            keys = {name: key for name, key in keys.items() if has_argument(function, name)}
            stateful = stateful and "state" not in kwargs and has_argument(function, "state")

        with casts.call_of_part(route, inputs.args, kwargs) as (args, kwargs):

            def run(axis_name: str | None, keys: Any) -> tuple[Any, Any]:
                own = jax.tree.map(lambda leaf: leaf, state)  # using a State invalidates it, so use a copy

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

            try:
                output, changed = run(self.axis_name, keys)
            except Exception as error:
                self._refuse_unpaired(run, args, keys, error)
                raise
        if lost := find_writes(own, eqx.filter(module, eqx.is_inexact_array)):
            raise TraceError(
                f"the forward pass writes to {next(iter(lost))!r} of an equinox module with object.__setattr__. These "
                "modules are immutable, and the write would be lost. Compute the new value where it is needed, or keep "
                "it in an eqx.nn.State."
            )
        return output, inputs.running._replace(statistics=(buffers, changed))

    def draws(self, route: ModulePath, view: Any, names: Collection[str], args: Any, kwargs: Any) -> bool:
        return not route.steps or any(has_argument(route.function(view), name) for name in names)

    def _refuse_unpaired(self, run: Callable[..., Any], args: Any, keys: RandomKeys, error: Exception) -> None:
        """Check whether a failed call succeeds with other values of `axis_name=` and `rngs=`, and raise if it does.

        Raises:
            ModelError: names the values that work and those received.
        """
        if isinstance(error, PolyampError):
            return
        drawn = dict(keys) or {"key": jax.random.key(0)}
        name = _unbound_axis_name(error) or self.axis_name or "batch"
        for mapped, streams in ((True, keys), (True, drawn), (True, {}), (False, drawn), (False, {})):
            axis_name = name if mapped else None
            failure = _call_failure(run, axis_name, streams)
            if mapped and (other := _unbound_axis_name(failure)):
                axis_name = other  # the axis name of a submodule
                failure = _call_failure(run, axis_name, streams)
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

    def view(self, params: Any, running: RunningState) -> Any:
        return eqx.combine(params, running.statistics[0], self.static.value)

    def with_part(
        self, route: ModulePath, part: Any, params: Any, running: RunningState
    ) -> tuple[EquinoxAdapter, Any, RunningState]:
        """Return the model with `part` in place of the module at `route`, or of the owner of the method there."""
        model, steps = self.view(params, running), route.steps[:-1] if route.is_method else route.steps
        whole = eqx.tree_at(ModulePath(steps).resolve, model, part) if steps else part
        params, rest = eqx.partition(whole, eqx.is_inexact_array)
        buffers, static = eqx.partition(rest, eqx.is_array)
        made = dataclasses.replace(self, static=OpaqueValue(static))
        return made, params, running._replace(statistics=(buffers, running.statistics[1]))

    def bind(self, engine: Any) -> Any:
        find_engine = weakref.ref(engine) if engine.native is None else lambda: engine
        engine.root = _bind_module(self.view(engine.masters, engine.start), find_engine)
        return engine.root

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return route.resolve(params)

    def state_of(self, running: RunningState) -> Any:
        state = running.statistics[1]
        return jax.tree.map(lambda leaf: leaf, state) if self.stateful else None

    def modules(self, params: Any, running: RunningState) -> Mapping[str, Any]:
        return dict(walk_modules(self.view(params, running)))

    def join(self, params: Any, running: RunningState) -> Any:
        module = self.view(params, running)
        return (module, self.state_of(running)) if self.stateful else module

    def _hook_modules(self, module: Any, casts: CallCasts) -> Any:
        """Return the module with the submodules that cast inputs or open scopes replaced by wrapped copies."""
        if not casts.is_active and not self.pinned:
            return module

        def copied(node: Any, keys: tuple[Any, ...]) -> Any:
            children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
            if jax.tree_util.treedef_is_leaf(structure) or _is_index(node):
                return node
            made = jax.tree.unflatten(structure, [copied(child, keys + key) for key, child in children])
            if isinstance(node, eqx.Module):
                path = path_name(keys)
                casts.hook_module(made, path, is_pinned=path in self.pinned, uncast=(eqx.nn.State,))
            return made

        return copied(module, ())


def _call_failure(run: Callable[..., Any], axis_name: str | None, keys: Any) -> Exception | None:
    """Return the exception that a call raises, or None."""
    try:
        jax.eval_shape(lambda: run(axis_name, keys))
    except Exception as error:  # noqa: BLE001  # a model may raise any exception
        return error
    return None


def _unbound_axis_name(error: Exception | None) -> str | None:
    """Return the axis name in JAX's "unbound axis name" error, or None."""
    found = re.search(r"unbound axis name: (\w+)", str(error))
    return found[1] if found else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def split_model(model: Any, axis_name: str | None = None) -> ModelParts:
    """Split an equinox module, or `(module, eqx.nn.State)`, into its parts."""
    module, state = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(module, eqx.Module) or (state is not None and not isinstance(state, eqx.nn.State)):
        raise ModelError(
            "pass an equinox model as the module, or as (module, state) with the eqx.nn.State that "
            f"eqx.nn.make_with_state(...) returned. Received: {model!r}."
        )
    params, rest = eqx.partition(module, eqx.is_inexact_array)
    buffers, static = eqx.partition(rest, eqx.is_array)
    adapter = EquinoxAdapter(OpaqueValue(static), state is not None, axis_name, _pinned_paths(module))
    return ModelParts(adapter, params, RunningState((buffers, state), ()))


def walk_modules(node: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, module) for an equinox module and all modules inside it."""
    children, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda item: item is not node)
    if jax.tree_util.treedef_is_leaf(structure) or _is_index(node):
        return
    if isinstance(node, eqx.Module):
        yield path_name(keys), node
    for key, child in children:
        yield from walk_modules(child, keys + key)


def _pinned_paths(module: Any) -> frozenset[str]:
    """Return the paths of the modules that have a state: equinox's BatchNorm and SpectralNorm.

    BatchNorm selects between its statistics (float32) and those of its input, which must have the same dtype.
    """
    leaves = jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_index)
    return frozenset(path_name(keys[:-1]) for keys, leaf in leaves if _is_index(leaf))


def _is_index(value: Any) -> bool:
    return isinstance(value, eqx.nn.StateIndex)


_BINDING_ATTRIBUTE = "_polyamp_place"


def _bind_module(model: Any, find_engine: Callable[[], ModuleEngine | None]) -> Any:
    """Return a copy of a native module in which every module is bound."""

    def bound(node: Any, route: ModulePath) -> Any:
        kind: Any = type(node)
        return _rebuild_module(node, _proxy_class(kind), route, bound, Binding(find_engine, route))

    return bound(model, ROOT_PATH)


def _native_module(model: Any) -> Any:
    """Return a proxy as an instance of the user's own class."""

    def plain(node: Any, route: ModulePath) -> Any:
        return _rebuild_module(node, native_class(type(node)), route, plain, None)

    return plain(model, ROOT_PATH)


def _binding_of(module: Any) -> Any:
    """Return the binding of a proxy, which its copies keep."""
    return vars(module).get(_BINDING_ATTRIBUTE)


def _is_module_copy(module: Any) -> bool:
    """Return whether a proxy is a copy of the model's module rather than that module itself."""
    binding = _binding_of(module)
    engine = binding.find_engine()
    return engine is None or binding.route.resolve(engine.root) is not module


def _rebuild_module(
    node: Any, kind: Any, route: ModulePath, change: Callable[[Any, ModulePath], Any], binding: Binding | None
) -> Any:
    """Return a module of class `kind` with the same fields, with `change` applied to the modules in them."""
    made = object.__new__(kind)
    for name, value in vars(node).items():
        if name != _BINDING_ATTRIBUTE:
            object.__setattr__(made, name, _map_modules(value, route.to(PathStep(name, True), "module"), change))
    if binding is not None:
        object.__setattr__(made, _BINDING_ATTRIBUTE, binding)
    return made


def _map_modules(value: Any, route: ModulePath, change: Callable[[Any, ModulePath], Any]) -> Any:
    """Return a field's value with `change` applied to the modules in it."""
    if isinstance(value, eqx.nn.StateIndex):
        return value
    if isinstance(value, eqx.Module):
        return value if hasattr(value, "__func__") else change(value, route)
    children, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda item: item is not value)
    if jax.tree_util.treedef_is_leaf(structure):
        return value
    made = [_map_modules(child, route.to(_path_step(keys[0]), "module"), change) for keys, child in children]
    return (
        value if all(a is b for a, (_, b) in zip(made, children, strict=True)) else jax.tree.unflatten(structure, made)
    )


def _path_step(key: Any) -> PathStep:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return PathStep(key.name, True)
    return PathStep(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key, False)


@functools.lru_cache(maxsize=4096)
def _proxy_class(kind: Any) -> type:
    """Return the proxy class of a class, one per class: JAX never frees a class registered as a pytree."""
    own = native_class(kind)

    def get(self: Any, name: str) -> Any:
        if name.startswith("__") or name in (_BINDING_ATTRIBUTE, NATIVE_CLASS_ATTRIBUTE):
            return own.__getattribute__(self, name)
        return _read_attribute(own, self, name)

    def missing(self: Any, name: str) -> Any:
        return _missing_attribute(own, self, name)

    names = proxy_class_attributes(own, _binding_of, _run_method) | {
        "__annotations__": {_BINDING_ATTRIBUTE: Any},
        "__getattribute__": get,
        "__getattr__": missing,
        _BINDING_ATTRIBUTE: eqx.field(static=True, default=None, repr=False),
    }
    made: type = type(own)(own.__name__, (own,), names)
    return made


def _run_method(module: Any, route: ModulePath, args: Any, kwargs: Any) -> Any:
    return _binding_of(module).engine.call(
        route, args, kwargs, _native_module(module) if _is_module_copy(module) else None
    )


def _read_attribute(own: Any, module: Any, name: str) -> Any:
    """Return an attribute of a proxy."""
    route, step = _binding_of(module).route, PathStep(name, True)
    definition = inspect.getattr_static(own, name, None)
    is_property = name not in vars(module) and isinstance(definition, property | functools.cached_property)
    value = getattr(_native_module(module), name) if is_property else own.__getattribute__(module, name)
    kind = path_kind(module, step, value, eqx.Module)
    if kind == "method":
        return functools.partial(dispatch_method(getattr(own, name), step, _binding_of, _run_method), module)
    if kind == "property" and has_computed_arrays(value):
        return _run_method(module, route.to(step, kind), (), {})
    return _binding_of(module).engine.with_compute_dtype(route, value) if kind in ("value", "property") else value


def _missing_attribute(own: Any, module: Any, name: str) -> Any:
    """Return an attribute from the user's own `__getattr__`, or `params` or `state`."""
    users = getattr(own, "__getattr__", None)
    if users is not None:
        try:
            return users(module, name)
        except AttributeError:
            pass
    if name.startswith("__") or _BINDING_ATTRIBUTE not in vars(module):
        raise AttributeError(name)
    binding = _binding_of(module)
    if name == "params":
        if _is_module_copy(module):
            return eqx.filter(_native_module(module), eqx.is_inexact_array)
        return _binding_of(module).engine.params_of(_native_module(module), binding.route)
    if name == "state" and binding.route == ROOT_PATH and (state := _binding_of(module).engine.state()) is not None:
        return state
    raise AttributeError(missing_attribute_message(module, binding.route, name))
