"""Precision plugins for `lightning.pytorch.Trainer` and `lightning.Fabric`.

Import it as `polyamp_torch.lightning`; it needs `pip install "polyamp[lightning]"`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn

from polyamp.errors import UnsupportedError
from polyamp.monitor.monitor import Monitor
from polyamp.monitor.writers import TrackerWriter
from polyamp.recipe.policy import Policy
from polyamp.recipe.scaler import LossScaler
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import has_found_inf_support
from polyamp_torch.integrations.loop_adapter import LoopSettings, require_extra
from polyamp_torch.integrations.loop_watch import LoopWatch
from polyamp_torch.precision.policy_module import PolicyModule
from polyamp_torch.precision.torch_only.autocast_region_stack import shield

with require_extra("lightning"):
    import lightning.pytorch as pl
    from lightning.fabric import plugins as fabric_plugins
    from lightning.pytorch import plugins as trainer_plugins

__all__ = ["FabricPrecision", "MixedPrecision"]

_LIGHTNING_PRECISIONS: Final[dict[str, Any]] = {"float16": "16-mixed", "bfloat16": "bf16-mixed", "float32": "32-true"}
"""Compute dtype -> Lightning's name for it, used in Lightning's checks and messages."""
_WEIGHT_AVERAGING: Final[Any] = getattr(
    pl.callbacks, "WeightAveraging", ()
)  # newer than the oldest supported Lightning


class _PolicyPrecision:
    """Shared parts of the two plugins.

    Attributes:
        settings: the checked policy and scaler.
        _watch: what tells the steps to a monitor, or None.
    """

    settings: LoopSettings
    _watch: LoopWatch | None

    @property
    def step_was_skipped(self) -> bool:
        """True when the last optimizer step was skipped; reading it waits for the device."""
        return self.settings.step_was_skipped

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass with the policy's float32 matmul precision, outside all autocast regions."""
        if self._watch is not None:
            self._watch.see_loss(tensor)
        with self.settings.matmul_precision(), shield():
            super().backward(tensor, *args, **kwargs)  # type: ignore[misc]  # the plugin's


class MixedPrecision(_PolicyPrecision, trainer_plugins.MixedPrecision):
    """Precision plugin for the Trainer: `Trainer(plugins=MixedPrecision("mixed_float16"))`.

    The whole `training_step` runs under the policy. In automatic optimization, a step whose gradients overflow does
    not change parameters, optimizer, running statistics, schedulers of interval "step" or the average of a
    `WeightAveraging` callback. In manual optimization the user handles running statistics and schedulers; see
    `step_was_skipped`. Under `DDPStrategy` and `ModelParallelStrategy` all ranks skip together.

    Gradients are unscaled before `on_before_optimizer_step`. They can be clipped with every optimizer, fused ones
    included. Lightning's checkpoints contain the scaler's state under the name that Lightning's own plugin uses.

    Args:
        policy: a `Policy` or its spelling, with float32 parameters and outputs, in autocast mode.
        scaler: a `LossScaler`, a preset's name, or None for the policy's default.
        device: "cuda" or "cpu", where the Trainer puts the model; None: "cuda" if it is available.
        monitor: a `polyamp.Monitor`, which reads the steps of `fit` (S35) and also writes to the trainer's loggers.

    Raises:
        ArgumentError: `monitor` is not one.
        UnsupportedError: a policy that the Trainer does not support; later, LBFGS under a scaler, another device, units
            of FSDP2 with a `MixedPrecisionPolicy` that contradicts the policy, or a monitor of FSDP1's parameters.

    Example:
        >>> plugin = MixedPrecision("mixed_bfloat16", device="cpu")
        >>> plugin.precision
        'bf16-mixed'
    """

    def __init__(
        self,
        policy: Policy | str,
        scaler: LossScaler | str | None = None,
        device: str | None = None,
        *,
        monitor: Monitor | None = None,
    ) -> None:
        settings = LoopSettings.create(policy, scaler, device, library="Lightning's Trainer")
        if settings.policy.output != "float32":
            raise UnsupportedError(
                "Lightning's Trainer runs training_step as a whole, which has no output to cast. Received: "
                f"output={settings.policy.output!r}. Use output='float32', and cast in training_step."
            )
        self.settings = settings
        self.precision = _LIGHTNING_PRECISIONS[settings.policy.compute]
        self.device = settings.device
        self.scaler = settings.scaler
        self._watch = None if monitor is None else LoopWatch(monitor, settings)
        self._log_to: Callable[[], None] | None = None
        self._logged: list[Any] = []
        self._module: pl.LightningModule | None = None
        self._policy_modules: list[PolicyModule] = []
        self._patches = contextlib.ExitStack()

    def forward_context(self) -> Any:
        """Return the policy's autocast region, a `torch.autocast`."""
        return self.settings.region(self._policy_modules)

    autocast_context_manager = forward_context

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged; the policy's overrides are installed while it runs."""
        self._policy_modules = self.settings.policy_modules(module)
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Suspend the schedulers of interval "step", and weight averaging, when a step is skipped (S13)."""
        module: Any = model if isinstance(model, pl.LightningModule) else getattr(model, "module", model)  # inside DDP
        if not isinstance(module, pl.LightningModule):
            raise UnsupportedError(f"a LightningModule is expected. Received: {type(module).__name__}.")
        self.settings.check_device(module)
        self.settings.check_sharding(module)
        self._patches.close()
        if self.scaler is not None and module.automatic_optimization:
            self._module = module
            self._suspend_schedulers([item.scheduler for item in lr_schedulers if item.interval == "step"])
        if self.scaler is not None:
            with contextlib.suppress(RuntimeError):  # connected manually, without a trainer
                trainer: Any = module.trainer
                self._suspend_weight_averaging(trainer.callbacks)
        if self._watch is not None and optimizers:  # not for an evaluation
            self._watch_module(module)
        return super().connect(model, optimizers, lr_schedulers)

    def _watch_module(self, module: Any) -> None:
        """Let the monitor read the module until `teardown`, and shadow `on_train_end`, before loggers are closed."""
        watch: Any = self._watch
        watch.watch(module)
        with contextlib.suppress(RuntimeError):  # connected manually, without a trainer
            self._log_to = functools.partial(self._add_loggers, module.trainer)
        hook: Callable[[], None] = module.on_train_end

        def on_train_end() -> None:
            watch.finish()
            hook()

        module.on_train_end = on_train_end
        self._patches.callback(vars(module).pop, "on_train_end", None)

    def _add_loggers(self, trainer: Any) -> None:
        """Write the records to the trainer's loggers too, at the trainer's numbers of steps."""
        watch: Any = self._watch
        first_step = trainer.global_step - watch.monitor.calls
        for logger in trainer.loggers:
            if not any(logger is known for known in self._logged):
                self._logged.append(logger)
                watch.monitor.add_writer(TrackerWriter(logger, first_step=first_step))

    def _suspend_schedulers(self, schedulers: list[Any]) -> None:
        """Shadow the module's `lr_scheduler_step` hook, which runs after the optimizer's step, until `teardown`."""
        module: Any = self._module
        hook: Callable[[Any, Any], None] = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if not (self.step_was_skipped and any(scheduler is item for item in schedulers)):
                hook(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step
        self._patches.callback(vars(module).pop, "lr_scheduler_step", None)

    def _suspend_weight_averaging(self, callbacks: list[Any]) -> None:
        """Shadow `should_update` of the callbacks that average weights after every step that Lightning counts."""
        for callback in callbacks:
            if isinstance(callback, _WEIGHT_AVERAGING):
                self._patches.callback(vars(callback).pop, "should_update", None)
                vars(callback)["should_update"] = self._update_unless_skipped(callback.should_update)

    def _update_unless_skipped(self, ask: Callable[..., bool]) -> Callable[..., bool]:
        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            after_skip = step_idx is not None and self.step_was_skipped
            return not after_skip and ask(step_idx=step_idx, epoch_idx=epoch_idx)

        return should_update

    def teardown(self) -> None:
        """Release the module, and remove the changes that `connect` made to it and its trainer."""
        self._patches.close()
        if self._watch is not None:
            self._watch.release()
        self._module, self._policy_modules = None, []
        super().teardown()

    @contextlib.contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Context manager of a training step: saves the running statistics, then opens the policy's region."""
        if self._log_to is not None:  # the trainer has read a checkpoint meanwhile
            self._log_to()
            self._log_to = None
        if self._module is not None:
            self.settings.snapshot_buffers(self._module)
        with self.forward_context():
            yield
        for bound in self._policy_modules:
            bound.check_overrides_ran()

    def optimizer_step(  # type: ignore[override]  # the Trainer's plugins take more than Fabric's, their base class
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run closure, unscaling, hooks and clipping, then step or skip.

        Raises:
            UnsupportedError: LBFGS under a scaler.
        """
        scaler, watch = self.scaler, self._watch
        if scaler is None and watch is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        self.settings.check_optimizer(optimizer)
        if watch is not None:
            watch.check_optimizer(optimizer)

        def run_closure() -> Any:
            """Run the closure, then unscale for fused optimizers too, so that their gradients can be clipped.

            Lightning itself unscales after the closure, but not for fused optimizers."""
            result = closure()
            ran = result is not None or not model.automatic_optimization  # else there was no backward pass
            if ran and scaler is not None and has_found_inf_support(optimizer):
                scaler.unscale_(optimizer)
            if ran and watch is not None:
                watch.begin_step()
            return result

        result = super().optimizer_step(optimizer, model, run_closure, **kwargs)
        if watch is not None:
            watch.end_step(optimizer)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip by norm or by value. Gradients are already unscaled, also for fused optimizers."""
        trainer_plugins.Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        """Clip by the norm over all gradients, whatever their sharding."""
        _clip_by_norm(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: Any) -> None:
        """Clip by value, including sharded gradients."""
        for alike in _group_by_mesh(self.main_params(optimizer)).values():
            nn.utils.clip_grad_value_(alike, clip_val)


class FabricPrecision(_PolicyPrecision, fabric_plugins.MixedPrecision):
    """Precision plugin for Fabric: `Fabric(plugins=FabricPrecision("mixed_float16"))`.

    Models from `fabric.setup` run under the policy. Their inputs are not cast in advance: operations cast them, so that
    values beyond float16's range do not become inf. A skipped step also restores the running statistics. To save and
    restore the scaler, put the plugin into the state: `fabric.save(path, {"model": model, "precision": plugin})`.

    Args:
        policy: a `Policy` or its spelling, with float32 parameters, in autocast mode.
        scaler: a `LossScaler`, a preset's name, or None for the policy's default.
        device: "cuda" or "cpu", where Fabric puts the model; None: "cuda" if it is available.
        monitor: a `polyamp.Monitor`, which reads the steps of one model (S35); `polyamp.monitor.writers.TrackerWriter`
            gives its records to a logger.

    Raises:
        ArgumentError: `monitor` is not one.
        UnsupportedError: a policy that Fabric does not support; later, LBFGS under a scaler, another device, units of
            FSDP2 with a `MixedPrecisionPolicy` that contradicts the policy, or a monitor of two models.

    Example:
        >>> plugin = FabricPrecision("mixed_float16", device="cpu")
        >>> plugin.precision, plugin.scaler.get_scale()
        ('16-mixed', 32768.0)
    """

    def __init__(
        self,
        policy: Policy | str,
        scaler: LossScaler | str | None = None,
        device: str | None = None,
        *,
        monitor: Monitor | None = None,
    ) -> None:
        settings = LoopSettings.create(policy, scaler, device, library="Fabric")
        self.settings = settings
        self.precision = _LIGHTNING_PRECISIONS[settings.policy.compute]
        self.device = settings.device
        self.scaler = settings.scaler
        self._watch = None if monitor is None else LoopWatch(monitor, settings)
        self._modules: list[nn.Module] = []
        self._unchecked: list[nn.Module] = []
        self._policy_modules: list[PolicyModule] = []
        self._hooks = contextlib.ExitStack()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged; overrides, which must match in every module, are installed while it runs."""
        for bound in self.settings.policy_modules(module):
            self._policy_modules.append(bound)
            handle = module.register_forward_hook(lambda *_, bound=bound: bound.check_overrides_ran())
            self._hooks.callback(handle.remove)
        self._modules.append(module)
        self._unchecked.append(module)
        return module

    def teardown(self) -> None:
        """Release the modules."""
        self._hooks.close()
        self._modules, self._unchecked, self._policy_modules = [], [], []
        if self._watch is not None:
            self._watch.release()
        super().teardown()

    def forward_context(self) -> Any:
        """Return the policy's autocast region, a `torch.autocast`."""
        while self._unchecked:  # they are now on their device, and sharded
            module = self._unchecked.pop()
            self.settings.check_device(module)
            self.settings.check_sharding(module)
            if self._watch is not None:
                self._watch.watch(module)
        for module in self._modules:
            self.settings.snapshot_buffers(module)
        return self.settings.region(self._policy_modules)

    def convert_input(self, data: Any) -> Any:
        """Return the inputs unchanged."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Return the outputs with floating-point tensors in the policy's output dtype."""
        return cast_tree(data, self.settings.plan.output)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, or skip.

        Raises:
            UnsupportedError: LBFGS under a scaler.
        """
        self.settings.check_optimizer(optimizer)
        if self._watch is None:
            return super().optimizer_step(optimizer, **kwargs)
        self._watch.check_optimizer(optimizer)
        self._watch.begin_step()
        result = super().optimizer_step(optimizer, **kwargs)
        self._watch.end_step(optimizer)
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before clipping, for fused optimizers too."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        elif self._watch is not None:
            self._watch.begin_step()


def _group_by_mesh(parameters: Iterable[Any]) -> dict[Any, list[Any]]:
    """Group the parameters that have a gradient by the mesh that shards it; None for unsharded gradients."""
    found: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return found


def _clip_by_norm(parameters: Iterable[Any], max_norm: float) -> None:
    """Clip like `torch.nn.utils.clip_grad_norm_`, by the norm over all gradients, which is equal on every rank.

    torch's own functions require gradients with one kind of sharding. Under a tensor-parallel plan some gradients are
    sharded and some are not, or they are sharded over several meshes.
    """
    found = _group_by_mesh(parameters)
    if len(found) < 2:
        nn.utils.clip_grad_norm_([p for alike in found.values() for p in alike], max_norm)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in alike]) for alike in found.values()]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as in torch
    for alike in found.values():
        for parameter in alike:
            parameter.grad.mul_(factor)
