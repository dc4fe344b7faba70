"""`PolicyModule`: the model that `loss_fn` receives, whose calls and attributes follow the policy (S29).

- Calls (the model, a submodule, a method, a property that computes) run through the engine, on a copy of the model
  inside the interpreter's trace.
- Reads (a parameter, a setting) come from a view of the model with the arrays of the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from polyamp.errors import ModelError, RecipeError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_jax.arrays import named_leaves
from polyamp_jax.models.libraries import adapt, library_of
from polyamp_jax.models.module_path import ROOT_PATH, ModulePath, PathStep, path_kind
from polyamp_jax.models.module_proxy import (
    TRANSFORMED_LOSS_ERROR,
    UnboundEngine,
    binding_of,
    has_computed_arrays,
    is_proxy,
    missing_attribute_message,
    refuse_base_method,
    refuse_delete_attribute,
    refuse_set_attribute,
)
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.jax_only.autocast_regions import open_region
from polyamp_jax.precision.jax_only.policy_engine import NativePolicyEngine, PolicyEngine

LAYERS_CAST_ERROR: Final = (
    "the layers of a Keras model cast, each to its own dtype, and polyamp's op lists do not act in it. Received: "
    "{call}. polyamp_keras.apply_policy(model, policy).choices has the dtype of each layer."
)
"""Error message for what the interpreter records, of a model that it does not run."""


class PolicyModule:
    """A model, or a part of one, under a policy. It is called and read like the library's own model.

    Additional attributes, unless the model itself has attributes of these names:

    - `params` are the master weights in the structure of the model's library.
    - `state` is the state of haiku and equinox models after the calls so far.
    """

    __slots__ = ("__weakref__", "_polyamp_engine", "_polyamp_policy", "_polyamp_route")

    _polyamp_engine: PolicyEngine
    _polyamp_route: ModulePath
    _polyamp_policy: Policy | None
    """Another policy for this model's calls than the engine's, or None (S3)."""

    def __init__(self, engine: PolicyEngine, route: ModulePath = ROOT_PATH, policy: Policy | None = None) -> None:
        object.__setattr__(self, "_polyamp_engine", engine)
        object.__setattr__(self, "_polyamp_route", route)
        object.__setattr__(self, "_polyamp_policy", policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, with floating leaves in the policy's output dtype."""
        policy = self._polyamp_policy
        with contextlib.nullcontext() if policy is None else open_region(policy):
            return self._polyamp_engine.call(self._polyamp_route, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        owner = self._polyamp_native_part()
        try:
            value = getattr(owner, name)
        except AttributeError as error:
            engine, route = self._polyamp_engine, self._polyamp_route
            if name == "params" and route.kind == "module":
                return engine.params_of(owner, route)
            if name == "state" and route == ROOT_PATH and (state := engine.state()) is not None:
                return state
            raise AttributeError(missing_attribute_message(owner, self._polyamp_route, name)) from error
        return self._polyamp_part(owner, PathStep(name, True), value)

    def __getitem__(self, key: Any) -> Any:
        owner = self._polyamp_native_part()
        value = owner[key]
        if isinstance(key, slice) and isinstance(value, list | tuple):
            return type(value)(self[number] for number in range(*key.indices(len(owner))))
        if isinstance(key, int) and key < 0 and not isinstance(owner, Mapping):
            key += len(owner)  # overrides name the part by its non-negative index
        return self._polyamp_part(owner, PathStep(key, False), value)

    def __iter__(self) -> Iterator[Any]:
        owner = self._polyamp_native_part()
        if isinstance(owner, Mapping):
            return iter(owner)
        return iter([self[number] for number in range(len(owner))])

    def __len__(self) -> int:
        return len(self._polyamp_native_part())

    def __contains__(self, key: Any) -> bool:
        return key in self._polyamp_native_part()

    def __bool__(self) -> bool:
        return True  # not by __len__, which most modules do not have

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_set_attribute(self._polyamp_route, name)

    def __delattr__(self, name: str) -> None:
        refuse_delete_attribute(self._polyamp_route, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._polyamp_native_part()), "params"})

    def __repr__(self) -> str:
        return f"PolicyModule({self._polyamp_native_part()!r}, {self._polyamp_engine.plan.policy!r})"

    def _polyamp_with_policy(self, policy: Policy) -> PolicyModule:
        """Return the same model or part under another policy (S3); itself if it is under another one already."""
        if self._polyamp_policy is not None:
            return self
        self._polyamp_engine.resolve_policy(policy)
        return PolicyModule(self._polyamp_engine, self._polyamp_route, policy)

    def _polyamp_native_part(self) -> Any:
        """Return the native part from the engine's view."""
        return self._polyamp_route.resolve(self._polyamp_engine.view())

    def _polyamp_part(self, owner: Any, step: PathStep, value: Any) -> Any:
        """Return the value at a path step: a bound part, or the value unchanged."""
        engine = self._polyamp_engine
        kind = path_kind(owner, step, value, engine.adapter.module)
        if kind == "value" or (kind == "property" and not has_computed_arrays(value)):
            return value
        route = self._polyamp_route.to(step, kind)
        if kind == "base":
            refuse_base_method(owner, route)
        part = PolicyModule(engine, route, self._polyamp_policy)
        return part() if kind == "property" else part


def _flatten_module(model: PolicyModule) -> Any:
    engine, route = model._polyamp_engine, model._polyamp_route
    if isinstance(engine, UnboundEngine):
        params = engine.params
    elif route.kind == "container":
        here = model._polyamp_native_part()
        params = {key: model[key] for key in here} if isinstance(here, Mapping) else list(model)
    elif route.kind == "module":
        params = engine.tree(model._polyamp_native_part(), route)
    else:
        raise RecipeError(TRANSFORMED_LOSS_ERROR)
    return [(jax.tree_util.GetAttrKey("params"), params)], route


def _unflatten_module(route: ModulePath, children: Any) -> PolicyModule:
    engine: Any = UnboundEngine(*children)
    return PolicyModule(engine, route)


# Registered as a pytree of its parameters. Otherwise jax.tree.leaves(model), eqx.filter(model, ...) and
# nnx.state(model, nnx.Param) would find one leaf, the model, or none, and a penalty over the result would be 0.
jax.tree_util.register_pytree_with_keys(PolicyModule, _flatten_module, _unflatten_module)


def make_policy_module(engine: PolicyEngine) -> Any:
    """Return the model for `loss_fn`: a proxy of an nnx or equinox module, a `KerasPolicyModule` of a Keras model, or a
    `PolicyModule` for other libraries."""
    if engine.adapter.applies_policy:  # loaded with the adapter of its library alone
        from polyamp_jax.precision.jax_only.keras_policy_module import KerasPolicyModule

        return KerasPolicyModule(engine.view(), engine)
    found = engine.adapter.bind(engine)
    return PolicyModule(engine) if found is None else found


def autocast_model(model: Any, policy: Policy, *, recorder: Recorder | None = None, strict: bool = False) -> Any:
    """Wrap a native model so that calls and reads follow the policy. Each call sees the model's current values."""
    library = library_of(model)
    if library is not None and library.applies_policy:
        module = library.file_in("models.adapters")
        if not module.is_built(model):
            return module.build_at_first_call(model, lambda: autocast_model(model, policy, strict=strict))
    parts = adapt(model)
    plan = parts.adapter.resolve_policy(policy, parts.params, parts.running)
    if parts.adapter.applies_policy and (strict or recorder is not None):
        raise UnsupportedError(LAYERS_CAST_ERROR.format(call=f"{type(model).__name__} with strict=True"))
    return make_policy_module(NativePolicyEngine(model, plan, recorder=recorder, strict=strict))


def is_policy_module(value: Any) -> bool:
    """Return whether a value is a model, or a part of one, under a policy."""
    return isinstance(value, PolicyModule) or is_proxy(value)


def follows_layer_policy(model: Any) -> bool:
    """Return whether the layers of a native or bound model apply the policy, as those of Keras do."""
    if is_proxy(model):
        found: Any = binding_of(model)
        return isinstance(engine := found.find_engine(), PolicyEngine) and engine.adapter.applies_policy
    library = library_of(model)
    return library is not None and library.applies_policy


def master_weights(model: Any) -> dict[str, Any]:
    """Return the master weights of a bound model by path.

    Raises:
        ModelError: it is a part of a model.
        RecipeError: it is a copy made by a transformation.
    """
    engine, route = engine_and_path(model)
    if route != ROOT_PATH:
        raise ModelError(
            f"polyamp.parameters takes the model that loss_fn is given, and {route} is a part of it. Take the model's "
            f"and choose by their paths: if path.startswith({route.path + '/'!r})."
        )
    return named_leaves(engine.parameters)


def engine_and_path(model: Any) -> tuple[Any, ModulePath]:
    """Return the engine of a bound model, or of a part of one, and its path."""
    if isinstance(model, PolicyModule):
        return model._polyamp_engine, model._polyamp_route
    binding: Any = binding_of(model)
    engine = binding.find_engine()
    if not isinstance(engine, PolicyEngine):
        raise RecipeError(TRANSFORMED_LOSS_ERROR)
    return engine, binding.route
