"""Adapter for haiku's transformed functions with their parameters and state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final

import haiku as hk

from polyamp.errors import ModelError
from polyamp_jax.models.adapter import ModelAdapter, ModelParts, OpaqueValue, parameter_owners
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.module_proxy import NO_ATTRIBUTE
from polyamp_jax.models.running_state import ModelInputs, RunningState

_STATELESS_CLASSES: Final = (hk.Transformed, hk.MultiTransformed)
_STATEFUL_CLASSES: Final = (hk.TransformedWithState, hk.MultiTransformedWithState)


@dataclasses.dataclass(frozen=True)
class HaikuAdapter(ModelAdapter):
    """Adapter of `(hk.Transformed, params)` and `(hk.TransformedWithState, (params, state))`.

    `apply` receives a single random key. `flat` is true if the model was passed as three items; it is then returned
    as three.
    """

    transformed: OpaqueValue
    stateful: bool
    flat: bool
    stream: ClassVar[str | None] = "rng"
    module: ClassVar[type | tuple[type, ...]] = (types.FunctionType, functools.partial)

    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        params, running = inputs.params, inputs.running
        apply = route.function(self.transformed.value.apply)
        if not callable(apply):
            raise ModelError(
                f"a model made by hk.multi_transform is called by its functions: {_function_names(apply)}. Received: "
                f"{route}(...)."
            )
        key = (next(iter(inputs.keys.values()), None),) if takes_rng(apply, self.stateful) else ()
        casts.expect(parameter_owners(params))
        with hk.intercept_methods(_haiku_interceptor(casts)):
            if not self.stateful:
                return apply(params, *key, *inputs.args, **inputs.kwargs), running
            output, changed = apply(params, running.statistics, *key, *inputs.args, **inputs.kwargs)
        return output, running._replace(statistics=changed)

    def view(self, params: Any, running: RunningState) -> Any:
        apply = self.transformed.value.apply
        return NO_ATTRIBUTE if callable(apply) else apply

    def state_of(self, running: RunningState) -> Any:
        return running.statistics if self.stateful else None

    def join(self, params: Any, running: RunningState) -> Any:
        if not self.stateful:
            return self.transformed.value, params
        both = (params, running.statistics)
        return (self.transformed.value, *both) if self.flat else (self.transformed.value, both)

    def find_stream_problem(self, names: Collection[str]) -> str | None:
        return f"haiku's apply takes one random key. Received: rngs for {sorted(names)}." if len(names) > 1 else None


def takes_rng(apply: Callable[..., Any], stateful: bool) -> bool:
    """Return whether a transformed function takes a random key, which `hk.without_apply_rng` removes."""
    return list(inspect.signature(apply).parameters)[1 + stateful :][:1] == ["rng"]


def split_model(model: Any) -> ModelParts:
    """Split a transformed function with its parameters into parts."""
    stateful = isinstance(model, tuple) and isinstance(model[0], _STATEFUL_CLASSES)
    both = model[1:] if len(model) == 3 else model[-1]
    fits = not isinstance(model, (*_STATELESS_CLASSES, *_STATEFUL_CLASSES)) and (
        (isinstance(both, tuple) and len(both) == 2 and all(isinstance(item, Mapping) for item in both))
        if stateful
        else len(model) == 2
    )
    if not fits:
        raise ModelError(
            "pass a haiku model as (hk.Transformed, params) or (hk.TransformedWithState, (params, state)), with what "
            "its init(...) returned; what hk.multi_transform returned goes in the same place."
        )
    params, state = both if stateful else (both, ())
    return ModelParts(HaikuAdapter(OpaqueValue(model[0]), stateful, len(model) == 3), params, RunningState(state, ()))


def _haiku_interceptor(casts: CallCasts) -> Any:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not casts.is_active or context.method_name == "__init__":
            return call(*args, **kwargs)
        with casts.module(context.module.module_name, args, kwargs, None) as (args, kwargs):
            return call(*args, **kwargs)

    return intercept


def _function_names(apply: Any) -> str:
    """Return the functions of `hk.multi_transform` as the expressions that call them in `loss_fn`."""
    if isinstance(apply, Mapping):
        return ", ".join(f"model[{key!r}](...)" for key in apply)
    names = getattr(apply, "_fields", None)
    if names is not None:
        return ", ".join(f"model.{name}(...)" for name in names)
    return ", ".join(f"model[{number}](...)" for number in range(len(apply)))
