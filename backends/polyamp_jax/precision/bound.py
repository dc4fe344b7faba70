"""`BoundModel`: a model's parts and a policy become the callable that `loss_fn` sees.

In mode "autocast" the interpreter runs the model on its master weights; in mode "cast" parameters are cast once at the
model's boundary, inputs and outputs at every call (S3). Called by `state`, `differentiate` and `autocast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Plan
from polyamp_jax.arrays import cast_arguments, conform, matmul_precision
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.function import FunctionAdapter
from polyamp_jax.models.nnx_arguments import Taken, put_in, take_out
from polyamp_jax.models.parts import Adapter, Keys, Running, module_paths
from polyamp_jax.models.scopes import Casts
from polyamp_jax.precision.cast_mode import compute_params, module_dtypes
from polyamp_jax.precision.interpreter.recorder import Recorder
from polyamp_jax.precision.interpreter.run import evaluate
from polyamp_jax.precision.interpreter.staging import settled
from polyamp_jax.precision.interpreter.walk import interprets


class BoundModel:
    """The model as `loss_fn` sees it: parameters bound, running state tracked from call to call.

    Every call gets random keys of its own, folded from the step's, so that two passes through one model in one
    `loss_fn` have different dropout masks.
    """

    def __init__(
        self,
        adapter: Adapter,
        plan: Plan,
        params: Any,
        running: Running,
        keys: Keys,
        *,
        recorder: Recorder | None = None,
        strict: bool = False,
    ) -> None:
        self._adapter = adapter
        self._plan = plan
        self._params = params
        self._keys = keys
        self._recorder = recorder
        self._strict = strict
        self._calls = 0
        self.running = running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, floating leaves in the policy's output dtype."""
        plan = self._plan
        keys = {name: jax.random.fold_in(key, self._calls) for name, key in self._keys.items()}
        self._calls += 1
        args, kwargs, taken = take_out(args, kwargs)
        arrays = None if taken is None else taken.arrays
        with matmul_precision(plan), settled():
            if not plan.root.mixes or not interprets(plan):
                args, kwargs, arrays = cast_arguments((args, kwargs, arrays), plan.compute, float64=plan.float64)
            if interprets(plan):
                output, running, changed = self._autocast(taken, keys, args, kwargs, arrays)
            else:
                casts = Casts(plan, module_dtypes(self._params, self._adapter, plan))
                output, running, changed = self._called(
                    casts, taken, self._params, self.running, keys, args, kwargs, arrays
                )
            self.running = conform(running, self.running, what="the model's running state")
            output = cast_arguments(output, plan.output, float64=plan.float64)
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
        casts = Casts(self._plan, scoped=True)

        def run(params: Any, running: Running, keys: Keys, args: Any, kwargs: Any, arrays: Any) -> Any:
            return self._called(casts, taken, params, running, keys, args, dict(kwargs), arrays)

        made: tuple[Any, Running, Any] = evaluate(
            self._plan,
            run,
            (self._params, self.running, keys, args, kwargs, arrays),
            {},
            modules=None if isinstance(self._adapter, FunctionAdapter) else lambda: casts.paths,
            parameters=self._params,
            strict=self._strict,
            recorder=self._recorder,
        )
        return made


def autocast_model(
    model: Any, policy: Policy, *, recorder: Recorder | None = None, strict: bool = False
) -> Callable[..., Any]:
    """A native model as a callable under the policy.

    What a call changes is put back into an nnx module, as calling it would; the other libraries' models cannot
    change, so there it is dropped.
    """
    plan = policy.plan(module_paths(adapt(model)), backend="jax")

    def call(*args: Any, **kwargs: Any) -> Any:
        adapter, params, running = adapt(model)
        params = compute_params(params, adapter, plan)
        bound = BoundModel(adapter, plan, params, running, {}, recorder=recorder, strict=strict)
        output = bound(*args, **kwargs)
        adapter.write_back(model, bound.running)
        return output

    return call
