"""Adapters for flax: linen's `(module, variables)` and nnx modules."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from flax import core, linen, nnx
from flax.core import scope

from polyamp.errors import ModelError, TraceError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.models.bound_nnx import bind_module, bind_shared_module
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.call_hook import activate_casts, native_class, set_class
from polyamp_jax.models.model_parts import (
    CollectedState,
    ModelParts,
    OpaqueValue,
    RandomKeys,
    RunningState,
    parameter_owners,
    subtree_at,
)
from polyamp_jax.models.nnx_pass import NnxPass, merge_nnx_model, split_nnx_model, variable_roles, without_intermediates
from polyamp_jax.models.parameter_writes import find_writes
from polyamp_jax.models.submodule_path import ModulePath, cast_method_arguments, has_argument, is_argument_given


@dataclasses.dataclass(frozen=True)
class LinenAdapter:
    """Adapter for `(linen_module, variables)`. Every collection except "params" is mutable running state.

    `mutable=` of a call adds collections, as it does for `apply`. They exist for that call only.
    """

    static: OpaqueValue
    stream: str | None = None
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = False
    module: ClassVar[type | tuple[type, ...]] = linen.Module

    def call(
        self,
        params: Any,
        running: RunningState,
        keys: RandomKeys,
        casts: CallCasts,
        route: ModulePath,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, RunningState]:
        statistics = running.statistics
        rngs = {**keys, **kwargs.pop("rngs", {})}
        asked = False if route.steps else kwargs.pop("mutable", False)
        module: Any = self.static.value
        if route.steps:  # a method's keyword arguments, even if `apply` has some of the same name
            named_arguments = kwargs
            kwargs = {"method": lambda root, *args: route.function(root)(*args, **named_arguments)}
        casts.expect(parameter_owners(params))
        mutable = scope.union_filters(sorted(statistics), _requested_collections(asked))
        # linen's own scopes begin with the class name of the root; polyamp's scopes are the paths used in overrides
        named = linen.override_named_call(False) if casts.scoped else contextlib.nullcontext()
        with named, linen.intercept_methods(_linen_interceptor(casts)):
            output, changed = module.apply(
                {"params": params, **statistics}, *args, rngs=rngs or None, mutable=mutable, **kwargs
            )
        changed = dict(core.unfreeze(changed))
        kept, collected = split_collections(changed, statistics)
        if asked is not False:
            output = (
                output,
                {name: collected.get(name, changed[name]) for name in changed if scope.in_filter(asked, name)},
            )
        return output, running._replace(statistics=CollectedState({**statistics, **kept}, collected))

    def view(self, params: Any, running: RunningState) -> Any:
        return self.static.value.bind({"params": params, **running.statistics})

    def bound(self, engine: Any) -> Any:
        return None

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return subtree_at(params, part.path)

    def state_of(self, running: RunningState) -> Any:
        return None

    def tree(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: RunningState) -> Iterable[str]:
        return parameter_owners(params)

    def join(self, params: Any, running: RunningState) -> Any:
        return self.static.value, {"params": params, **running.statistics}

    def check_streams(self, names: Collection[str]) -> None:
        """Accept any name, because a linen module chooses the names of its streams."""


def adapt_linen(module: Any, variables: Any) -> ModelParts:
    """Split a linen module with its variables into parts."""
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
        raise ModelError(
            "pass the model as (linen_module, variables): variables is the whole result of module.init(...), with its "
            f"'params' collection. Received: {sorted(variables) if isinstance(variables, Mapping) else variables!r}."
        )
    collections = dict(core.unfreeze(variables))
    params = collections.pop("params", {})
    return ModelParts(LinenAdapter(OpaqueValue(module)), params, RunningState(collections, ()))


def _requested_collections(asked: Any) -> Any:
    """Return the collections in `mutable=` of a call, without the parameters.

    Raises:
        TraceError: `mutable=` names the parameters.
    """
    if asked is not True and scope.in_filter(asked, "params") and not isinstance(asked, core.DenyList):
        raise TraceError(
            "mutable= names 'params': the optimizer changes parameters, and what the forward pass writes there would "
            f"be lost. Name the other collections. Received: mutable={asked!r}."
        )
    return scope.subtract_filters(asked, "params")


def split_collections(changed: dict[str, Any], before: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the collections that a call changed into running state and values that only this call collected.

    `sow` appends to a tuple. The new items at its end belong to this call; the earlier items stay in the state.
    """
    kept: dict[str, Any] = {}
    collected: dict[str, Any] = {}
    for name, values in changed.items():
        if name not in before:
            collected[name] = values
            continue
        kept[name], fresh = _split_sown(values, before[name])
        if fresh is not values:
            collected[name] = fresh
    return kept, collected


def _split_sown(after: Any, before: Any) -> tuple[Any, Any]:
    """Return a collection's values for the state, and its values for `loss_fn` to read."""
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        pairs = {
            key: _split_sown(value, before[key]) if key in before else (value, value) for key, value in after.items()
        }
        if all(fresh is after[key] for key, (_, fresh) in pairs.items()):
            return after, after
        return {key: own for key, (own, _) in pairs.items()}, {key: fresh for key, (_, fresh) in pairs.items()}
    both_tuples = isinstance(after, tuple) and isinstance(before, tuple)
    if both_tuples and len(after) > len(before) and all(map(operator.is_, after, before)):
        return before, after[len(before) :]
    return after, after


def _linen_interceptor(casts: CallCasts) -> Any:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not casts.active or context.method_name == "setup" or context.module.scope is None:
            return call(*args, **kwargs)
        path = "/".join(context.module.path)
        with casts.module(path, args, kwargs, getattr(context.module, "dtype", None)) as (args, kwargs):
            return call(*args, **kwargs)

    return intercept


@dataclasses.dataclass(frozen=True)
class NnxAdapter:
    """Adapter for an nnx module.

    `nnx.Param` is trained and `nnx.RngState` advances. Every other variable is running state, and so are writes to an
    `nnx.Param` (S12). Streams given to `init` are passed as `rngs=`, unless the caller passes some.
    """

    graphdef: OpaqueValue
    paths: tuple[tuple[Any, str], ...] = dataclasses.field(compare=False)
    takes_rngs: bool = False
    stream: str | None = "default"
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = True
    module: ClassVar[type | tuple[type, ...]] = nnx.Module

    def call(
        self,
        params: Any,
        running: RunningState,
        keys: RandomKeys,
        casts: CallCasts,
        route: ModulePath,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, RunningState]:
        """Run one call. `running` is the running state within the pass: see `NnxPass`."""
        model = self.inside(params, running)
        if casts.active:
            for segments, module in compat.walk_nnx_modules(model):
                path = "/".join(map(str, segments))
                casts.expect([path])
                set_class(module, path, casts)
        function = route.function(model)
        if keys and has_argument(function, "rngs") and not is_argument_given(function, "rngs", args, kwargs):
            kwargs = {**kwargs, "rngs": nnx.Rngs(**keys)}
        args, kwargs = cast_method_arguments(route, casts, args, kwargs)
        with activate_casts(casts), casts.scope(route.path if route.is_method and casts.scoped else ""):
            output = function(*args, **kwargs)
        for _, module in list(compat.walk_nnx_modules(model)):
            object.__setattr__(module, "__class__", native_class(type(module)))
        now, changed = split_nnx_model(model, self.known, running.draws)
        return output, changed._replace(written=find_writes(params, now))

    @property
    def known(self) -> Mapping[Any, str]:
        """Mapping from the path of each variable of the model to its role in the state."""
        return dict(self.paths)

    def inside(self, params: Any, running: RunningState) -> Any:
        """Return a separate model that includes the variables that the pass has created so far."""
        return merge_nnx_model(params, running)

    def start(self, params: Any, masters: Any, running: RunningState, model: Any = None) -> NnxPass:
        """Return the pass of a new model, or of `model` if it is given."""
        made = NnxAdapter.join(self, masters, running) if model is None else model
        return NnxPass(self, made, params, masters, running)

    def view(self, params: Any, running: RunningState) -> Any:
        return self.join(params, running)

    def bound(self, engine: Any) -> Any:
        if engine.shared is None:
            return bind_module(engine.view(), engine)
        return bind_shared_module(engine.shared, engine)

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        """Return the parameters that nnx finds in a part. In all parameters a shared one has only one of its paths."""
        return nnx.to_pure_dict(self.tree(part, route, params, running)) if route.steps else params

    def state_of(self, running: RunningState) -> Any:
        return None

    def tree(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        return nnx.state(route.resolve(self.join(params, running)), nnx.Param)

    def modules(self, params: Any, running: RunningState) -> Iterable[str]:
        inside = compat.walk_nnx_modules(self.join(params, running))
        return [*parameter_owners(params), *("/".join(map(str, segments)) for segments, _ in inside)]

    def join(self, params: Any, running: RunningState) -> Any:
        return nnx.merge(self.graphdef.value, params, running.streams, running.statistics)

    def check_streams(self, names: Collection[str]) -> None:
        if not self.takes_rngs:
            raise UnsupportedError(
                "rngs= is passed on as the keyword argument rngs of the nnx module, whose __call__ takes none, and no "
                "other method does: it holds its own nnx.Rngs. Drop rngs=, or let __call__ take rngs."
            )


def adapt_nnx(model: Any) -> ModelParts:
    """Split an nnx module into its parts, without the intermediates that earlier calls left in it."""
    own = without_intermediates(model)
    graphdef, params, streams, rest = nnx.split(own, nnx.Param, nnx.RngState, ...)
    running = RunningState(nnx.to_pure_dict(rest), nnx.to_pure_dict(streams))
    adapter = NnxAdapter(OpaqueValue(graphdef), tuple(variable_roles(own).items()), _has_rngs_argument(model))
    return ModelParts(adapter, nnx.to_pure_dict(params), running)


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
