"""Adapter for haiku's transformed functions with their parameters and state. Loaded by `models.adapt`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Final

import haiku as hk

from polyamp.errors import ModelError, UnsupportedError
from polyamp_jax.models.function import NOTHING
from polyamp_jax.models.parts import Keys, Opaque, Parts, Running, owners
from polyamp_jax.models.routes import Route
from polyamp_jax.models.scopes import Casts

_PURE: Final = (hk.Transformed, hk.MultiTransformed)
_WITH_STATE: Final = (hk.TransformedWithState, hk.MultiTransformedWithState)


@dataclasses.dataclass(frozen=True)
class HaikuAdapter:
    """`(hk.Transformed, params)`, or `(hk.TransformedWithState, (params, state))`; `apply` gets the one random key.

    `flat` remembers that the model came as three items, so that it is given back as three.
    """

    transformed: Opaque
    stateful: bool
    flat: bool
    stream: str | None = "rng"
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = False
    module: ClassVar[type | tuple[type, ...]] = (types.FunctionType, functools.partial)

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        apply = route.function(self.transformed.value.apply)
        if not callable(apply):
            raise ModelError(
                f"a model made by hk.multi_transform is called by its functions: {_named(apply)}. Received: "
                f"{route}(...)."
            )
        # hk.without_apply_rng takes the argument away
        names = list(inspect.signature(apply).parameters)[1 + self.stateful :]
        key = (next(iter(keys.values()), None),) if names[:1] == ["rng"] else ()
        casts.expect(owners(params))
        with hk.intercept_methods(_interceptor(casts)):
            if not self.stateful:
                return apply(params, *key, *args, **kwargs), running
            output, changed = apply(params, running.statistics, *key, *args, **kwargs)
        return output, running._replace(statistics=changed)

    def view(self, params: Any, running: Running) -> Any:
        apply = self.transformed.value.apply
        return NOTHING if callable(apply) else apply

    def bound(self, engine: Any) -> Any:
        return None

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return params

    def state_of(self, running: Running) -> Any:
        return running.statistics if self.stateful else None

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        return owners(params)

    def join(self, params: Any, running: Running) -> Any:
        if not self.stateful:
            return self.transformed.value, params
        both = (params, running.statistics)
        return (self.transformed.value, *both) if self.flat else (self.transformed.value, both)

    def check_streams(self, names: Collection[str]) -> None:
        if len(names) > 1:
            raise UnsupportedError(f"haiku's apply takes one random key. Received: rngs for {sorted(names)}.")


def adapt_haiku(model: Any) -> Parts:
    """The parts of a transformed function with its parameters."""
    stateful = isinstance(model, tuple) and isinstance(model[0], _WITH_STATE)
    both = model[1:] if len(model) == 3 else model[-1]
    fits = not isinstance(model, (*_PURE, *_WITH_STATE)) and (
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
    return Parts(HaikuAdapter(Opaque(model[0]), stateful, len(model) == 3), params, Running(state, ()))


def _interceptor(casts: Casts) -> Any:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not casts.active or context.method_name == "__init__":
            return call(*args, **kwargs)
        with casts.module(context.module.module_name, args, kwargs, None) as (args, kwargs):
            return call(*args, **kwargs)

    return intercept


def _named(apply: Any) -> str:
    """The functions of `hk.multi_transform`, as `loss_fn` reaches them."""
    if isinstance(apply, Mapping):
        return ", ".join(f"model[{key!r}](...)" for key in apply)
    names = getattr(apply, "_fields", None)
    if names is not None:
        return ", ".join(f"model.{name}(...)" for name in names)
    return ", ".join(f"model[{number}](...)" for number in range(len(apply)))
