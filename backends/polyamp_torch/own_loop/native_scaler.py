"""`GradScaler`: a `torch.amp.GradScaler` with polyamp's rules, for user-written training loops.

scale(loss)   casts to float32, then multiplies by the scale; records the call and its scale
unscale_(o)   gradients / scale, then one flag per device (S10)
step(o)       the flags of all optimizers that step together decide (S14); fused kernels read theirs on the device
update()      rule S15 on the device
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.amp.grad_scaler import OptState

from polyamp.errors import GradientError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules.step_checks import check_options
from polyamp.rules.stuck_scale import check_stuck
from polyamp.trees import map_tree
from polyamp_torch.arrays import HALF_TENSOR_DTYPES, can_read_without_sync
from polyamp_torch.compat import disable_compile, has_found_inf_support, maybe_optimizer_step, new_optimizer_record
from polyamp_torch.own_loop.gradients import (
    DeviceFlags,
    bucket_gradients,
    has_gradients,
    max_flag,
    optimizer_parameters,
    overflow_flag,
    refuse_float16,
    unscale_gradients,
)
from polyamp_torch.own_loop.skip_report import SkipEvidence, SkipReport, merge_reports, non_finite_names
from polyamp_torch.own_loop.torch_only.loop_monitor import LoopMonitor
from polyamp_torch.own_loop.torch_only.loop_record import OptimizerRecord, watch_scaled_backward
from polyamp_torch.own_loop.torch_only.scaler_checks import (
    GradScalerError,
    refuse_closure,
    refuse_lbfgs,
    scaler_from_arguments,
)
from polyamp_torch.own_loop.torch_only.scaler_state import ScalerState
from polyamp_torch.own_loop.torch_only.sharded_gradients import RankAgreement, refuse_sharded
from polyamp_torch.precision.torch_only.autocast_region_stack import shield
from polyamp_torch.step.grad_stats import scale_reciprocal

if TYPE_CHECKING:
    from polyamp.monitor.monitor import Monitor


def native_scaler(scaler: LossScaler, **options: Any) -> GradScaler:
    """Return the `GradScaler` of a scaler, as `scaler.native("torch")`. `options` are some of its arguments."""
    check_options(options, ("device", "enabled", "skip"), function="native", backend="torch")
    return GradScaler(scaler, **options)


class GradScaler(ScalerState):
    """Gradient scaler with the interface of `torch.amp.GradScaler`, without its traps.

    An autocast region around its methods does not affect them (S3). `backward()` inside one runs under it, with one
    warning: call it after the region.

    Args:
        scaler: a `polyamp.LossScaler`, or a preset's name; or, as in torch, a device type followed by torch's own
            arguments, which then have torch's defaults and polyamp's floor (`LossScaler.like("torch")`).
        init_scale, growth_factor, backoff_factor, growth_interval: torch's arguments; a `LossScaler` has its own.
        enabled: False makes every method do nothing, and `step` call the optimizer's.
        device: as in torch; the state is always on the device of the first scaled tensor.
        skip: for several optimizers: "all" (if the gradients of one overflow, none steps) or "each".
        process_group: as in torch's `ShardedGradScaler`: the ranks that decide together. None: the ranks over which the
            parameters are sharded (`fully_shard`, also over two axes, tensor parallelism), read from the parameters.

    Raises:
        GradScalerError: contradictory arguments; and from every method that is called out of order.

    Example:
        >>> import polyamp, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> scaler = GradScaler(polyamp.LossScaler(init_scale=1024.0)).watch(model)
        >>> scaler.scale(model(torch.tensor([[1.0, float("inf")]])).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.step_was_skipped, scaler.get_scale()
        (True, 512.0)
        >>> print(scaler.report())
        Skipped at loss scale 1024: 1 of 2 gradients are not finite.
        parameter  shape   dtype    inf  nan
        weight     (1, 2)  float32    1    0
    """

    def __init__(
        self,
        scaler: LossScaler | str | torch.device | None = None,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        enabled: bool = True,
        *,
        device: str | torch.device | None = None,
        skip: Literal["all", "each"] = "all",
        process_group: Any = None,
    ) -> None:
        if skip not in ("all", "each"):
            raise GradScalerError(f"skip must be 'all' or 'each'. Received: skip={skip!r}.")
        constants = {"init_scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor,
                     "growth_interval": growth_interval}  # fmt: skip
        super().__init__(*scaler_from_arguments(scaler, device, constants), enabled=enabled)
        self.skip = skip
        self._ranks = RankAgreement(process_group)

    def watch(
        self, module: torch.nn.Module, monitor: Monitor | None = None, policy: Policy | str = "mixed_float16"
    ) -> GradScaler:
        """Name parameters in reports as `module.named_parameters()` does, and return the scaler. The reference is weak.
        Optimizers built from `named_parameters()` have names without this call. A `polyamp.Monitor` reads the loop's
        steps (S35) under the policy that the loop computes in; an iteration ends with `update()`."""
        if monitor is not None:  # first, because it may refuse the module
            self._monitoring = LoopMonitor(module, monitor, Recipe(policy=policy, scaler=self._scaler))
        self._loop.names.add(module)
        return self

    @disable_compile  # a graph break under torch.compile, as with torch's: the hook would be retraced at every step
    def scale(self, outputs: Any) -> Any:
        """Multiply the floating tensors in `outputs` by the scale; 16-bit ones are cast to float32 first (S6).

        Args:
            outputs: a tensor, or nested tuples, lists, dicts and dataclasses of them; other iterables, such as
                `losses.values()`, return an iterator. Integer tensors, and non-tensors in a container, stay unchanged.

        Raises:
            GradScalerError: neither a tensor nor a container.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return self._scaled(outputs)
        scaled = map_tree(self._scaled_part, outputs)
        if scaled is outputs and not isinstance(outputs, tuple):
            raise GradScalerError(f"scale() takes a tensor or a container of tensors. Received: {outputs!r}.")
        return scaled

    def _scaled_part(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return self._scaled(part)
        if isinstance(part, Iterable) and not isinstance(part, str | bytes | np.ndarray):
            return map(self._scaled_part, part)
        return part

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        loop, state = self._loop, self._state or self._start(tensor.device)
        loop.record_scale_call(state.scale)
        if self._monitoring is not None:
            self._monitoring.see_loss(tensor)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            loop.mark_shared()  # a CUDA graph replays the kernels, not this method
        wide = tensor.float() if tensor.dtype in HALF_TENSOR_DTYPES else tensor
        scaled: torch.Tensor = wide * state.scale.to(tensor.device, non_blocking=True)
        if scaled.requires_grad:
            scaled.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]  # torch does not annotate it
            if self.skip == "all":
                loop.record_reachable(scaled)
        return scaled

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """Check in a backward pass, when it enters a scaled tensor, that it does not change unscaled gradients."""
        unscaled = [pair for pair in self._loop.optimizers() if self._is_unscaled(pair[0])]
        watch_scaled_backward(self._loop, unscaled, gradient.device.type)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients in place by the scale that they were computed with, and set its flag.

        Raises:
            GradScalerError: `scale()` was not called since the optimizer's last step; or this was called twice.
            UnsupportedError: LBFGS, or gradients in float16.
        """
        if self._enabled:
            optimizer_state, _ = self._records(optimizer, "unscale_")
            if optimizer_state["stage"] is OptState.UNSCALED:
                raise GradScalerError("unscale_() was already called for this optimizer since the last update().")
            if self._monitoring is not None:  # before a clip
                self._monitoring.begin_update(self._require_state("unscale_"), self._scale_of_gradients())
            with shield():
                self._unscale(optimizer, optimizer_state)

    def _unscale(self, optimizer: Any, optimizer_state: dict[str, Any]) -> None:
        scale = self._scale_of_gradients()
        zero = torch.zeros((), dtype=torch.float32, device=scale.device)
        self._loop.inverse = scale_reciprocal(scale)
        optimizer_state["found_inf_per_device"] = self._unscale_grads_(optimizer, self._loop.inverse, zero, False)
        optimizer_state["stage"] = OptState.UNSCALED

    def _join_flags(self, flags: DeviceFlags, parameters: list[torch.Tensor], like: torch.Tensor) -> DeviceFlags:
        """Return the joint flags of all ranks that share these parameters; none if no rank has a gradient."""
        group = None if self._ranks.is_postponed else self._ranks.group(parameters)
        if group is None:
            return flags
        local = max_flag(list(flags.values()), torch.zeros_like(like))
        found = self._ranks.all_reduce_flag(local, group, has_gradients=bool(flags))
        devices = flags or ([like.device] if self._ranks.any_has_gradients else [])
        return {device: found.to(device) for device in devices}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> DeviceFlags:
        """Override of torch's method. Libraries call it too, some before anything was scaled, with another factor."""
        parameters = optimizer_parameters(optimizer)
        grads = bucket_gradients(parameters)
        if not allow_fp16:
            refuse_float16(grads)
        foreign = inv_scale is not self._loop.inverse
        grows = inv_scale.item() > 1.0 if can_read_without_sync(inv_scale.device) else foreign or self._may_grow()
        return self._join_flags(unscale_gradients(grads, inv_scale, found_inf, grows=grows), parameters, found_inf)

    def _records(self, optimizer: Any, method: str) -> tuple[dict[str, Any], OptimizerRecord]:
        """Return torch's and polyamp's records of an optimizer, after the checks that `unscale_` and `step` share."""
        refuse_lbfgs(optimizer)
        self._require_state(method)
        record, optimizer_state = self._loop.record_of(optimizer), self._per_optimizer_states[id(optimizer)]
        if optimizer_state["stage"] is OptState.STEPPED:
            raise GradScalerError(f"{method}() was called after step() of this optimizer. Call update() first.")
        if record.last_call == self._loop.calls:
            raise GradScalerError(
                f"{method}() was called, but scale() was not since the last step of this optimizer: dividing by the "
                "scale would shrink correct gradients. Write scaler.scale(loss).backward()."
            )
        return optimizer_state, record

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if `unscale_` did not, and step the optimizer unless a gradient is not finite. Fused optimizers
        decide on the device; others make the host wait for one flag.

        Args:
            optimizer: the optimizer, of any kind but LBFGS.
            *args, **kwargs: passed to `optimizer.step`; a closure is rejected.

        Returns:
            The result of `optimizer.step`; None if it was skipped.

        Raises:
            GradScalerError: out of order, or scaled and unscaled gradients were mixed.
            GradientError: the optimizer's parameters have no gradients. A fused one does nothing then, as in torch.
            UnsupportedError: LBFGS, a closure, or gradients in float16.
        """
        if not self._enabled:
            with shield():
                return optimizer.step(*args, **kwargs)
        optimizer_state, record = self._records(optimizer, "step")
        refuse_closure(args, kwargs)
        record.refuse_mixed()
        step = self._step_without_gradients
        if has_gradients(optimizer):
            fused_step = self._step_by_scaler if record.takes_scaler else self._step_fused
            step = fused_step if has_found_inf_support(optimizer) else self._step_unfused
        if self._loop.ended:
            self._loop.evidence, self._loop.ended = [], False
        if self._monitoring is not None:
            self._monitoring.begin_update(self._require_state("step"), self._scale_of_gradients())
        with shield():
            result = step(optimizer, optimizer_state, args, kwargs)
        optimizer_state["stage"] = OptState.STEPPED
        record.last_call = self._loop.calls
        return result

    def _step_unfused(self, optimizer: Any, optimizer_state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        ready = optimizer_state["stage"] is OptState.READY
        if ready:
            with self._ranks.postpone():
                self._unscale(optimizer, optimizer_state)
        found, evidence = self._decide(optimizer, optimizer_state, None, agrees=ready)
        if can_read_without_sync(found.device):
            skipped = bool(found.item() > 0.0)
        else:
            flag, self._loop.least = torch.stack((found, self._require_state("step").scale)).cpu().tolist()
            skipped = flag > 0.0
        evidence.record_decision(skipped)
        if not self._hooked:
            return None if skipped else optimizer.step(*args, **kwargs)
        return maybe_optimizer_step(self)(optimizer, optimizer_state, *args, **kwargs)

    @functools.cached_property
    def _hooked(self) -> bool:
        """Whether a subclass overrides torch's hook for the step, which reads the flags once more."""
        return maybe_optimizer_step(type(self)) is not maybe_optimizer_step(GradScaler)

    def _step_fused(self, optimizer: Any, optimizer_state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Step with fused kernels, which divide by `grad_scale` and do nothing if `found_inf` is set."""
        divisor = getattr(optimizer, "grad_scale", None)
        ready = optimizer_state["stage"] is OptState.READY
        if ready:
            scale = self._scale_of_gradients()
            divisor = scale if divisor is None else scale * divisor
            grads = bucket_gradients(optimizer_parameters(optimizer))
            refuse_float16(grads)
            found = overflow_flag(grads, divisor, grows=self._may_grow() or divisor is not scale)
            optimizer_state["found_inf_per_device"] = {found.device: found}
        found, evidence = self._decide(optimizer, optimizer_state, divisor, agrees=ready)
        if (
            can_read_without_sync(found.device) or self._loop.record_of(optimizer).lacks_momentum(optimizer)
        ) and found.item() > 0.0:
            evidence.record_decision(True)
            return None
        optimizer.grad_scale, optimizer.found_inf = divisor, found
        try:
            return optimizer.step(*args, **kwargs)
        except NotImplementedError as error:
            refuse_sharded(optimizer, error)
            raise
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _step_without_gradients(self, optimizer: Any, optimizer_state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Step without local gradients: if no rank has any, nothing changes or counts; else decide with the others."""
        ready, others = optimizer_state["stage"] is OptState.READY, bool(optimizer_state["found_inf_per_device"])
        if others or (ready and self._ranks.group(optimizer_parameters(optimizer)) is not None):
            found, evidence = self._decide(optimizer, optimizer_state, None, agrees=ready)
            others = others or self._ranks.any_has_gradients
        if others and found.item() > 0.0:
            return evidence.record_decision(True)
        if not others:
            optimizer_state["found_inf_per_device"] = {}
            if not has_found_inf_support(optimizer):
                raise GradientError("step() found no gradients in the optimizer's parameters. Call backward() first.")
        return optimizer.step(*args, **kwargs)

    def _step_by_scaler(self, optimizer: Any, optimizer_state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Step by the older contract: the optimizer takes the scaler and does the rest itself."""
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        self._decide(optimizer, optimizer_state, self._scale_of_gradients())
        return result

    def _decide(
        self, optimizer: Any, optimizer_state: dict[str, Any], divisor: torch.Tensor | None, *, agrees: bool = False
    ) -> tuple[torch.Tensor, SkipEvidence]:
        """Return the flag that decides this step, and record it for `update` and the report. With `agrees`, the
        optimizer's flag is this rank's own: if there are several ranks, their flags are joined."""
        loop, scale = self._loop, self._scale_of_gradients()
        flags = list(optimizer_state["found_inf_per_device"].values())
        parameters = optimizer_parameters(optimizer) if agrees and self._ranks.may_be_several() else []
        if self.skip == "all":
            flags += self._other_flags(optimizer, parameters)
        found = max_flag(flags, scale) if flags else torch.zeros_like(scale)
        group = self._ranks.group(parameters) if parameters else None
        if group is not None:
            found = self._ranks.all_reduce_flag(found, group, has_gradients=has_gradients(optimizer))
        optimizer_state["found_inf_per_device"] = {found.device: found}
        loop.stepped.append(loop.record_of(optimizer))
        loop.found = found
        evidence = SkipEvidence(loop.record_of(optimizer).optimizer, found, scale, divisor, loop.calls, loop.names)
        loop.evidence.append(evidence)
        return found, evidence

    def _other_flags(self, optimizer: Any, local_parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the flags of the optimizers that step with this one and have gradients: those that stepped since the
        last `scale()`, are unscaled already, or stepped with it the last time. Before the first update, every other
        `nn.Parameter` in the scaled losses' graphs counts. Add the parameters with rank-local flags to
        `local_parameters`."""
        loop, scale = self._loop, self._scale_of_gradients()
        flags = [] if loop.found is None else [loop.found]
        seen: set[int] = set()
        partners = loop.record_of(optimizer).partners
        for other, record in loop.optimizers():
            if loop.reachable is not None:
                seen.update(map(id, optimizer_parameters(other)))
            if other is optimizer:
                continue
            if self._is_unscaled(other):
                flags += self._per_optimizer_states[id(other)]["found_inf_per_device"].values()
            elif record in partners and record.last_call < loop.calls:
                local_parameters += optimizer_parameters(other)
                flags.append(
                    overflow_flag(bucket_gradients(optimizer_parameters(other)), scale, grows=self._may_grow())
                )
        if loop.reachable is not None:
            unseen = [p for key, p in loop.reachable.items() if key not in seen]
            local_parameters += unseen
            rest = bucket_gradients(unseen)
            flags += [overflow_flag(rest, scale, grows=self._may_grow())] if rest else []
        return flags

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale by rule S15, by whether any optimizer's gradients overflowed; or set it.

        Args:
            new_scale: the new scale: a number within floor and ceiling, or a one-element tensor, clamped on its device.

        Raises:
            GradScalerError: no optimizer stepped since the last update; or a scale that is out of bounds.
            LossScaleStuckError: see `LossScaler.patience`.
        """
        if not self._enabled:
            return
        loop, state = self._loop, self._require_state("update")
        if new_scale is not None:
            given = self._checked_scale(new_scale, state.scale)
            loop.preserve_scale(state.scale)
            state.scale.copy_(given)
            loop.least = self._scaler.min_scale
        else:
            records = self._per_optimizer_states.values()
            flags = [flag for optimizer_state in records for flag in optimizer_state["found_inf_per_device"].values()]
            if not flags:
                raise GradScalerError("update() was called, but no step() with gradients since the last update().")
            self._state = self._next_state(state, max_flag(flags, state.scale))
            loop.least = max(loop.least * self._backoff_factor, self._scaler.min_scale)
            if loop.ended:
                loop.evidence = []
        if self._monitoring is not None and loop.found is not None:
            self._monitoring.end_iteration(self._require_state("update"), loop.found)
        self._per_optimizer_states = defaultdict(new_optimizer_record)
        loop.end_iteration(state.scale)
        if loop.watch.is_due(self._scaler):
            self._check_if_stuck()

    def _check_if_stuck(self) -> None:
        """Read the state on the host, once every `patience` updates (S17)."""
        state = self._require_state("update")
        self._loop.least, skips = state.scale.item(), int(state.stuck.item())
        check_stuck(skips, self._scaler, lambda: non_finite_names(self.report()), where="the model", stacklevel=4)

    @property
    def step_was_skipped(self) -> bool:
        """Whether a step of the last iteration was skipped, before and after `update()`; may wait for the device. Then
        learning-rate schedules should not advance: `if not scaler.step_was_skipped: scheduler.step()`."""
        return any(evidence.was_skipped() for evidence in self._loop.evidence)

    def report(self) -> SkipReport:
        """Return the non-finite gradients of the last iteration, with counts; empty if all were finite. Steps that the
        host decided are counted at once. For a fused optimizer on an accelerator, this call counts: make it before
        `zero_grad()` and the next `scale()`."""
        return merge_reports([evidence.report(self._loop.calls) for evidence in self._loop.evidence])
