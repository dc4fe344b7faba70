"""`BoundModel`: the model as `loss_fn` sees it, called and read under the policy (S29).

What is called (the model, a submodule, a method, a property that computes) runs through the engine, on a copy of the
model inside the interpreter's trace. What is read (a parameter, a setting) comes from a view of the model around the
arrays of the pass. Called by `differentiate`, `autocast` and `backend`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from polyamp.errors import ModelError, RecipeError, TraceError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_jax import compat
from polyamp_jax.arrays import is_array, named_leaves
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.function import NOTHING
from polyamp_jax.models.parts import module_paths
from polyamp_jax.models.routes import ROOT, Route, Step, kind_of
from polyamp_jax.precision.bound import Engine, NativeEngine
from polyamp_jax.precision.interpreter.recorder import Recorder


class BoundModel:
    """A model, or a part of one, under a policy: call it and read its attributes as the library's own.

    `params` are the master weights, as the model's library holds them, unless the model has an attribute of that name.
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
            if name == "params" and self._polyamp_route.kind == "module":
                engine = self._polyamp_engine
                return engine.adapter.params_of(owner, self._polyamp_route, engine.masters, engine.running)
            raise AttributeError(_missing(owner, self._polyamp_route, name)) from error
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
        raise TraceError(
            f"{self._polyamp_route}.{name} = ... would be lost: in JAX the model in loss_fn is a view of the state, "
            "which is a value. Return what is to be kept as aux, keep it in an nnx.Variable or a mutable collection of "
            "the model, or set the attribute before polyamp.init."
        )

    def __delattr__(self, name: str) -> None:
        raise TraceError(f"del {self._polyamp_route}.{name} would be lost: delete the attribute before polyamp.init.")

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
        if kind == "value" or (kind == "property" and not _computed(value)):
            return value
        route = self._polyamp_route.to(step, kind)
        if kind == "base":
            raise UnsupportedError(
                f"{route} is a method of {type(owner).__name__}'s base class, for use inside of a module: called from "
                "loss_fn it would pass the policy by, or what it changes would be lost. Call a method that the module "
                "defines; what belongs before training (train(), eval()) comes before polyamp.init. Parameters: "
                "model.params, or polyamp.parameters(model)."
            )
        part = BoundModel(engine, route)
        return part() if kind == "property" else part


TRANSFORMED: Final = (
    "loss_fn must be the loss function itself: its model is no array, so jax.jit, jax.grad and jax.value_and_grad "
    "cannot take it. polyamp differentiates and compiles loss_fn: pass it without it, and call no transformation of "
    "JAX on a function of the model inside of it. (A transformed function may close over the model instead, if that "
    "has neither running statistics nor random streams.)"
)
"""What to say where a bound model was handed to a transformation of JAX."""


class _Through:
    """The engine of what a bound model is behind `jax.tree.map` or a transformation: parameters, and no model.

    A call in there could not hand on the running state and the random streams, so it is refused.
    """

    def __init__(self, params: Any) -> None:
        self.params = params

    def call(self, *_: Any) -> Any:
        """Raises RecipeError."""
        raise RecipeError(TRANSFORMED)

    view = call


def _flattened(model: BoundModel) -> Any:
    engine, route = model._polyamp_engine, model._polyamp_route
    if isinstance(engine, _Through):
        params = engine.params
    elif route.kind == "container":
        here = model._polyamp_here()
        params = {key: model[key] for key in here} if isinstance(here, Mapping) else list(model)
    elif route.kind == "module":
        params = engine.adapter.tree(model._polyamp_here(), route, engine.masters, engine.running)
    else:
        raise RecipeError(TRANSFORMED)
    return [(jax.tree_util.GetAttrKey("params"), params)], route


def _unflattened(route: Route, children: Any) -> BoundModel:
    engine: Any = _Through(*children)
    return BoundModel(engine, route)


# A pytree of its parameters: jax.tree.leaves(model), eqx.filter(model, ...) and nnx.state(model, nnx.Param) would else
# find one leaf, the model, or nothing at all, and a penalty over what they give would be 0.
jax.tree_util.register_pytree_with_keys(BoundModel, _flattened, _unflattened)


def autocast_model(model: Any, policy: Policy, *, recorder: Recorder | None = None, strict: bool = False) -> BoundModel:
    """A native model as one that is called and read under the policy, as it is at each call."""
    plan = policy.plan(module_paths(adapt(model)), backend="jax")
    return BoundModel(NativeEngine(model, plan, recorder=recorder, strict=strict))


def masters_of(model: BoundModel) -> dict[str, Any]:
    """The master weights of a bound model by path.

    Raises:
        ModelError: it is a part of a model.
    """
    if model._polyamp_route != ROOT:
        route = model._polyamp_route
        raise ModelError(
            f"polyamp.parameters takes the model that loss_fn is given, and {route} is a part of it. Take the model's "
            f"and choose by their paths: if path.startswith({route.path + '/'!r})."
        )
    model._polyamp_here()  # outside of a step the masters are those that the user's model has now
    return named_leaves(model._polyamp_engine.masters)


def _computed(value: Any) -> bool:
    """Whether a property gave arrays of its own: these are computed again, under the policy."""
    leaves = jax.tree.leaves(value)
    return not isinstance(value, compat.nnx_kinds()) and bool(leaves) and all(map(is_array, leaves))


def _missing(owner: Any, route: Route, name: str) -> str:
    """What to say where there is no attribute of a name."""
    if owner is NOTHING:
        return (
            f"{route}.{name}: a model that is one function has the attribute params, and no other. Pass "
            "(linen_module, variables), an nnx or equinox module, or what hk.multi_transform made."
        )
    names = [other for other in dir(owner) if not other.startswith("_")]
    near = difflib.get_close_matches(name, names, 3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    if compat.is_a(owner, "flax.linen", "Module"):
        hint += (
            " What linen makes in a @nn.compact method is no attribute: define it in setup(), or read "
            "model.params[...], which is nested by module names."
        )
    return f"{route}: {type(owner).__name__!r} has no attribute {name!r}.{hint}"
