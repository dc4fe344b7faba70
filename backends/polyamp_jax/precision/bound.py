"""`Plan` and `BoundModel`: a model's parts and a policy become the callable that `loss_fn` sees.

In mode "autocast" the interpreter runs the model on its master weights; in mode "cast" parameters are cast once at the
model's boundary, inputs and outputs at every call (S3). Called by `state`, `step` and `backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import ModelError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp_jax.arrays import cast_arguments, is_key, matmul_precision, named_leaves, path_name
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.nnx_arguments import Taken, put_in, take_out
from polyamp_jax.models.parts import Adapter, Keys, Opaque, Running
from polyamp_jax.models.scopes import Casts
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.run import evaluate, settings_for
from polyamp_jax.precision.interpreter.staging import settled
from polyamp_jax.precision.interpreter.walk import interprets, mixes


class Plan:
    """The static half of a state: adapter and recipe; compared by value, hashed once since `jit` asks every call."""

    __slots__ = ("_hash", "_key", "adapter", "recipe")

    def __init__(self, adapter: Adapter, recipe: Recipe) -> None:
        self.adapter = adapter
        self.recipe = recipe
        self._key = (adapter, Opaque(recipe))
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


class BoundModel:
    """The model as `loss_fn` sees it: parameters bound, running state tracked from call to call.

    Every call gets random keys of its own, folded from the step's, so that two passes through one model in one
    `loss_fn` have different dropout masks.
    """

    def __init__(
        self,
        adapter: Adapter,
        policy: Policy,
        params: Any,
        running: Running,
        keys: Keys,
        *,
        recorder: Recorder | None = None,
        strict: bool = False,
    ) -> None:
        self._adapter = adapter
        self._policy = policy
        self._params = params
        self._keys = keys
        self._recorder = recorder
        self._strict = strict
        self._calls = 0
        self.running = running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, floating leaves in the policy's output dtype."""
        policy = self._policy
        keys = {name: jax.random.fold_in(key, self._calls) for name, key in self._keys.items()}
        self._calls += 1
        args, kwargs, taken = take_out(args, kwargs)
        arrays = None if taken is None else taken.arrays
        with matmul_precision(policy), settled():
            if not mixes(policy) or not interprets(policy):
                args, kwargs, arrays = cast_arguments(
                    (args, kwargs, arrays), policy.compute, float64=policy.casts_float64
                )
            if interprets(policy):
                output, running, changed = self._autocast(taken, keys, args, kwargs, arrays)
            else:
                casts = Casts(policy, _module_dtypes(self._params, self._adapter, policy))
                output, running, changed = self._called(
                    casts, taken, self._params, self.running, keys, args, kwargs, arrays
                )
            self.running = conform(running, self.running, what="the model's running state")
            output = cast_arguments(output, policy.output, float64=policy.casts_float64)
        if taken is not None:
            taken.put_back(changed)
        return output

    def _called(
        self,
        casts: Casts,
        taken: Taken | None,
        params: Any,
        running: Running,
        keys: Keys,
        args: Any,
        kwargs: Any,
        arrays: Any,
    ) -> tuple[Any, Running, Any]:
        """The call itself: output, running state, and what it changed in nnx objects among its arguments."""
        if taken is None:
            return *self._adapter.call(params, running, keys, casts, args, kwargs), None
        objects = taken.anew(arrays)
        args, kwargs = put_in(args, kwargs, objects)
        output, running = self._adapter.call(params, running, keys, casts, args, kwargs)
        return output, running, taken.changed(objects, arrays)

    def _autocast(
        self, taken: Taken | None, keys: Keys, args: Any, kwargs: Any, arrays: Any
    ) -> tuple[Any, Running, Any]:
        casts = Casts(self._policy, scoped=True)

        def run(params: Any, running: Running, keys: Keys, args: Any, kwargs: Any, arrays: Any) -> Any:
            return self._called(casts, taken, params, running, keys, args, dict(kwargs), arrays)

        made: tuple[Any, Running, Any] = evaluate(
            settings_for(self._policy, self._strict),
            run,
            (self._params, self.running, keys, args, kwargs, arrays),
            {},
            modules=None if isinstance(self._adapter, FunctionAdapter) else lambda: casts.paths,
            parameters=self._params,
            recorder=self._recorder,
        )
        return made


def compute_params(params: Any, adapter: Adapter, policy: Policy) -> Any:
    """The parameters that a pass works on: the masters in mode "autocast"; in mode "cast" in the dtypes that they
    compute in, the policy's, or that of an override of their module (S5)."""
    if interprets(policy):
        return params

    def one(path: Any, leaf: Any) -> Any:
        return jnp.asarray(leaf, _dtype_of(_module(path_name(path)), adapter, policy))

    return jax.tree_util.tree_map_with_path(one, params)


def check_overrides(params: Any, policy: Policy) -> None:
    """Refuse an override that matches no module. Raises `PolicyError` with the nearest paths."""
    policy.resolve_overrides(_module_paths(named_leaves(params)))


def conform(new: Any, old: Any, *, what: str) -> Any:
    """`new` with the dtypes of `old`, strongly typed, so that no step is traced twice.

    Raises:
        ModelError: the structure or a shape changed; `what` says of what.
    """
    before_structure: Any = jax.tree.structure(old)
    if before_structure != jax.tree.structure(new):
        raise ModelError(
            f"{what} changed its structure in a step, which a compiled step cannot carry. Before: "
            f"{sorted(named_leaves(old))}. After: {sorted(named_leaves(new))}. Initialise the model with every "
            "collection that training uses, and without sown intermediates."
        )

    def one(path: Any, after: Any, before: Any) -> Any:
        if jnp.shape(after) != jnp.shape(before):
            raise ModelError(
                f"{what} changed its shape at {path_name(path)!r} from {jnp.shape(before)} to {jnp.shape(after)}, "
                "which a compiled step cannot carry."
            )
        return after if is_key(before) else jnp.asarray(after, jnp.result_type(before))

    return jax.tree_util.tree_map_with_path(one, new, old)


def autocast_model(
    model: Any, policy: Policy, *, recorder: Recorder | None = None, strict: bool = False
) -> Callable[..., Any]:
    """A native model as a callable under the policy.

    What a call changes is put back into an nnx module, as calling it would; the other libraries' models cannot
    change, so there it is dropped.
    """
    check_overrides(adapt(model).params, policy)

    def call(*args: Any, **kwargs: Any) -> Any:
        adapter, params, running = adapt(model)
        params = compute_params(params, adapter, policy)
        bound = BoundModel(adapter, policy, params, running, {}, recorder=recorder, strict=strict)
        output = bound(*args, **kwargs)
        adapter.write_back(model, bound.running)
        return output

    return call


def cast_function(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A function with its floating array arguments in `compute` and its floating results in `output` dtype."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with matmul_precision(policy), settled():
            args, kwargs = cast_arguments((args, kwargs), policy.compute, float64=policy.casts_float64)
            return cast_arguments(function(*args, **kwargs), policy.output, float64=policy.casts_float64)

    return call


def _module_dtypes(params: Any, adapter: Adapter, policy: Policy) -> Mapping[str, str]:
    """Path of every module that owns parameters -> its dtype; empty where nothing is cast.

    Every module's inputs are cast, not only the model's: one that promotes (a batch normalisation with float32
    statistics, an embedding or a recurrent carry with a dtype of its own) would else leave all that follows in float32.
    """
    if not policy.overrides and policy.compute == policy.param:
        return {}
    return {path: _dtype_of(path, adapter, policy) for path in map(_module, named_leaves(params))}


def _dtype_of(module: str, adapter: Adapter, policy: Policy) -> str:
    return policy.dtype_at(module) or (policy.param if module in adapter.pinned else policy.compute)


def _module(parameter: str) -> str:
    return parameter.rpartition("/")[0]


def _module_paths(parameters: Any) -> list[str]:
    paths = {_module(name) for name in parameters}
    return sorted({"/".join(path.split("/")[: n + 1]) for path in paths if path for n in range(path.count("/") + 1)})
