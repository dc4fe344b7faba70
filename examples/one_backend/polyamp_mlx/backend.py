"""`MLXBackend`: the contract of `polyamp.contract.backend`, a few lines a method; the sibling modules do the work."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from polyamp.array_namespace import ArrayNamespace
from polyamp.contract.backend import BackendInfo, LossFunctions, ValueAndGrad
from polyamp.contract.harness import Harness
from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaleState
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules import loss_weights, step_checks
from polyamp.rules.group_members import resolve_group_members
from polyamp.rules.refresh import KnownParameter, RefreshPlan, missing_model_error
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp.rules.update_decision import Skip
from polyamp_mlx.arrays import XP, Array, cast_tree, copy_array, device_name, dtype_name, evaluate_arrays, to_numpy
from polyamp_mlx.harness import MLXHarness
from polyamp_mlx.losses import MLXLosses
from polyamp_mlx.precision.autocast import precision_region
from polyamp_mlx.precision.policy_module import (
    PolicyModule,
    check_no_casts,
    module_arrays,
    module_paths,
    parameter_leaves,
    replace_arrays,
)
from polyamp_mlx.step.forward_backward import loss_and_gradients, prepare_batch
from polyamp_mlx.step.grad_stats import all_finite, unscale_gradients, unscale_tree
from polyamp_mlx.step.optimizers import initial_slots
from polyamp_mlx.step.state import MLXState
from polyamp_mlx.step.step import training_step
from polyamp_mlx.step.update import update_states


class MLXBackend:
    """`Backend` over MLX."""

    name = "mlx"

    @property
    def xp(self) -> ArrayNamespace:
        return XP

    @property
    def losses(self) -> LossFunctions:
        return MLXLosses()

    def info(self) -> BackendInfo:
        return BackendInfo("mlx", version("mlx"), (device_name(),))

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        return mx.array(value, dtype=getattr(mx, dtype))

    def to_numpy(self, array: Any) -> Array:
        return to_numpy(array)

    def is_concrete(self, array: Any) -> bool:
        return True

    def cast(self, tree: Any, dtype: str, *, float64: bool = False) -> Any:
        return cast_tree(tree, dtype, float64=float64)

    def native_policy(self, policy: Policy) -> contextlib.AbstractContextManager[None]:
        return precision_region(policy.plan().root)

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        if isinstance(target, PolicyModule) and isinstance(
            target.target, nn.Module
        ):  # in loss_fn: this policy applies (S3)
            check_no_casts(target.plan, policy.plan())
            return PolicyModule(target.target, policy.plan())
        if not isinstance(target, nn.Module):
            return functools.wraps(target, updated=())(PolicyModule(target, policy.plan()))
        plan = policy.plan(module_paths(target), backend=self.name)
        trainable, others = module_arrays(target)
        return PolicyModule(replace_arrays(target, {**trainable, **others}, plan), plan)

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        step_checks.check_loss(loss.shape, dtype_name(loss), what="scale()")
        wide = loss.astype(mx.float32)
        return wide if scale is None else wide * scale

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        quotients = unscale_tree(grads, scale)
        return quotients, all_finite(quotients)

    def regularization(self, model: Any) -> Any:
        return mx.array(0.0)

    def parameters(self, model: Any) -> dict[str, Any]:
        masters = model.masters if isinstance(model, PolicyModule) else None
        return module_arrays(model)[0] if masters is None else dict(masters)

    def init(self, model: Any, recipe: Recipe, **options: Any) -> MLXState:
        step_checks.check_options(options, ("seed",), function="init", backend=self.name)
        if not isinstance(model, nn.Module):
            raise ModelError(f"the mlx backend trains mlx.nn.Module. Received: {type(model).__name__}.")
        if not hasattr(recipe.optimizer, "slots"):
            raise UnsupportedError("the mlx backend trains with polyamp's optimizers; use one of polyamp's specs.")
        parameters, running = (
            evaluate_arrays({path: copy_array(a) for path, a in part.items()}) for part in module_arrays(model)
        )
        step_checks.check_parameters([(path, dtype_name(value)) for path, value in parameters.items()], recipe)
        leaves = functools.partial(parameter_leaves, model, parameters)
        groups = resolve_group_members(recipe, parameters, leaves, backend=self.name)
        return MLXState(
            backend=self,
            recipe=recipe,
            plan=recipe.policy.plan(module_paths(model), backend=self.name),
            groups=groups,
            module=replace_arrays(model, {}),
            parameters=parameters,
            running=running,
            slots=evaluate_arrays(initial_slots(groups, parameters)),
            counts={path: mx.array(0) for path in parameters},
            scale_state=recipe.loss_scaler.init(self.name),
            step=mx.array(0),
            seed=int(options.get("seed", 0)),
            watch=StuckScaleMonitor(),
        )

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        step_checks.check_options(options, ("weight",), function="train_step", backend=self.name)
        return functools.partial(training_step, loss_fn, weight=options.get("weight"))

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        step_checks.check_options(options, ("weight",), function="value_and_grad", backend=self.name)
        weight = options.get("weight")

        def masters(grads: Gradients, state: MLXState) -> Gradients:
            return grads._replace(values=cast_tree(grads.values, state.recipe.policy.param))  # S3

        def run(states: Sequence[Any], batch: Any) -> tuple[Any, list[Gradients]]:
            first = states[0]
            batch = prepare_batch(batch, first.recipe.policy.param)
            given = loss_weights.batch_loss_weight(weight, batch)
            found, scaled = loss_and_gradients(loss_fn, states, batch, next(first.draws), weight=given)
            loss, aux = found.value, found.aux
            grads = [masters(unscale_gradients(item, first), state) for item, state in zip(scaled, states, strict=True)]
            evaluate_arrays((loss, aux, grads))
            return (loss if aux is None else (loss, aux)), grads

        return run

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        for state, item in zip(states, grads, strict=True):
            step_checks.check_gradients(
                [(path, value.shape) for path, value in state.parameters.items()],
                [(path, None if value is None else value.shape) for path, value in item.values.items()],
            )
        after, results = update_states(states, grads, skip)
        evaluate_arrays(([state.arrays for state in after], results))
        return after, results

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        return list(gradients.values.items())

    def export_state(self, state: Any) -> dict[str, Array]:
        arrays = {name: to_numpy(array) for name, array in state.arrays.items()}
        return {**arrays, "rng/seed": np.asarray(state.seed, np.uint64)}

    def import_state(self, state: Any, arrays: Mapping[str, Array]) -> MLXState:
        def named(prefix: str, names: Mapping[str, Any]) -> dict[str, mx.array]:
            return {name: mx.array(arrays[f"{prefix}/{name}"]) for name in names}

        restored: MLXState = dataclasses.replace(
            state,
            parameters=named("model", state.parameters),
            running=named("running", state.running),
            slots={path: named(f"optimizer/{path}", group) for path, group in state.slots.items()},
            counts={path: mx.array(arrays[f"optimizer/{path}/step"]) for path in state.counts},
            scale_state=LossScaleState(**named("loss_scale", state.scale_state._asdict())),
            step=mx.array(arrays["step"]),
            seed=int(arrays["rng/seed"]),
            draws=itertools.count(),
        )
        return restored

    def refresh(self, state: Any, model: Any, plan: RefreshPlan) -> MLXState:
        if model is None:
            raise missing_model_error("an MLX state holds arrays of its own")
        made = self.init(model, state.recipe, seed=state.seed)
        before, now = state.parameters, made.parameters
        survivors = plan.surviving_parameters(
            {path: KnownParameter(id(array), array.shape) for path, array in before.items()},
            {path: KnownParameter(id(array), array.shape) for path, array in now.items()},
            lambda old, new: bool(mx.array_equal(before[old], now[new])),
        )
        kept = {path: {**group, **state.slots.get(survivors.get(path, ""), {})} for path, group in made.slots.items()}
        counts = {path: state.counts.get(survivors.get(path, ""), count) for path, count in made.counts.items()}
        goes_on = {"scale_state": state.scale_state, "step": state.step, "watch": state.watch, "draws": state.draws}
        return dataclasses.replace(made, slots=kept, counts=counts, **goes_on)

    def testing(self) -> Harness:
        return MLXHarness()
