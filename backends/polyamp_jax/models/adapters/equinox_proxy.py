"""Proxies of equinox modules: the model that `loss_fn` receives, whose calls run under the policy (S29).

A proxy is a real equinox module, so equinox's own functions accept it. Its class is a subclass of the user's
class, with a static field that stores its path in the model. Copies that `eqx.tree_at`, `eqx.combine`,
`eqx.nn.inference_mode` or `jax.tree.map` make keep this path. A call of such a copy runs the model with the copy at
that path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from polyamp_jax.models import attribute_access
from polyamp_jax.models.call_hook import NATIVE_CLASS_ATTRIBUTE, native_class
from polyamp_jax.models.module_path import ROOT_PATH, ModulePath, PathStep, path_kind
from polyamp_jax.models.module_proxy import Binding, ModuleEngine, dispatch_method, proxy_class_attributes

_BINDING_ATTRIBUTE = "_polyamp_place"


def bind_module(model: Any, find_engine: Callable[[], ModuleEngine | None]) -> Any:
    """Return a copy of a native module in which every module is bound."""

    def bound(node: Any, route: ModulePath) -> Any:
        kind: Any = type(node)
        return _rebuild_module(node, _proxy_class(kind), route, bound, Binding(find_engine, route))

    return bound(model, ROOT_PATH)


def native_module(model: Any) -> Any:
    """Return a proxy as an instance of the user's own class."""

    def plain(node: Any, route: ModulePath) -> Any:
        return _rebuild_module(node, native_class(type(node)), route, plain, None)

    return plain(model, ROOT_PATH)


def _binding_of(module: Any) -> Any:
    """Return the binding of a proxy, which its copies keep."""
    return vars(module).get(_BINDING_ATTRIBUTE)


def is_module_copy(module: Any) -> bool:
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
        route, args, kwargs, native_module(module) if is_module_copy(module) else None
    )


def _read_attribute(own: Any, module: Any, name: str) -> Any:
    """Return an attribute of a proxy."""
    route, step = _binding_of(module).route, PathStep(name, True)
    definition = inspect.getattr_static(own, name, None)
    is_property = name not in vars(module) and isinstance(definition, property | functools.cached_property)
    value = getattr(native_module(module), name) if is_property else own.__getattribute__(module, name)
    kind = path_kind(module, step, value, eqx.Module)
    if kind == "method":
        return functools.partial(dispatch_method(getattr(own, name), step, _binding_of, _run_method), module)
    if kind == "property" and attribute_access.has_computed_arrays(value):
        return _run_method(module, route.to(step, kind), (), {})
    return _binding_of(module).engine.computed(route, value) if kind in ("value", "property") else value


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
        if is_module_copy(module):
            return eqx.filter(native_module(module), eqx.is_inexact_array)
        return _binding_of(module).engine.params_of(native_module(module), binding.route)
    if name == "state" and binding.route == ROOT_PATH and (state := _binding_of(module).engine.state()) is not None:
        return state
    raise AttributeError(attribute_access.missing_attribute_message(module, binding.route, name))
