"""Adapter for Hugging Face Accelerate: an `Accelerator` whose mixed precision is a polyamp policy and scaler.

Import it as `polyamp_torch.accelerate`; it needs `pip install "polyamp[accelerate]"`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from types import MethodType
from typing import Any, Final

import torch
from torch import nn

from polyamp.errors import PolicyError, UnsupportedError
from polyamp.monitor.monitor import Monitor
from polyamp.monitor.writers import TrackerWriter
from polyamp.recipe.policy import Policy
from polyamp.recipe.scaler import LossScaler
from polyamp_torch.arrays import cast_tree
from polyamp_torch.compat import accelerator_optimizers, uncompiled_module
from polyamp_torch.distributed.torch_only.fsdp_mixed_precision import mixed_precision_policy
from polyamp_torch.integrations.loop_adapter import LoopRegion, LoopSettings, require_extra
from polyamp_torch.integrations.loop_watch import LoopWatch
from polyamp_torch.precision.torch_only.autocast_region_stack import shield

with require_extra("accelerate"):
    import accelerate  # type: ignore[import-untyped]  # no annotations
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]  # no annotations
    from accelerate.state import PartialState  # type: ignore[import-untyped]  # no annotations
    from accelerate.utils import (  # type: ignore[import-untyped]  # no annotations
        AutocastKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradScalerKwargs,
    )

__all__ = ["Accelerator"]

_ACCELERATE_PRECISIONS: Final = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}
"""Compute dtype -> Accelerate's name for it."""
_PRECISION_VARIABLE: Final = "ACCELERATE_MIXED_PRECISION"
"""Environment variable set by `accelerate launch --mixed_precision`."""
_FSDP_VARIABLE: Final = "ACCELERATE_USE_FSDP"
"""Environment variable set by `accelerate launch --use_fsdp`."""
_REPLICATED_TYPES: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate is not annotated
    """`accelerate.Accelerator` under a policy: `Accelerator("mixed_float16")`, or its own `mixed_precision="fp16"`.

    The rest of the interface is Accelerate's: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `autocast`,
    `save_state`, `load_state`. float16 also works on the CPU, where Accelerate alone silently trains in float32.

    A skipped step is detected with every optimizer, fused ones included. Schedulers then do not advance, and the
    running statistics of the models that the optimizer trains are restored. All ranks skip together, both under
    DistributedDataParallel and with FSDP2 (`fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)`). FSDP2 also
    works between ranks on the CPU, where Accelerate drops it.

    Args:
        policy: a `Policy` or its spelling, with float32 parameters, in autocast mode; None for the precision from
            `mixed_precision` or else `accelerate launch`, as in Accelerate.
        scaler: a `LossScaler`, a preset's name, or None for the policy's default.
        monitor: a `polyamp.Monitor`, which reads the steps of the first prepared model that is trained (S35). Its
            records go to the trackers too, those of `init_trackers(...)`; `end_training()` reads the last.
        **options: options of `accelerate.Accelerator`, except the handlers of autocast and scaler, which the policy
            and the scaler replace. If `mixed_precision` is passed with a policy, they must agree.

    Raises:
        ArgumentError: `monitor` is not one.
        PolicyError: an option, or `accelerate launch`, requests another precision.
        UnsupportedError: a policy that Accelerate's loop does not support; FSDP1, DeepSpeed, Megatron-LM or a TPU;
            later, LBFGS under a scaler or with a monitor, and a second model with a monitor.

    Example:
        >>> accelerator = Accelerator("mixed_bfloat16", cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
        >>> model(torch.ones(1, 2)).dtype
        torch.float32
        >>> with accelerator.autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        scaler: LossScaler | str | None = None,
        *,
        monitor: Monitor | None = None,
        **options: Any,
    ) -> None:
        word = options.pop("mixed_precision", None)
        decides = policy is None and word is not None
        if policy is None:
            policy = (
                os.environ.get(_PRECISION_VARIABLE, "no") if word is None else str(word)
            )  # it may be an enumeration
            word = None
        checked = LoopSettings.create(policy, scaler, "cpu", library="Accelerate")  # before Accelerate's own setup
        self._word: Final = _ACCELERATE_PRECISIONS[checked.policy.compute]
        _check_options(options, word, self._word, goes_first=decides)
        plugin = fsdp_plugin_from_options(options)
        super().__init__(mixed_precision="no", **{**options, "fsdp_plugin": plugin})  # its autocast and scaler stay off
        configure_sharding(self.state, plugin)
        self.settings: Final = LoopSettings.create(policy, scaler, self.device.type, library="Accelerate")
        self.scaler = self.settings.scaler
        self._cleanups: dict[nn.Module, contextlib.ExitStack] = {}
        self._watch = None if monitor is None else self._watch_by(monitor)

    def _watch_by(self, monitor: Monitor) -> LoopWatch:
        watch = LoopWatch(monitor, self.settings)
        monitor.add_writer(TrackerWriter(self))
        return watch

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name for the policy's compute dtype."""
        return self._word

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> LoopRegion:
        """Return the policy's autocast region, a `torch.autocast`; `AutocastKwargs(enabled=False)` turns it off."""
        if autocast_handler is not None and autocast_handler.cache_enabled is not None:
            raise PolicyError("cache_enabled is settled by the policy. Received: cache_enabled in autocast_handler.")
        return self.settings.region(enabled=autocast_handler is None or autocast_handler.enabled)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as Accelerate does; also put FSDP2 models under the policy, which bypass `prepare_model`.

        Raises:
            PolicyError: a model is prepared under another policy.
            UnsupportedError: the `fsdp_plugin` has a mixed precision that contradicts the policy.
        """
        if not self.is_fsdp2:
            return super().prepare(*args, **kwargs)
        models = {at: item for at, item in enumerate(args) if isinstance(item, nn.Module)}
        new = [at for at, model in models.items() if not self._apply_policy(model)]
        try:
            set_mixed_precision_policy(self.state.fsdp_plugin, self.settings.policy)
            prepared = super().prepare(*args, **kwargs)
            for at, model in models.items():
                self.settings.check_sharding(model)
                if self._watch is not None:
                    self._watch.watch(uncompiled_module(prepared[at] if len(args) > 1 else prepared))
        except BaseException:
            for at in new:
                self._cleanups.pop(models[at], contextlib.ExitStack()).close()
            raise
        for at in new:
            self._add_snapshot_hook(prepared[at] if len(args) > 1 else prepared, inside=models[at])
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerate does, with its forward pass under the policy."""
        known = self._apply_policy(model)
        prepared = super().prepare_model(model, *args, **kwargs)
        if not known:
            self._add_snapshot_hook(prepared, inside=model)
        if self._watch is not None and not kwargs.get("evaluation_mode"):
            self._watch.watch(uncompiled_module(model))
        return prepared

    def _apply_policy(self, model: nn.Module) -> bool:
        """Put the model under the policy; return whether this Accelerator had already done so.

        Raises:
            PolicyError: the model is under another policy.
        """
        under = getattr(model.forward, "under_policy", None)
        if under not in (None, self.settings.policy):
            raise PolicyError(
                f"the model is already prepared under {under}. Call free_memory(), or unwrap_model(model, "
                "keep_fp32_wrapper=False), of the Accelerator that did it."
            )
        known = model in self._cleanups  # if not, another Accelerator may have put it under the same policy
        if under is None:
            self._wrap_forward(model)
        return known

    def _add_snapshot_hook(self, prepared: nn.Module, *, inside: nn.Module) -> None:
        """Save running statistics before each forward pass, by a hook on the outer module, outside torch.compile."""
        if self.scaler is None:
            return
        settings = self.settings

        def snapshot(module: nn.Module, args: Any) -> None:
            settings.snapshot_buffers(module)

        handle = prepared.register_forward_pre_hook(snapshot)
        self._cleanups.setdefault(inside, contextlib.ExitStack()).callback(handle.remove)

    def _wrap_forward(self, model: nn.Module) -> None:
        settings, before, replaced = self.settings, model.forward, vars(model).get("forward")
        function = getattr(before, "__func__", None)  # unbound where possible, so that a deep copy runs its own
        modules = settings.policy_modules(model)

        @functools.wraps(before)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = modules if self is model else settings.policy_modules(self)
            with settings.region(own):
                output = function(self, *args, **kwargs) if function is not None else before(*args, **kwargs)
            for item in own:
                item.check_overrides_ran()
            return cast_tree(output, settings.plan.output, float64=settings.plan.float64)

        forward.under_policy = settings.policy  # type: ignore[attr-defined]  # read by prepare_model
        cleanup = self._cleanups[model] = contextlib.ExitStack()
        vars(model)["forward"] = MethodType(forward, model)
        if replaced is not None:
            cleanup.callback(vars(model).__setitem__, "forward", replaced)
        else:
            cleanup.callback(vars(model).pop, "forward")

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Return the unwrapped model; with `keep_fp32_wrapper=False` also remove the policy."""
        unwrapped = super().unwrap_model(model, keep_fp32_wrapper, *args, **kwargs)
        if not keep_fp32_wrapper:
            inner = uncompiled_module(unwrapped)
            self._cleanups.pop(inner, contextlib.ExitStack()).close()
        return unwrapped

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as Accelerate does, and remove the policy from all models."""
        while self._cleanups:
            self._cleanups.popitem()[1].close()
        if self._watch is not None:
            self._watch.release()
        return super().free_memory(*objects)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Prepare an optimizer as Accelerate does, with a `step_was_skipped` that is valid for fused optimizers too.

        Raises:
            UnsupportedError: LBFGS under a scaler, or with a monitor.
        """
        self.settings.check_optimizer(optimizer)
        if self._watch is not None:
            self._watch.check_optimizer(optimizer)
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)
        if self.scaler is not None:
            prepared.__class__ = _ScaledOptimizer
        elif self._watch is not None:
            prepared.__class__ = _MonitoredOptimizer
        if self._watch is not None:
            prepared.watch = self._watch
        return prepared

    def end_training(self) -> None:
        """Read what is left for the monitor, and end the training as Accelerate does."""
        if self._watch is not None:
            self._watch.finish()
        super().end_training()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run Accelerate's backward pass with the policy's float32 matmul precision, outside all autocast regions."""
        if self._watch is not None:
            self._watch.see_loss(loss.detach() / self.gradient_accumulation_steps)  # as Accelerate divides it
        with self.settings.matmul_precision(), shield():
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale once the gradients of an optimizer, a list of optimizers, or all prepared ones."""
        given = accelerator_optimizers(self) if optimizer is None else optimizer
        for item in given if isinstance(given, list | tuple) else [given]:
            if self.scaler is not None:
                self.scaler.unscale_(item.optimizer if isinstance(item, AcceleratedOptimizer) else item)
        if self._watch is not None and self.sync_gradients:
            self._watch.begin_step()


class _MonitoredOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate is not annotated
    """Accelerate's optimizer, whose steps a monitor may read.

    Attributes:
        watch: what tells them to the monitor, or None.
    """

    watch: LoopWatch | None = None

    def step(self, closure: Any = None) -> None:
        """Step as Accelerate does, if the gradients of the window are complete."""
        if self.watch is None or not self.gradient_state.sync_gradients:
            super().step(closure)
            return
        self.watch.begin_step()
        super().step(closure)
        self.watch.end_step(self.optimizer)


class _ScaledOptimizer(_MonitoredOptimizer):
    """Accelerate's optimizer with skip detection from the scaler's flag.

    Accelerate treats a step as skipped if `optimizer.step` was not called, but fused optimizers are always called.
    """

    def step(self, closure: Any = None) -> None:
        """Step through the scaler, as Accelerate does."""
        waits = self.scaler.has_scaled_loss(self.optimizer)
        if not waits and is_state_initialization(self.optimizer):
            self.optimizer.step(closure)
        else:
            super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        """True when the last step was skipped; reading it waits for the device."""
        return bool(self.scaler.has_skipped(self.optimizer))

    @property
    def _is_overflow(self) -> bool:
        """Alias of `step_was_skipped` that other libraries read."""
        return self.step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, seen: bool) -> None:
        """Ignore Accelerate's own value."""


def _check_options(options: dict[str, Any], given: Any, word: str, *, goes_first: bool) -> None:
    """Raise if an option, a handler or `accelerate launch --mixed_precision` sets another precision. If the option
    `mixed_precision` decided (`goes_first`), it goes before the launcher's, as in Accelerate."""
    if given is not None and str(given) != word:
        raise PolicyError(
            f"the policy settles the precision. Received: mixed_precision={given!r}. Drop it, or the policy."
        )
    for handler in options.get("kwargs_handlers") or ():
        if isinstance(handler, AutocastKwargs | GradScalerKwargs):
            raise PolicyError(
                f"policy and scaler settle what {type(handler).__name__} would. Drop it from kwargs_handlers; a "
                "scaler's constants go into polyamp.LossScaler(...)."
            )
    launched = os.environ.get(_PRECISION_VARIABLE, "no")
    if not goes_first and launched not in ("no", word):
        raise PolicyError(
            f"accelerate launch asks for mixed_precision={launched!r} (ACCELERATE_MIXED_PRECISION), the policy for "
            f"{word!r}. Launch with --mixed_precision={word} or without it."
        )


def fsdp_plugin_from_options(options: dict[str, Any]) -> Any:
    """Return the FSDP plugin: from an `Accelerator`'s options or from the launch environment; or None."""
    given = options.get("fsdp_plugin")
    if given is None and os.environ.get(_FSDP_VARIABLE, "false").lower() == "true":
        given = FullyShardedDataParallelPlugin()
    return given


def configure_sharding(state: Any, plugin: Any) -> None:
    """Raise for engines with their own precision, and enable sharding on the CPU if it is requested.

    With ranks on the CPU, Accelerate silently drops an FSDP configuration and trains replicas. Without `cpu=True` it
    does not connect the ranks at all, and each trains alone.

    Args:
        state: the `AcceleratorState`, set up by Accelerate.
        plugin: from `fsdp_plugin_from_options`.

    Raises:
        UnsupportedError: FSDP1, DeepSpeed, Megatron-LM or a TPU; or ranks that Accelerate does not connect.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if state.distributed_type is DistributedType.NO and launched > 1:
        raise UnsupportedError(
            f"{launched} processes were launched, but Accelerate found no accelerators for them, and would train a "
            "model of its own in each. Pass cpu=True (in TrainingArguments use_cpu=True), or launch them by "
            "`accelerate launch --cpu`."
        )
    on_cpu = state.distributed_type is DistributedType.MULTI_CPU and plugin is not None
    sharded = on_cpu or state.distributed_type is DistributedType.FSDP
    config = plugin if on_cpu else getattr(state, "fsdp_plugin", None)
    if sharded and getattr(config, "fsdp_version", None) != 2:
        raise UnsupportedError(
            "polyamp's Accelerator shards with FSDP2: FSDP1 keeps a precision of its own in flat parameters. Received: "
            "an FSDP configuration of version 1. Pass FullyShardedDataParallelPlugin(fsdp_version=2), or launch with "
            "--fsdp_version 2."
        )
    if not sharded and state.distributed_type not in _REPLICATED_TYPES:
        raise UnsupportedError(
            "polyamp's Accelerator runs on one device, under DistributedDataParallel or with FSDP2. Received: "
            f"{state.distributed_type}. Use accelerate.Accelerator there."
        )
    if on_cpu:
        PartialState().distributed_type = DistributedType.FSDP  # every `AcceleratorState()` copies it from there
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def set_mixed_precision_policy(plugin: Any, policy: Policy) -> None:
    """Set the plugin's mixed precision from the policy, unless the plugin has one."""
    if plugin.mixed_precision_policy is None:
        plugin.mixed_precision_policy = mixed_precision_policy(policy)


def is_state_initialization(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step would only initialise the optimizer state for loading a checkpoint.

    `torch.distributed.checkpoint` initialises the state by a step at learning rate 0 with zero gradients. Accelerate
    passes it the optimizer that steps through the scaler, which must not count that step.
    """
    return not optimizer.state and all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)
