"""Adapter of flax nnx modules."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from flax import nnx

from polyamp.errors import ModelError, UnsupportedError
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
from polyamp_jax.models.adapters.nnx_proxy import bind_module, bind_shared_module
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.call_hook import native_class
from polyamp_jax.models.module_path import ModulePath, has_argument, is_argument_given
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
        now, changed = split_nnx_model(model, self.known, running.draws)
        return output, changed._replace(written=find_writes(params, now))

    def draws(self, route: ModulePath, view: Any, names: Collection[str], args: Any, kwargs: Any) -> bool:
        function = route.function(view)
        return has_argument(function, "rngs") and not is_argument_given(function, "rngs", args, kwargs)

    @property
    def known(self) -> Mapping[Any, str]:
        """Mapping from the path of each variable of the model to its role in the state."""
        return dict(self.paths)

    def start(self, params: Any, masters: Any, running: RunningState, model: Any = None) -> NnxPass:
        return NnxPass(self, self.join(masters, running) if model is None else model, params, masters, running)

    def bind(self, engine: Any) -> Any:
        if engine.native is None:
            return bind_module(engine.view(), engine)
        return bind_shared_module(engine.native, engine)

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

    def check_streams(self, names: Collection[str]) -> None:
        if not self.takes_rngs:
            raise UnsupportedError(
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
