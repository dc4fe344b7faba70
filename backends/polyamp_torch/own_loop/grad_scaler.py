"""`GradScaler`: a `torch.amp.GradScaler` by polyamp's rules, for loops that people keep in their own hands.

    scale(loss)   float32 first, then times the scale; notes that it was called, and with which scale
    unscale_(o)   gradients / scale, then one flag per device (S10)
    step(o)       the flags of all optimizers that step together decide (S14); fused kernels take theirs on the device
    update()      rule S15 on the device

`scaler_state` holds the scale itself, `loop_memory` what is known of the loop, `scaler_gradients` the kernels and
`skip_report` the report on a skipped step.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch.amp.grad_scaler import OptState

from polyamp.errors import GradientError
from polyamp.recipe.scaler import LossScaler
from polyamp.rules import stuck
from polyamp.trees import map_tree
from polyamp_torch.compat import new_record, not_compiled, step_unless_found, takes_found_inf
from polyamp_torch.own_loop.loop_memory import Known, Run, backward_begins, refuse_closure, refuse_float16, refuse_lbfgs
from polyamp_torch.own_loop.scaler_gradients import Flags, gradients_of, overflow, parameters_of, together, unscale_
from polyamp_torch.own_loop.scaler_state import GradScalerError, ScalerState, described
from polyamp_torch.own_loop.shards import Shards, refuse_sharded
from polyamp_torch.own_loop.skip_report import Evidence, SkipReport, joined
from polyamp_torch.precision.shield import shield
from polyamp_torch.step.measure import looks, reciprocal


class GradScaler(ScalerState):
    """Scales losses and steps optimizers as `torch.amp.GradScaler` does, without its traps.

    An autocast region around its methods touches nothing in them (S3). `backward()` inside one runs under it, with one
    warning: call it behind the region.

    Args:
        scaler: a `polyamp.LossScaler`, or a preset's name; or, as torch has it, a device type followed by torch's own
            arguments, which then have torch's defaults under polyamp's floor (`LossScaler.like("torch")`).
        init_scale, growth_factor, backoff_factor, growth_interval: torch's arguments; with a `LossScaler` they stand
            in it.
        enabled: False makes every method do nothing, and `step` call the optimizer's.
        device: as in torch; the state is on the device of the first scaled tensor, whatever is named here.
        skip: for several optimizers: "all" (if the gradients of one overflow, none steps) or "each".
        process_group: as in torch's `ShardedGradScaler`: the ranks that decide together. None: those over which the
            parameters are sharded (`fully_shard`, also over two axes, tensor parallelism), which the parameters tell.

    Raises:
        GradScalerError: contradictory arguments; and from every method, when it is called out of order.

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

    _not_kept = (*ScalerState._not_kept, "_run")

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
        super().__init__(*described(scaler, device, constants), enabled=enabled)
        self.skip = skip
        self._shards = Shards(process_group)
        self._refresh()

    def _refresh(self) -> None:
        self._per_optimizer_states = defaultdict(new_record)
        self._run = Run(least=self._begin.scale)

    def _loaded(self) -> None:
        self._run.least = self._begin.scale

    def _scale_changes(self) -> None:
        if self._state is not None:
            self._run.scale_changes(self._state.scale)

    def _scale_is_shared(self) -> None:
        self._run.share()

    def watch(self, module: torch.nn.Module) -> GradScaler:
        """Name parameters in reports as `module.named_parameters()` does; returns the scaler.

        The module is held weakly. Optimizers built from `named_parameters()` name theirs without this.
        """
        self._run.names.add(module)
        return self

    # Scaling.

    @not_compiled  # a graph break under torch.compile, as with torch's: the hook would be traced anew at every step
    def scale(self, outputs: Any) -> Any:
        """The floating tensors in `outputs` times the scale; in float32 if they were 16 bits wide (S6).

        Args:
            outputs: a tensor, or tuples, lists, dicts and dataclasses of them, nested at will; other iterables, such
                as `losses.values()`, give an iterator. Integer tensors, and in a container what is no tensor, pass as
                they are.

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
        run, state = self._run, self._state or self._start(tensor.device)
        run.scale_called(state.scale)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            run.share()  # the kernels are replayed, this method is not
        wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        scaled: torch.Tensor = wide * state.scale.to(tensor.device, non_blocking=True)
        if scaled.requires_grad:
            scaled.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]  # torch does not annotate it
            if self.skip == "all":
                run.reach(scaled)
        return scaled

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """Called by autograd as a backward pass enters a scaled tensor; unscaled gradients must not change in it."""
        unscaled = [pair for pair in self._run.optimizers() if self._is_unscaled(pair[0])]
        backward_begins(self._run, unscaled, gradient.device.type)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients in place by the scale that they were made with, and set its flag.

        Raises:
            GradScalerError: `scale()` was not called since the optimizer's last step; or this was called twice.
            UnsupportedError: LBFGS, or gradients in float16.
        """
        if self._enabled:
            record, _ = self._record(optimizer, "unscale_")
            if record["stage"] is OptState.UNSCALED:
                raise GradScalerError("unscale_() was already called for this optimizer since the last update().")
            with shield():
                self._unscale(optimizer, record)

    def _unscale(self, optimizer: Any, record: dict[str, Any]) -> None:
        scale = self._scale_of_gradients()
        zero = torch.zeros((), dtype=torch.float32, device=scale.device)
        self._run.inverse = reciprocal(scale)
        record["found_inf_per_device"] = self._unscale_grads_(optimizer, self._run.inverse, zero, False)
        record["stage"] = OptState.UNSCALED

    def _agreed(self, flags: Flags, parameters: list[torch.Tensor], like: torch.Tensor) -> Flags:
        """The flags of all ranks that share these parameters; none if no rank has a gradient."""
        group = None if self._shards.put_off else self._shards.group(parameters)
        if group is None:
            return flags
        local = together(list(flags.values()), torch.zeros_like(like))
        found = self._shards.agreed(local, group, has_gradients=bool(flags))
        return {device: found.to(device) for device in flags or ([like.device] if self._shards.anyone else [])}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Flags:
        """torch's: libraries call it too, some of them before anything was scaled, with a factor of their own."""
        parameters = parameters_of(optimizer)
        grads = gradients_of(parameters)
        if not allow_fp16:
            refuse_float16(grads)
        foreign = inv_scale is not self._run.inverse
        grows = inv_scale.item() > 1.0 if looks(inv_scale.device) else foreign or self._may_grow()
        return self._agreed(unscale_(grads, inv_scale, found_inf, grows=grows), parameters, found_inf)

    def _scale_of_gradients(self) -> torch.Tensor:
        run = self._run
        return self._require_state("step").scale if run.shared or run.scaled is None else run.scaled

    def _may_grow(self) -> bool:
        """Whether dividing by the scale may make gradients larger; False only if that is known without waiting."""
        scale = self._scale_of_gradients()
        return scale.item() < 1.0 if looks(scale.device) else self._run.shared or self._run.scaled_least < 1.0

    def _is_unscaled(self, optimizer: Any) -> bool:
        record = self._per_optimizer_states.get(id(optimizer))
        return record is not None and record["stage"] is OptState.UNSCALED

    def _record(self, optimizer: Any, method: str) -> tuple[dict[str, Any], Known]:
        """torch's record and polyamp's of an optimizer, after the checks that `unscale_` and `step` share."""
        refuse_lbfgs(optimizer)
        self._require_state(method)
        known, record = self._run.of(optimizer), self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise GradScalerError(f"{method}() was called after step() of this optimizer. Call update() first.")
        if known.consumed == self._run.calls:
            raise GradScalerError(
                f"{method}() was called, but scale() was not since the last step of this optimizer: dividing by the "
                "scale would shrink correct gradients. Write scaler.scale(loss).backward()."
            )
        return record, known

    # Stepping.

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if `unscale_` did not, and step the optimizer unless a gradient is not finite.

        Fused optimizers decide on the device; others make the host wait for one flag.

        Args:
            optimizer: the optimizer, of any kind but LBFGS.
            *args, **kwargs: passed to `optimizer.step`; a closure is refused.

        Returns:
            What `optimizer.step` returned; None if it was skipped.

        Raises:
            GradScalerError: out of order, or scaled and unscaled gradients were mixed.
            GradientError: the optimizer's parameters have no gradients. A fused one does nothing then, as in torch.
            UnsupportedError: LBFGS, a closure, or gradients in float16.
        """
        if not self._enabled:
            with shield():
                return optimizer.step(*args, **kwargs)
        record, known = self._record(optimizer, "step")
        refuse_closure(args, kwargs)
        known.refuse_mixed()
        step = self._step_without_gradients
        if any(p.grad is not None for p in parameters_of(optimizer)):
            fused = takes_found_inf(optimizer)
            step = self._step_unfused if not fused else self._step_by_scaler if known.takes_scaler else self._step_fused
        if self._run.ended:
            self._run.evidence, self._run.ended = [], False
        with shield():
            result = step(optimizer, record, args, kwargs)
        record["stage"] = OptState.STEPPED
        known.consumed = self._run.calls
        return result

    def _step_unfused(self, optimizer: Any, record: dict[str, Any], args: Any, kwargs: Any) -> Any:
        ready = record["stage"] is OptState.READY
        if ready:
            with self._shards.later():
                self._unscale(optimizer, record)
        found, evidence = self._decision(optimizer, record, None, agrees=ready)
        if looks(found.device):
            skipped = bool(found.item() > 0.0)
        else:
            flag, self._run.least = torch.stack((found, self._require_state("step").scale)).tolist()
            skipped = flag > 0.0
        evidence.decided(skipped)
        if not self._hooked:
            return None if skipped else optimizer.step(*args, **kwargs)
        return step_unless_found(self)(optimizer, record, *args, **kwargs)

    @functools.cached_property
    def _hooked(self) -> bool:
        """Whether a subclass steps in its own way, through torch's hook for that, which reads the flags once more."""
        return step_unless_found(type(self)) is not step_unless_found(GradScaler)

    def _step_fused(self, optimizer: Any, record: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """The kernels divide by `grad_scale` and do nothing where `found_inf` is set."""
        divisor = getattr(optimizer, "grad_scale", None)
        ready = record["stage"] is OptState.READY
        if ready:
            scale = self._scale_of_gradients()
            divisor = scale if divisor is None else scale * divisor
            grads = gradients_of(parameters_of(optimizer))
            refuse_float16(grads)
            found = overflow(grads, divisor, grows=self._may_grow() or divisor is not scale)
            record["found_inf_per_device"] = {found.device: found}
        found, evidence = self._decision(optimizer, record, divisor, agrees=ready)
        if (looks(found.device) or self._run.of(optimizer).lacks_momentum(optimizer)) and found.item() > 0.0:
            evidence.decided(True)
            return None
        optimizer.grad_scale, optimizer.found_inf = divisor, found
        try:
            return optimizer.step(*args, **kwargs)
        except NotImplementedError as error:
            refuse_sharded(optimizer, error)
            raise
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _step_without_gradients(self, optimizer: Any, record: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Where no rank has gradients nothing moves and `update` counts nothing; else this one decides with them."""
        ready, others = record["stage"] is OptState.READY, bool(record["found_inf_per_device"])
        if others or (ready and self._shards.group(parameters_of(optimizer)) is not None):
            found, evidence = self._decision(optimizer, record, None, agrees=ready)
            others = others or self._shards.anyone
        if others and found.item() > 0.0:
            return evidence.decided(True)
        if not others:
            record["found_inf_per_device"] = {}
            if not takes_found_inf(optimizer):
                raise GradientError("step() found no gradients in the optimizer's parameters. Call backward() first.")
        return optimizer.step(*args, **kwargs)

    def _step_by_scaler(self, optimizer: Any, record: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """The older contract: the optimizer is given the scaler and does the rest itself."""
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
        self._decision(optimizer, record, self._scale_of_gradients())
        return result

    def _decision(
        self, optimizer: Any, record: dict[str, Any], divisor: torch.Tensor | None, *, agrees: bool = False
    ) -> tuple[torch.Tensor, Evidence]:
        """The flag that decides about this step, noted for `update` and for the report.

        With `agrees`, the optimizer's own flag is this rank's: where there are others, all ranks' flags are joined.
        """
        run, scale = self._run, self._scale_of_gradients()
        flags = list(record["found_inf_per_device"].values())
        parameters = parameters_of(optimizer) if agrees and self._shards.several() else []
        if self.skip == "all":
            flags += self._other_flags(optimizer, parameters)
        found = together(flags, scale) if flags else torch.zeros_like(scale)
        group = self._shards.group(parameters) if parameters else None
        if group is not None:
            own = any(p.grad is not None for p in parameters_of(optimizer))
            found = self._shards.agreed(found, group, has_gradients=own)
        record["found_inf_per_device"] = {found.device: found}
        run.stepped.append(run.of(optimizer))
        run.found = found
        evidence = Evidence(run.of(optimizer).optimizer, found, scale, divisor, run.calls, run.names)
        run.evidence.append(evidence)
        return found, evidence

    def _other_flags(self, optimizer: Any, looked_at: list[torch.Tensor]) -> list[torch.Tensor]:
        """The flags of the optimizers that step together with this one, as far as their gradients are there; the
        parameters whose flags are this rank's own are added to `looked_at`.

        These are the ones that stepped since the last `scale()`; the ones that are unscaled already; and the ones that
        stepped together with it the last time. Until the first update nothing is known of that kind: then every other
        `nn.Parameter` behind the scaled losses counts.
        """
        run, scale = self._run, self._scale_of_gradients()
        flags = [] if run.found is None else [run.found]
        seen: set[int] = set()
        partners = run.of(optimizer).partners
        for other, known in run.optimizers():
            if run.reached is not None:
                seen.update(map(id, parameters_of(other)))
            if other is optimizer:
                continue
            if self._is_unscaled(other):
                flags += self._per_optimizer_states[id(other)]["found_inf_per_device"].values()
            elif known in partners and known.consumed < run.calls:
                looked_at += parameters_of(other)
                flags.append(overflow(gradients_of(parameters_of(other)), scale, grows=self._may_grow()))
        if run.reached is not None:
            unseen = [p for key, p in run.reached.items() if key not in seen]
            looked_at += unseen
            rest = gradients_of(unseen)
            flags += [overflow(rest, scale, grows=self._may_grow())] if rest else []
        return flags

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale by rule S15, on whether any optimizer's gradients overflowed; or set it.

        Args:
            new_scale: the scale from now on: a number within the floor and the ceiling; or a tensor of one element,
                which is held to them on its device.

        Raises:
            GradScalerError: no optimizer stepped since the last update; or a scale that is out of bounds.
            LossScaleStuckError: see `LossScaler.patience`.
        """
        if not self._enabled:
            return
        run, state = self._run, self._require_state("update")
        if new_scale is not None:
            given = self._given(new_scale, state.scale)
            self._scale_changes()
            state.scale.copy_(given)
            run.least = self._scaler.min_scale
        else:
            records = self._per_optimizer_states.values()
            flags = [flag for record in records for flag in record["found_inf_per_device"].values()]
            if not flags:
                raise GradScalerError("update() was called, but no step() with gradients since the last update().")
            self._state = self._updated(state, together(flags, state.scale))
            run.least = max(run.least * self._backoff_factor, self._scaler.min_scale)
            if run.ended:
                run.evidence = []
        self._per_optimizer_states = defaultdict(new_record)
        run.updated(state.scale)
        if run.watch.due(self._scaler):
            self._look_if_stuck()

    def _look_if_stuck(self) -> None:
        """Read the state on the host, once every `patience` updates (S17)."""
        state, scaler = self._require_state("update"), self._scaler
        self._run.least, skips = state.scale.item(), int(state.stuck.item())

        def names() -> list[str]:
            return [row.name for row in self.report()] or ["unknown, as the gradients are gone"]

        stuck.check(skips, scaler, names, where="the model", stacklevel=4)

    @property
    def step_was_skipped(self) -> bool:
        """Whether a step of the last iteration was skipped, before and after `update()`; may wait for the device.

        A learning-rate schedule should not move then: `if not scaler.step_was_skipped: scheduler.step()`.
        """
        return any(evidence.skipped() for evidence in self._run.evidence)

    def report(self) -> SkipReport:
        """Which gradients of the last iteration were not finite, and how many of their numbers; empty if none was.

        Steps that the host decided about are counted at once. A fused optimizer's on an accelerator are counted when
        the report is asked for, which has to be before `zero_grad()` and the next `scale()`.
        """
        return joined([evidence.report(self._run.calls) for evidence in self._run.evidence])
