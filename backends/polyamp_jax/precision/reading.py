"""`BoundModel`: the model as `loss_fn` sees it, called and read under the policy (S29).

What is called (the model, a submodule, a method, a property that computes) runs through the engine, on a copy of the
model inside the interpreter's trace. What is read (a parameter, a setting) comes from a view of the model around the
arrays of the pass. Called by `differentiate`, `autocast` and `backend`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from polyamp.errors import ModelError, RecipeError
from polyamp.recipe.policy import Policy
from polyamp_jax import compat
from polyamp_jax.arrays import named_leaves
from polyamp_jax.models import attributes
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.parts import module_paths
from polyamp_jax.models.routes import ROOT, Route, Step, kind_of
from polyamp_jax.precision.bound import Engine, NativeEngine
from polyamp_jax.precision.interpreter.recorder import Recorder


class BoundModel:
    """A model, or a part of one, under a policy: call it and read its attributes as the library's own.

    `params` are the master weights, as the model's library holds them, and `state` what haiku and equinox keep beside
    them, as the calls so far have left it, unless the model has attributes of these names.
    """

    __slots__ = ("__weakref__", "_polyamp_engine", "_polyamp_route")

    _polyamp_engine: Engine
    _polyamp_route: Route

    def __init__(self, engine: Engine, route: Route = ROOT) -> None:
        object.__setattr__(self, "_polyamp_engine", engine)
        object.__setattr__(self, "_polyamp_route", route)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output, floating leaves in the policy's output dtype."""
        return self._polyamp_engine.call(self._polyamp_route, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        owner = self._polyamp_here()
        try:
            value = getattr(owner, name)
        except AttributeError as error:
            engine, route = self._polyamp_engine, self._polyamp_route
            if name == "params" and route.kind == "module":
                return engine.params_of(owner, route)
            if name == "state" and route == ROOT and (state := engine.state()) is not None:
                return state
            raise AttributeError(attributes.missing(owner, self._polyamp_route, name)) from error
        return self._polyamp_part(owner, Step(name, True), value)

    def __getitem__(self, key: Any) -> Any:
        owner = self._polyamp_here()
        value = owner[key]
        if isinstance(key, slice) and isinstance(value, list | tuple):
            return type(value)(self[number] for number in range(*key.indices(len(owner))))
        if isinstance(key, int) and key < 0 and not isinstance(owner, Mapping):
            key += len(owner)  # as in the path of the part, which overrides name
        return self._polyamp_part(owner, Step(key, False), value)

    def __iter__(self) -> Iterator[Any]:
        owner = self._polyamp_here()
        if isinstance(owner, Mapping):
            return iter(owner)
        return iter([self[number] for number in range(len(owner))])

    def __len__(self) -> int:
        return len(self._polyamp_here())

    def __contains__(self, key: Any) -> bool:
        return key in self._polyamp_here()

    def __bool__(self) -> bool:
        return True  # not by __len__, which most modules do not have

    def __setattr__(self, name: str, value: Any) -> None:
        attributes.refuse_set(self._polyamp_route, name)

    def __delattr__(self, name: str) -> None:
        attributes.refuse_delete(self._polyamp_route, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._polyamp_here()), "params"})

    def __repr__(self) -> str:
        return f"BoundModel({self._polyamp_here()!r}, {self._polyamp_engine.plan.policy!r})"

    def _polyamp_under(self, policy: Policy) -> BoundModel:
        """The same model or part under another policy (S3)."""
        engine: Any = self._polyamp_engine.under(policy)
        return BoundModel(engine, self._polyamp_route)

    def _polyamp_here(self) -> Any:
        """The native part in the engine's view."""
        return self._polyamp_route.walked(self._polyamp_engine.view())

    def _polyamp_part(self, owner: Any, step: Step, value: Any) -> Any:
        """What a step leads to: a bound part, or the value as it is."""
        engine = self._polyamp_engine
        kind = kind_of(owner, step, value, engine.adapter.module)
        if kind == "value" or (kind == "property" and not attributes.is_computed(value)):
            return value
        route = self._polyamp_route.to(step, kind)
        if kind == "base":
            attributes.refuse_base(owner, route)
        part = BoundModel(engine, route)
        return part() if kind == "property" else part


class _Through:
    """The engine of what a bound model is behind `jax.tree.map` or a transformation: parameters, and no model.

    A call in there could not hand on the running state and the random streams, so it is refused.
    """

    def __init__(self, params: Any) -> None:
        self.params = params

    def call(self, *_: Any) -> Any:
        """Raises RecipeError."""
        raise RecipeError(attributes.TRANSFORMED)

    view = call


def _flattened(model: BoundModel) -> Any:
    engine, route = model._polyamp_engine, model._polyamp_route
    if isinstance(engine, _Through):
        params = engine.params
    elif route.kind == "container":
        here = model._polyamp_here()
        params = {key: model[key] for key in here} if isinstance(here, Mapping) else list(model)
    elif route.kind == "module":
        params = engine.tree(model._polyamp_here(), route)
    else:
        raise RecipeError(attributes.TRANSFORMED)
    return [(jax.tree_util.GetAttrKey("params"), params)], route


def _unflattened(route: Route, children: Any) -> BoundModel:
    engine: Any = _Through(*children)
    return BoundModel(engine, route)


# A pytree of its parameters: jax.tree.leaves(model), eqx.filter(model, ...) and nnx.state(model, nnx.Param) would else
# find one leaf, the model, or nothing at all, and a penalty over what they give would be 0.
jax.tree_util.register_pytree_with_keys(BoundModel, _flattened, _unflattened)


def bound_model(engine: Engine) -> Any:
    """What `loss_fn` gets: an nnx or equinox module, or of the other libraries a `BoundModel`."""
    found = engine.adapter.bound(engine)
    return BoundModel(engine) if found is None else found


def autocast_model(model: Any, policy: Policy, *, recorder: Recorder | None = None, strict: bool = False) -> Any:
    """A native model as one that is called and read under the policy, as it is at each call."""
    plan = policy.plan(module_paths(adapt(model)), backend="jax")
    return bound_model(NativeEngine(model, plan, recorder=recorder, strict=strict))


def is_bound(value: Any) -> bool:
    """Whether a value is a model, or a part of one, under a policy."""
    return isinstance(value, BoundModel) or _room_of(value) is not None


def _room_of(value: Any) -> Any:
    """The module of polyamp's that bound this nnx or equinox module; None if none did."""
    if compat.is_a(value, "flax.nnx", "Module"):
        from polyamp_jax.models import bound_nnx

        return bound_nnx if bound_nnx.is_bound(value) else None
    if compat.is_a(value, "equinox", "Module"):
        from polyamp_jax.models import bound_equinox

        return bound_equinox if bound_equinox.is_bound(value) else None
    return None


def masters_of(model: Any) -> dict[str, Any]:
    """The master weights of a bound model by path.

    Raises:
        ModelError: it is a part of a model.
        RecipeError: it is a copy that a transformation made.
    """
    engine, route = engine_of(model)
    if route != ROOT:
        raise ModelError(
            f"polyamp.parameters takes the model that loss_fn is given, and {route} is a part of it. Take the model's "
            f"and choose by their paths: if path.startswith({route.path + '/'!r})."
        )
    engine.view()  # outside of a step the masters are those that the user's model has now
    return named_leaves(engine.parameters)


def engine_of(model: Any) -> tuple[Any, Route]:
    """What runs a bound model, or a part of one, and where it stands."""
    if isinstance(model, BoundModel):
        return model._polyamp_engine, model._polyamp_route
    place = _room_of(model).place_of(model)
    engine = place.owner()
    if not isinstance(engine, Engine):
        raise RecipeError(attributes.TRANSFORMED)
    return engine, place.route
