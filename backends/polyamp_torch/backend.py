"""`TorchBackend`: the `Backend` protocol for PyTorch, implemented by `step`, `precision`, `distributed` and others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from polyamp.backend_parts import BackendParts
from polyamp.contract.backend import Backend, BackendInfo, ValueAndGrad
from polyamp.contract.harness import Harness
from polyamp.errors import GradientError, LossError, PolyampError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules import step_checks
from polyamp.rules.update_decision import Skip
from polyamp.trees import leaves, map_tree
from polyamp_torch import arrays
from polyamp_torch.arrays import XP, dtype_name
from polyamp_torch.compat import foreach_mul
from polyamp_torch.distributed import replicas
from polyamp_torch.distributed.torch_only.fsdp_mixed_precision import check_fsdp_precision
from polyamp_torch.losses import TorchLosses
from polyamp_torch.own_loop.native_scaler import GradScaler, native_scaler
from polyamp_torch.precision.autocast import autocast, wrap_function
from polyamp_torch.precision.policy_module import PolicyModule, module_device, resolve_policy, wrapped_module
from polyamp_torch.precision.torch_only.keras_layers import is_keras_model
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters
from polyamp_torch.step import averages, error_hints, forward_backward, optimizer_metadata, step, update
from polyamp_torch.step.grad_stats import global_norm, scale_reciprocal
from polyamp_torch.step.refresh import refresh_state
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.torch_only.reader_selection import model_reader


class TorchBackend(BackendParts):
    """`Backend` for PyTorch."""

    name = "torch"
    monitors_steps = True
    changes_op_rules = True
    has_float8_products = True
    xp = XP
    losses = TorchLosses()
    to_numpy = staticmethod(arrays.to_numpy)
    cast = staticmethod(arrays.cast_tree)
    check_arrays = staticmethod(optimizer_metadata.list_load_problems)
    refresh = staticmethod(refresh_state)
    averaged = staticmethod(averages.averaged)
    averaged_model = staticmethod(averages.averaged_model)

    def info(self) -> BackendInfo:
        cuda = tuple(arrays.describe_device(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
        return BackendInfo("torch", str(torch.__version__), (*cuda, "cpu"))

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        device = like.device if isinstance(like, torch.Tensor) else None
        return torch.full((), value, dtype=getattr(torch, dtype), device=device)

    def is_concrete(self, array: Any) -> bool:
        return not torch.compiler.is_compiling()

    def native_policy(self, policy: Policy) -> Any:
        """Return a `torch.autocast` region for the default device; use `polyamp_torch.autocast` for another device."""
        return autocast(policy, "cuda" if torch.cuda.is_available() else "cpu")

    def native_scaler(self, scaler: LossScaler, **options: Any) -> GradScaler:
        """Return a `torch.amp.GradScaler`; `options` are those of `polyamp_torch.GradScaler`."""
        return native_scaler(scaler, **options)

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        if isinstance(target, PolicyModule):  # the model in `loss_fn`: this policy replaces its own inside
            target = wrapped_module(target)
        if is_keras_model(target):
            from polyamp_torch.precision.torch_only.keras_policy_module import keras_autocast

            return keras_autocast(target, policy)
        if isinstance(target, nn.Module):
            plan = resolve_policy(target, policy)
            check_fsdp_precision(target, plan)
            return PolicyModule(target, plan, module_device(target))
        return wrap_function(target, policy.plan())

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        if not isinstance(loss, torch.Tensor):
            raise LossError(f"scale() needs a tensor. Received: {type(loss).__name__}.")
        step_checks.check_loss(tuple(loss.shape), dtype_name(loss.dtype), what="scale()")
        return loss.float() if scale is None else loss.float() * scale

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        found = [leaf for _, leaf in leaves(grads) if leaf is not None]
        if not found:
            raise GradientError("unscale() got no gradients.")
        for leaf in found:
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
                raise GradientError(f"gradients must be floating tensors. Received: {leaf!r}.")
        wide = [leaf.detach().float() for leaf in found]
        unscaled = wide if scale is None else list(foreach_mul(wide, scale_reciprocal(scale)))
        rest = iter(unscaled)
        tree = map_tree(lambda leaf: None if leaf is None else next(rest), grads)
        return tree, torch.isfinite(global_norm(unscaled))

    def regularization(self, model: Any) -> Any:
        if is_keras_model(model):
            from polyamp_keras.precision.regularization_losses import regularization

            return regularization(model)
        parameters = tree_parameters(wrapped_module(model) if isinstance(model, PolicyModule) else model)
        return torch.zeros((), device=next((p.device for _, p in parameters), None), dtype=torch.float32)

    def parameters(self, model: Any) -> dict[str, Any]:
        if isinstance(model, PolicyModule):
            return model.trainable()
        if is_keras_model(model):
            from polyamp_torch.precision.torch_only.keras_policy_module import keras_parameters

            return keras_parameters(model)
        return dict(model_reader(model).trained())

    def init(self, model: Any, recipe: Recipe, **options: Any) -> TorchState:
        step_checks.check_options(options, (), function="init", backend=self.name)
        try:
            state = TorchState(model, recipe, self)
        except Exception as error:
            replicas.report_failed_init(model, error)
            raise
        replicas.compare_and_check_ranks(state)
        if state.device.type == "cuda" and "bfloat16" in state.plan.narrow:
            _require_bfloat16()
        return state

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        step_checks.check_options(options, ("compile", "weight", "monitor"), function="train_step", backend=self.name)
        weight, monitor = options.get("weight"), options.get("monitor")
        how = options.get("compile", False)
        if not isinstance(how, bool | Mapping):
            raise UnsupportedError(
                f"compile must be True, False or a dict of torch.compile's options. Received: compile={how!r}."
            )
        if how is False:
            return functools.partial(step.train_step, loss_fn, recipe, weight, monitor)
        from polyamp_torch.step.torch_only.compiled_step import CompiledStep

        return CompiledStep(loss_fn, recipe, how if isinstance(how, Mapping) else {}, weight, monitor)

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        step_checks.check_options(options, ("weight",), function="value_and_grad", backend=self.name)
        return lambda states, batch: forward_backward.value_and_grad(loss_fn, states, batch, options.get("weight"))

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        return list(states), update.apply_gradients(states, grads, skip)

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        return list(gradients.values.items())

    def export_state(self, state: Any) -> dict[str, np.ndarray[Any, Any]]:
        exported: dict[str, np.ndarray[Any, Any]] = state.export()
        return exported

    def import_state(self, state: Any, arrays: Mapping[str, Any]) -> TorchState:
        restored: TorchState = state
        restored.load(arrays)
        return restored

    def optimizer_settings(self, state: Any) -> dict[str, Any]:
        return dict(state.optimizer_settings)

    def setting_of(self, state: Any, name: str) -> str | None:
        return optimizer_metadata.optimizer_setting(state.recipe.optimizer, name)

    def explain_error(self, error: Exception, states: Sequence[Any], batch: Any) -> PolyampError | None:
        return error_hints.explain_error(error)

    def testing(self) -> Harness:
        from polyamp_torch.harness import TorchHarness

        return TorchHarness()

    def library_harness(self, library: str) -> Harness:
        """Return the harness of Keras's models, for the conformance suite (`HasLibraryHarnesses`)."""
        if library != "keras":
            raise UnsupportedError(f"the torch backend trains models of torch and of Keras. Received: {library!r}.")
        from polyamp_torch.keras_harness import KerasTorchHarness

        return KerasTorchHarness()


BACKEND: Final[Backend] = TorchBackend()
"""The backend itself, which `polyamp` finds by its entry point."""


def _require_bfloat16() -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UnsupportedError(
            f"this GPU ({torch.cuda.get_device_name()}) cannot compute in bfloat16. Use Policy('mixed_float16')."
        )
