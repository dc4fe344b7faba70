"""`LossTrace`: the traced programs of a function with a model under a policy.

JAX marks the equations of a backward pass, and keeps the scopes of the modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import sgd
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules import step_checks
from polyamp_jax import compat
from polyamp_jax.arrays import matmul_precision
from polyamp_jax.models.adapter import ModelParts, module_paths
from polyamp_jax.models.libraries import library_of
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.observe.capture import TaggingEngine, is_interpreted
from polyamp_jax.observe.jax_only.output_tags import enable_name_scopes
from polyamp_jax.observe.op_dtypes import MODEL_SCOPE, TracedOperation
from polyamp_jax.precision import autocast
from polyamp_jax.precision.interpreter.casting_recorder import Recorder
from polyamp_jax.precision.jax_only.policy_engine import PolicyEngine, forward_scopes
from polyamp_jax.precision.policy_module import make_policy_module
from polyamp_jax.step import forward_backward
from polyamp_jax.step.state import JaxState


def is_loss(target: Any, inputs: tuple[Any, ...]) -> bool:
    """Return whether a target is a function, with one model among its inputs."""
    return library_of(target) is None and sum(library_of(each) is not None for each in inputs) == 1


class LossTrace:
    """Programs of a function of one model, which runs under a policy as in a step.

    Args:
        backend: this backend.
        target: the function.
        policy: the policy.
        inputs: its arguments, the model among them.
        options: of `init`.
        strict: raise for an operation without a rule.

    Attributes:
        plan: the policy, resolved for the model.
        modules: paths of the model's modules; None for a function.
        arguments: parameters and other inputs, of the functions that are traced.

    Raises:
        UnsupportedError: the policy does not use autocast.
    """

    def __init__(
        self,
        backend: Any,
        target: Any,
        policy: Policy,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._target, self._strict = target, strict
        self._places = [library_of(each) is not None for each in inputs]
        model = inputs[self._places.index(True)]
        recipe = Recipe(policy=policy, optimizer=sgd(0.0), scaler=LossScaler.off())
        self._state: JaxState = backend.init(model, recipe, **options)
        adapter = self._state.setup.adapter
        if not adapter.applies_policy and not is_interpreted(self._state):
            raise UnsupportedError(autocast.NO_AUTOCAST_MESSAGE.format(policy=policy))
        others = [None if is_model else each for each, is_model in zip(inputs, self._places, strict=True)]
        self.arguments = (self._state.params, others)
        self.plan = self._state.setup.plan
        parts = ModelParts(adapter, self._state.params, self._state.running)
        self.modules = module_paths(parts) if adapter.module else None

    def function(self, recorder: Recorder) -> Callable[[Any, Any], Any]:
        """Return the function of `arguments` that runs the pass, and whose model's operations are recorded."""
        state = self._state

        def run(params: Any, others: Any) -> Any:
            keys = forward_backward.pass_keys(state, state.running.draws)
            adapter, plan = state.setup.adapter, state.setup.plan
            kind = TaggingEngine if adapter.applies_policy else ScopedEngine
            engine = kind(adapter, plan, params, state.running, keys, recorder=recorder, strict=self._strict)
            model = make_policy_module(engine)
            scopes = enable_name_scopes() if adapter.applies_policy else contextlib.nullcontext()
            with matmul_precision(plan), scopes, forward_scopes([engine]):
                result = self._target(
                    *(model if is_model else each for each, is_model in zip(others, self._places, strict=True))
                )
            return step_checks.split_loss_and_aux(result)[0] if isinstance(result, tuple) else result

        return run

    def program(self, recorder: Recorder, transform: Callable[..., Any] = lambda run: run) -> compat.ClosedJaxpr:
        """Return the traced program of the pass, or of its transformation."""
        return jax.make_jaxpr(transform(self.function(recorder)))(*self.arguments)

    def gradient_program(self) -> compat.ClosedJaxpr:
        """Return the traced program of the pass with its backward pass."""
        return self.program(Recorder(), jax.grad)

    def is_loss(self, program: compat.ClosedJaxpr) -> bool:
        """Return whether the result of a program of the pass is a loss."""
        kinds = [(var.aval.shape, jnp.issubdtype(var.aval.dtype, jnp.floating)) for var in program.jaxpr.outvars]
        return kinds == [((), True)]

    def rule(self, operation: TracedOperation) -> str:
        """Return the rule of an operation of the backward pass: its dtypes follow from the forward pass."""
        if not operation.is_model:
            return "off"
        plan, parts = self._state.setup.plan, operation.module.split("/")
        if any("/".join(parts[:n]) in plan.overridden for n in range(1, len(parts) + 1)):
            return "override"
        return "follow" if plan.mixes else "off"


class ScopedEngine(PolicyEngine):
    """Policy engine whose calls of the model have a scope of their own."""

    def call(self, route: ModulePath, args: Any, kwargs: Any, part: Any = None) -> Any:
        with jax.named_scope(MODEL_SCOPE):
            return super().call(route, args, kwargs, part)
