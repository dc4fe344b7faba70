"""Adapter of flax nnx modules, and their proxies: the model that `loss_fn` receives, whose calls run under the policy.

A proxy (S29) is a real nnx module, so flax's own functions accept it. Its class is a subclass of the user's class.

- `__call__`, methods and properties that the user's class defines go through the engine, by the module's path.
- `__getattribute__` returns everything else unchanged.
- In a step, `_bind_module` changes the classes of the modules in the pass's own view.
- Outside of a step, `_bind_shared_module` makes a proxy that shares the attributes of the user's model.
- A copy that `nnx.merge` or a transformation makes has no binding. Calling it raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from flax import nnx

from polyamp.errors import ModelError
from polyamp_jax import compat
from polyamp_jax.arrays import join_path
from polyamp_jax.models.adapter import ModelAdapter, ModelParts, OpaqueValue
from polyamp_jax.models.adapters.nnx_pass import (
    NnxPass,
    merge_nnx_model,
    split_nnx_model,
    variable_roles,
    without_intermediates,
)
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.call_hook import native_class
from polyamp_jax.models.flax_compat import NNX_INTERNAL, nnx_class_options
from polyamp_jax.models.module_path import (
    ROOT_PATH,
    ModulePath,
    PathStep,
    has_argument,
    has_instances,
    is_argument_given,
    path_kind,
)
from polyamp_jax.models.module_proxy import (
    NO_BINDING,
    Binding,
    ModuleEngine,
    dispatch_method,
    has_computed_arrays,
    is_proxy,
    missing_attribute_message,
    native_classes,
    proxy_class_attributes,
    refuse_base_method,
    refuse_delete_attribute,
    refuse_set_attribute,
)
from polyamp_jax.models.parameter_writes import find_writes
from polyamp_jax.models.running_state import ModelInputs, RunningState


@dataclasses.dataclass(frozen=True)
class NnxAdapter(ModelAdapter):
    """Adapter of an nnx module.

    `nnx.Param` is trained and `nnx.RngState` advances. Every other variable is running state, and so are writes to an
    `nnx.Param` (S12). Streams given to `init` are passed as `rngs=`, unless the caller passes some.
    """

    graphdef: OpaqueValue
    paths: tuple[tuple[Any, str], ...] = dataclasses.field(compare=False)
    takes_rngs: bool = False
    stream: ClassVar[str | None] = "default"
    module: ClassVar[type | tuple[type, ...]] = nnx.Module
    is_mutable: ClassVar[bool] = True

    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        """Run one call. `inputs.running` is the running state within the pass: see `NnxPass`."""
        params, running, args, kwargs = inputs.params, inputs.running, inputs.args, inputs.kwargs
        model = merge_nnx_model(params, running)
        if casts.is_active:
            for path, module in walk_modules(model):
                casts.hook_module(module, path)
        function = route.function(model)
        if inputs.keys and self.draws(route, model, (), args, kwargs):
            kwargs = {**kwargs, "rngs": nnx.Rngs(**inputs.keys)}
        with casts.call_of_part(route, args, kwargs) as (args, kwargs):
            output = function(*args, **kwargs)
        for _, module in walk_modules(model):
            object.__setattr__(module, "__class__", native_class(type(module)))
        now, changed = split_nnx_model(model, self.roles, running.draws)
        return output, changed._replace(written=find_writes(params, now))

    def draws(self, route: ModulePath, view: Any, names: Collection[str], args: Any, kwargs: Any) -> bool:
        function = route.function(view)
        return has_argument(function, "rngs") and not is_argument_given(function, "rngs", args, kwargs)

    @property
    def roles(self) -> Mapping[Any, str]:
        """Mapping from the path of each variable of the model to its role in the state."""
        return dict(self.paths)

    def start(self, params: Any, masters: Any, running: RunningState, model: Any = None) -> NnxPass:
        return NnxPass(self, self.join(masters, running) if model is None else model, params, masters, running)

    def bind(self, engine: Any) -> Any:
        if engine.native is None:
            return _bind_module(engine.view(), engine)
        return _bind_shared_module(engine.native, engine)

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        """Return the parameters that nnx finds in a part. In all parameters a shared one has only one of its paths."""
        return nnx.to_pure_dict(self.tree(part, route, params, running)) if route.steps else params

    def tree(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return nnx.state(route.resolve(self.join(params, running)), nnx.Param)

    def modules(self, params: Any, running: RunningState) -> Mapping[str, Any]:
        return dict(walk_modules(self.join(params, running)))

    def parameter_paths(self, modules: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        places: dict[int, list[str]] = {}
        for path, module in modules.items():
            for name, value in vars(module).items():
                if isinstance(value, nnx.Variable):
                    places.setdefault(id(value), []).append(join_path(path, name))
        return {path: (path, *(p for p in paths if p != path)) for paths in places.values() for path in paths}

    def join(self, params: Any, running: RunningState) -> Any:
        return nnx.merge(self.graphdef.value, params, running.streams, running.statistics)

    def find_stream_problem(self, names: Collection[str]) -> str | None:
        if self.takes_rngs:
            return None
        return (
            "rngs= is passed on as the keyword argument rngs of the nnx module, whose __call__ takes none, and no "
            "other method does: it holds its own nnx.Rngs. Drop rngs=, or let __call__ take rngs."
        )


def split_model(model: Any) -> ModelParts:
    """Split an nnx module into its parts, without the intermediates that earlier calls left in it."""
    if not isinstance(model, nnx.Module):
        raise ModelError("pass an nnx model as the module itself; it holds its own variables.")
    own = without_intermediates(model)
    graphdef, params, streams, rest = nnx.split(own, nnx.Param, nnx.RngState, ...)
    running = RunningState(nnx.to_pure_dict(rest), nnx.to_pure_dict(streams))
    adapter = NnxAdapter(OpaqueValue(graphdef), tuple(variable_roles(own).items()), _has_rngs_argument(model))
    return ModelParts(adapter, nnx.to_pure_dict(params), running)


def walk_modules(model: Any) -> list[tuple[str, Any]]:
    """Return (path, module) for an nnx model and every module in it, each once."""
    return [("/".join(map(str, keys)), module) for keys, module in compat.walk_nnx_modules(model)]


def _has_rngs_argument(model: Any) -> bool:
    """Return whether a method that the user defined, such as `__call__`, takes random streams."""
    methods = [
        function
        for kind in type(model).__mro__
        if kind not in nnx.Module.__mro__
        for name, function in vars(kind).items()
        if name != "__init__" and inspect.isfunction(function)
    ]
    return any(has_argument(method, "rngs") for method in methods)


_CONTAINER_CLASSES: Final = tuple(getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name))
"""Flax modules that only contain other modules and compute nothing."""
_READ_METHODS: Final = ("iter_modules", "iter_children")
"""Read-only methods of the base class. Until flax 0.11 they are not plain functions."""


_bindings: Final[dict[int, Binding]] = {}
"""Bindings by `id` of the module. They are stored outside the module so that flax's copies do not inherit them."""


def _bind_module(model: Any, engine: ModuleEngine) -> Any:
    """Bind all modules of `model`, a view that belongs to one pass, and return `model` itself."""
    found = weakref.ref(engine)
    for module, route in [
        (module, ModulePath(_path_steps(model, keys))) for keys, module in compat.walk_nnx_modules(model)
    ]:
        kind: Any = type(module)
        object.__setattr__(module, "__class__", _proxy_class(kind))
        _set_binding(module, found, route)
    return model


def _bind_shared_module(native: Any, engine: ModuleEngine, route: ModulePath = ROOT_PATH) -> Any:
    """Return a proxy that shares the attributes of the user's module. A write to one changes both."""
    own: Any = type(native)
    module: Any = object.__new__(_proxy_class(own))
    object.__setattr__(module, "__dict__", native.__dict__)
    _set_binding(module, lambda: engine, route, native)
    return module


def _binding_of(module: Any) -> Binding:
    """Return the binding of a proxy. A copy has the empty binding."""
    binding = _bindings.get(id(module))
    return binding if binding is not None and binding.module_ref() is module else NO_BINDING


def _set_binding(
    module: Any, find_engine: Callable[[], ModuleEngine | None], route: ModulePath, native: Any = None
) -> None:
    number = id(module)
    _bindings[number] = Binding(find_engine, route, native, weakref.ref(module, lambda _: _bindings.pop(number, None)))


def _path_steps(root: Any, keys: Sequence[Any]) -> tuple[PathStep, ...]:
    """Convert a flax path, made of container keys and attribute names, to path steps."""
    steps = []
    for key in keys:
        is_item = not isinstance(key, str) or isinstance(root, Mapping)
        steps.append(PathStep(key, not is_item))
        root = root[key] if is_item else vars(root)[key] if key in vars(root) else getattr(root, key)
    return tuple(steps)


@functools.lru_cache(maxsize=4096)
def _proxy_class(kind: Any) -> type:
    """Return the proxy class of a class, one per class: JAX never frees a class registered as a pytree."""
    own = native_class(kind)

    def get(self: Any, name: str) -> Any:
        return own.__getattribute__(self, name) if name.startswith(NNX_INTERNAL) else _read_attribute(own, self, name)

    def missing(self: Any, name: str) -> Any:
        return _missing_attribute(own, self, name)

    def put(self: Any, name: str, value: Any) -> None:
        if not (name.startswith(NNX_INTERNAL) or isinstance(value, nnx.Variable)):
            refuse_set_attribute(_binding_of(self).route, name)
        own.__setattr__(self, name, value)

    def delete(self: Any, name: str) -> None:
        if not (name.startswith(NNX_INTERNAL) or isinstance(vars(self).get(name), nnx.Variable)):
            refuse_delete_attribute(_binding_of(self).route, name)
        own.__delattr__(self, name)

    names = proxy_class_attributes(own, _binding_of, _run_method) | {
        "__getattribute__": get,
        "__getattr__": missing,
        "__setattr__": put,
        "__delattr__": delete,
    }
    made: type = type(own)(own.__name__, (own,), names, **nnx_class_options(own))
    return made


def _run_method(module: Any, route: ModulePath, args: Any, kwargs: Any) -> Any:
    return _binding_of(module).engine.call(route, args, kwargs)


def _read_attribute(own: Any, module: Any, name: str) -> Any:
    """Return an attribute of a proxy."""
    binding = _binding_of(module)
    step = PathStep(name, True)
    is_property = name not in vars(module) and _is_property(own, name)
    if not is_property:
        value = own.__getattribute__(module, name)
    elif binding.native is not None:
        value = getattr(binding.native, name)
    else:
        with native_classes(module):
            value = getattr(module, name)
    if name in _READ_METHODS:
        return value
    if isinstance(module, _CONTAINER_CLASSES) and not is_property and name not in vars(module):
        return value  # a method of the module list or dict itself
    kind = path_kind(module, step, value, nnx.Module)
    if kind == "method":
        return types.MethodType(dispatch_method(getattr(own, name), step, _binding_of, _run_method), module)
    route = binding.route.to(step, kind)
    if kind == "base":
        refuse_base_method(module, binding.route.to(step, kind))
    if kind == "property" and has_computed_arrays(value):
        return binding.engine.call(route, (), {})
    if kind in ("module", "container"):
        return value if binding.native is None else _bind_shared_value(value, binding.engine, binding.route, step)
    if binding is not NO_BINDING and has_instances([value], nnx.Param):
        return binding.engine.with_compute_dtype(route, value)
    return value


def _is_property(own: Any, name: str) -> bool:
    """Return whether a class attribute is a descriptor that computes a value on read, and not a method."""
    definition = inspect.getattr_static(own, name, None)
    return hasattr(type(definition), "__get__") and not callable(definition) and not inspect.isroutine(definition)


def _bind_shared_value(value: Any, engine: ModuleEngine, outer: ModulePath, step: PathStep) -> Any:
    """Return a value of the user's model with its modules bound, inside the same containers."""
    if isinstance(value, nnx.Module):
        return value if is_proxy(value) else _bind_shared_module(value, engine, outer.to(step, "module"))
    route = outer.to(step, "container")
    if isinstance(value, Mapping):
        return {key: _bind_shared_value(item, engine, route, PathStep(key, False)) for key, item in value.items()}
    if isinstance(value, list | tuple) and has_instances(value, nnx.Module):
        items = [_bind_shared_value(item, engine, route, PathStep(number, False)) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _missing_attribute(own: Any, module: Any, name: str) -> Any:
    """Return an attribute from the user's own `__getattr__`, or `params`."""
    if (users := getattr(own, "__getattr__", None)) is not None:
        with contextlib.suppress(AttributeError):
            return users(module, name)
    if name.startswith(NNX_INTERNAL):
        raise AttributeError(name)
    binding = _binding_of(module)
    if name == "params":
        return binding.engine.params_of(module, binding.route)
    raise AttributeError(missing_attribute_message(module, binding.route, name))
