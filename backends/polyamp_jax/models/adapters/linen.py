"""Adapter of flax linen's `(module, variables)`."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import core, linen
from flax.core import scope

from polyamp.errors import ModelError, TraceError
from polyamp_jax.models.adapter import (
    ModelAdapter,
    ModelParts,
    OpaqueValue,
    describe_kind,
    parameter_owners,
)
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.running_state import CollectedState, ModelInputs, RunningState


@dataclasses.dataclass(frozen=True)
class LinenAdapter(ModelAdapter):
    """Adapter of `(linen_module, variables)`. Every collection except "params" is mutable running state.

    `mutable=` of a call adds collections, as it does for `apply`. They exist for that call only.
    """

    static: OpaqueValue
    module: ClassVar[type | tuple[type, ...]] = linen.Module

    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        params, statistics, kwargs = inputs.params, inputs.running.statistics, dict(inputs.kwargs)
        rngs = {**inputs.keys, **kwargs.pop("rngs", {})}
        requested = False if route.steps else kwargs.pop("mutable", False)
        module: Any = self.static.value
        if route.steps:  # a method's keyword arguments, even if `apply` has some of the same name
            named_arguments = kwargs
            kwargs = {"method": lambda root, *args: route.function(root)(*args, **named_arguments)}
        casts.expect(parameter_owners(params))
        mutable = scope.union_filters(sorted(statistics), _requested_collections(requested))
        # linen's own scopes begin with the class name of the root; polyamp's scopes are the paths used in overrides
        named = linen.override_named_call(False) if casts.has_scopes else contextlib.nullcontext()
        with named, linen.intercept_methods(_linen_interceptor(casts)):
            output, changed = module.apply(
                {"params": params, **statistics}, *inputs.args, rngs=rngs or None, mutable=mutable, **kwargs
            )
        changed = dict(core.unfreeze(changed))
        state, collected = split_collections(changed, statistics)
        if requested is not False:
            output = (
                output,
                {name: collected.get(name, changed[name]) for name in changed if scope.in_filter(requested, name)},
            )
        return output, inputs.running._replace(statistics=CollectedState({**statistics, **state}, collected))

    def view(self, params: Any, running: RunningState) -> Any:
        return self.static.value.bind({"params": params, **running.statistics})

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        for name in part.path:
            params = params.get(name, {})  # a module without parameters has no entry
        return params

    def join(self, params: Any, running: RunningState) -> Any:
        return self.static.value, {"params": params, **running.statistics}


def split_model(model: Any) -> ModelParts:
    """Split a linen module with its variables into parts."""
    if not isinstance(model, tuple) or len(model) != 2:
        raise ModelError(
            "pass the model as (linen_module, variables): variables is what module.init(...) returned. Received: "
            f"{describe_kind(model)}."
        )
    module, variables = model
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
        raise ModelError(
            "pass the model as (linen_module, variables): variables is the whole result of module.init(...), with its "
            f"'params' collection. Received: {sorted(variables) if isinstance(variables, Mapping) else variables!r}."
        )
    collections = dict(core.unfreeze(variables))
    params = collections.pop("params", {})
    return ModelParts(LinenAdapter(OpaqueValue(module)), params, RunningState(collections, ()))


def _requested_collections(requested: Any) -> Any:
    """Return the collections in `mutable=` of a call, without the parameters.

    Raises:
        TraceError: `mutable=` names the parameters.
    """
    if requested is not True and scope.in_filter(requested, "params") and not isinstance(requested, core.DenyList):
        raise TraceError(
            "mutable= names 'params': the optimizer changes parameters, and what the forward pass writes there would "
            f"be lost. Name the other collections. Received: mutable={requested!r}."
        )
    return scope.subtract_filters(requested, "params")


def split_collections(changed: dict[str, Any], before: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the collections that a call changed into running state and values that only this call collected.

    `sow` appends to a tuple. The new items at its end belong to this call; the earlier items stay in the state.
    """
    state: dict[str, Any] = {}
    collected: dict[str, Any] = {}
    for name, values in changed.items():
        if name not in before:
            collected[name] = values
            continue
        state[name], fresh = _split_sown(values, before[name])
        if fresh is not values:
            collected[name] = fresh
    return state, collected


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
        if not casts.is_active or context.method_name == "setup" or context.module.scope is None:
            return call(*args, **kwargs)
        path = "/".join(context.module.path)
        with casts.module(path, args, kwargs, getattr(context.module, "dtype", None)) as (args, kwargs):
            return call(*args, **kwargs)

    return intercept
