"""`BoundModel`: a model's parts and a policy become the callable that `loss_fn` sees.

In mode "autocast" the interpreter runs the model on its master weights; in mode "cast" parameters are cast once at the
model's boundary, inputs and outputs at every call (S3). Called by `state`, `differentiate` and `autocast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from polyamp.recipe.policy import Policy
from polyamp_jax.arrays import cast_arguments, conform, matmul_precision, named_leaves
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.nnx_arguments import Taken, put_in, take_out
from polyamp_jax.models.parts import Adapter, Keys, Running
from polyamp_jax.models.scopes import Casts
from polyamp_jax.precision.cast_mode import compute_params, module_dtypes
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.run import evaluate, settings_for
from polyamp_jax.precision.interpreter.staging import settled
from polyamp_jax.precision.interpreter.walk import interprets, mixes


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
                casts = Casts(policy, module_dtypes(self._params, self._adapter, policy))
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


def check_overrides(params: Any, policy: Policy) -> None:
    """Refuse an override that matches no module. Raises `PolicyError` with the nearest paths."""
    policy.resolve_overrides(_module_paths(named_leaves(params)))


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


def _module(parameter: str) -> str:
    return parameter.rpartition("/")[0]


def _module_paths(parameters: Any) -> list[str]:
    paths = {_module(name) for name in parameters}
    return sorted({"/".join(path.split("/")[: n + 1]) for path in paths if path for n in range(path.count("/") + 1)})
