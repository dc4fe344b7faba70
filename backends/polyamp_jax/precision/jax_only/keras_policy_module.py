"""`KerasPolicyModule`: a Keras model on JAX as `loss_fn` sees it, with the policy on its layers (S1, S3, S5)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax.arrays import matmul_precision
from polyamp_jax.models.module_path import ROOT_PATH, PathStep
from polyamp_jax.models.module_proxy import Binding
from polyamp_jax.precision.interpreter.tracing import innermost_policy_scope
from polyamp_keras.interrupts import EnsureUndo, close_stale_blocks
from polyamp_keras.precision.bound_model import BoundKerasModel, root_model
from polyamp_keras.precision.policy_application import PolicyApplication


class KerasPolicyModule(BoundKerasModel):
    """Keras model under a policy (`BoundKerasModel`).

    Inside a step the policy is on the layers around the whole of `loss_fn`, so that calls of layers are covered too.
    Elsewhere each call puts it there for itself.

    Args:
        model: the model, or a layer of it.
        engine: engine of the model.
        whole: for a layer, the bound model that contains it.
    """

    def __init__(self, model: Any, engine: Any, whole: Self | None = None) -> None:
        super().__init__(model, engine.plan, whole=whole)
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output with floating arrays in the policy's output dtype."""
        if self._engine.native is None:
            return super().__call__(*args, **kwargs)
        return self._under_policy(self._model, args, kwargs)

    def __repr__(self) -> str:
        return f"KerasPolicyModule({self._model!r}, {self._plan.policy!r})"

    def _polyamp_binding_of(self) -> Binding:
        """Return the engine and the path, for what takes any model of a step."""
        engine = self._engine
        inside = ROOT_PATH if self is self._whole else ROOT_PATH.to(PathStep(self._model.name, True), "module")
        return Binding(lambda: engine, inside)

    def _bound_layer(self, layer: Any) -> Self:
        return type(self)(layer, self._engine, self._whole)

    def _under_policy(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        engine = self._engine
        if engine.native is not None or not engine.is_in_other_trace():
            return super()._under_policy(function, args, kwargs)
        before = engine.open_pass.values()
        result = super()._under_policy(function, args, kwargs)
        engine.open_pass.refuse_changes(before)
        return result

    @contextlib.contextmanager
    def _policy_region(self) -> Iterator[ResolvedPolicy]:
        engine = self._engine
        plan = engine.active_plan()
        with matmul_precision(plan), innermost_policy_scope():
            if engine.native is None and plan is engine.plan:
                yield plan
                return
            close_stale_blocks()
            application = PolicyApplication(root_model(self), plan)
            with EnsureUndo(application.restore):
                application.put()
                yield plan
