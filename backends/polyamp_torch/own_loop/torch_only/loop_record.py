"""Record of the training loop of a `GradScaler`, which is never saved, and checks of its backward passes."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_torch.compat import call_after_backward, gathered_fsdp2_parameters, tensor_version
from polyamp_torch.own_loop.gradients import optimizer_parameters
from polyamp_torch.own_loop.skip_report import ParameterNames, SkipEvidence
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError
from polyamp_torch.own_loop.torch_only.sharded_gradients import local_gradient
from polyamp_torch.step.torch_only.foreign_grads import graph_leaves


class OptimizerRecord:
    """Record of one optimizer.

    Attributes:
        optimizer: returns it, or None once it is deleted.
        last_call: the value of `LoopRecord.calls` at its last step.
        partners: records of the optimizers, itself included, that stepped together with it the last time, on gradients
            of the same `scale()` calls.
        mixed: the parameters to which a backward pass added scaled gradients after `unscale_`.
        takes_scaler: whether its `step` takes the scaler itself (an older contract of fused optimizers).
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer: Callable[[], Any]
        try:
            self.optimizer = weakref.ref(optimizer)
        except TypeError:  # a class with __slots__
            self.optimizer = lambda: optimizer
        self.last_call = 0
        self.partners: list[OptimizerRecord] = []
        self.mixed: list[str] = []
        self.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        self._with_momentum: set[int] = set()
        self._state: Any = None

    def refuse_mixed(self) -> None:
        """Reject a step on gradients that mix scaled and unscaled parts."""
        if self.mixed:
            raise GradScalerError(
                "a backward pass ran after unscale_(optimizer) and added scaled gradients to unscaled ones, in: "
                f"{', '.join(self.mixed)}. Call unscale_ after the last backward pass; then zero_grad() and update()."
            )

    def lacks_momentum(self, optimizer: Any) -> bool:
        """Return whether it is an SGD whose momentum buffers do not exist yet. The fused kernel would leave them
        uninitialised on a skip, so the host has to decide."""
        if not isinstance(optimizer, torch.optim.SGD) or not any(g["momentum"] for g in optimizer.param_groups):
            return False
        held = {id(p): p for p in optimizer_parameters(optimizer) if p.grad is not None}
        unchanged = self._state is optimizer.state and len(self._state) >= len(self._with_momentum)
        if unchanged and held.keys() <= self._with_momentum:
            return False
        has = {key for key, p in held.items() if optimizer.state.get(p, {}).get("momentum_buffer") is not None}
        self._state, self._with_momentum = optimizer.state, has
        return len(has) < len(held)


class LoopRecord:
    """Record of the training loop of a `GradScaler`; not saved with it.

    Attributes:
        calls: number of calls of `scale()`.
        scaled: the scale that the last call multiplied by, which is the scale of its gradients.
        inverse: its inverse, by which gradients were multiplied last.
        shared: whether losses may be multiplied by the scale without a call of `scale()`: other code has its tensor, or
            a CUDA graph replays the call. As in torch, gradients then have the current scale.
        least: a lower bound of the current scale, known without synchronization.
        scaled_least: a lower bound of `scaled`.
        found: the joint flag of the steps since the last call of `scale()`, or None.
        stepped: records of the optimizers of these steps.
        watch: decides when the host checks whether the scale is stuck (S17).
        warned: whether the warning about a backward pass inside an autocast region was issued.
        reachable: until the first update, the parameters that scaled losses depend on, by id; then None.
    """

    def __init__(self, least: float) -> None:
        self.calls = 0
        self.scaled: torch.Tensor | None = None
        self.inverse: torch.Tensor | None = None
        self.shared = False
        self.least = self.scaled_least = least
        self.found: torch.Tensor | None = None
        self.stepped: list[OptimizerRecord] = []
        self.reachable: dict[int, torch.Tensor] | None = {}
        self._known: dict[int, OptimizerRecord] = {}
        self.evidence: list[SkipEvidence] = []
        self.ended = self.warned = False
        self.watch = StuckScaleMonitor()
        self.names = ParameterNames()

    def record_of(self, optimizer: Any) -> OptimizerRecord:
        """Return the record of an optimizer. Keyed by id, as in torch: not every optimizer is hashable."""
        record = self._known.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            record = self._known[id(optimizer)] = OptimizerRecord(optimizer)
        return record

    def optimizers(self) -> list[tuple[Any, OptimizerRecord]]:
        """Return the optimizers that were stepped or unscaled and still exist, with their records."""
        pairs = [(record.optimizer(), record) for record in self._known.values()]
        return [(optimizer, record) for optimizer, record in pairs if optimizer is not None]

    def mark_shared(self) -> None:
        """Record that losses may be scaled without a call of `scale()` from now on."""
        if not self.shared:
            self.shared = True
            self.calls += 1

    def record_scale_call(self, scale: torch.Tensor) -> None:
        """Record a call of `scale()` with this scale. The optimizers stepped since the last call stepped together."""
        for record in self.stepped:
            record.partners = self.stepped
        self.calls += 1
        self.scaled, self.scaled_least = scale, self.least
        self.found, self.stepped = None, []

    def preserve_scale(self, scale: torch.Tensor) -> None:
        """Prepare for a write to the scale: gradients and reports of this iteration keep the old value."""
        old = scale.clone()
        if self.scaled is scale:
            self.scaled = old
        for evidence in self.evidence:
            evidence.preserve_scale(scale, old)

    def record_reachable(self, scaled: torch.Tensor) -> None:
        """Record the parameters that a scaled loss depends on, in the first iteration."""
        if self.reachable is not None:
            behind = [leaf for leaf in graph_leaves(scaled) if isinstance(leaf, torch.nn.Parameter)]
            sharded = {
                id(each.whole): each.sharded for each in gathered_fsdp2_parameters()
            }  # the optimizer owns the shards
            self.reachable.update((id(p), p) for p in (sharded.get(id(p), p) for p in behind))

    def end_iteration(self, scale: torch.Tensor) -> None:
        """Record the end of an iteration; `scale` is the next one's."""
        if self.shared:
            self.record_scale_call(scale)
        self._known = {id(optimizer): record for optimizer, record in self.optimizers()}
        for record in self._known.values():
            record.mixed = []
        self.reachable = None
        self.ended = True


class _GradBeforeBackward(NamedTuple):
    """Gradient at the start of a backward pass."""

    record: OptimizerRecord
    name: str
    parameter: torch.Tensor
    grad: torch.Tensor | None
    version: int


def watch_scaled_backward(loop: LoopRecord, unscaled: Sequence[tuple[Any, OptimizerRecord]], device_type: str) -> None:
    """Watch these optimizers' gradients when a backward pass enters a scaled tensor. Warn once if it runs inside an
    autocast region (S3), which autograd captured when `backward` was called."""
    if not loop.warned and torch.is_autocast_enabled(device_type):
        loop.warned = True
        warnings.warn(
            "backward() runs inside an autocast region: torch computes its products in "
            f"{torch.get_autocast_dtype(device_type)} too, those of float32 parts of the model included, and "
            "GradScaler cannot keep them out of the gradients. End the region before backward().",
            stacklevel=6,
        )
    if unscaled:
        _watch_unscaled_gradients(unscaled, loop.names)


def _watch_unscaled_gradients(unscaled: Sequence[tuple[Any, OptimizerRecord]], names: ParameterNames) -> None:
    """Record at the end of the current backward pass which gradients of these optimizers it has changed.

    Clipping changes them too, but not during a backward pass.
    """
    before = [
        _GradBeforeBackward(record, name, p, p.grad, -1 if p.grad is None else tensor_version(local_gradient(p.grad)))
        for optimizer, record in unscaled
        for name, p in zip(names.of(optimizer), optimizer_parameters(optimizer), strict=True)
    ]
    ended = functools.partial(_note_changed_gradients, before)
    call_after_backward(functools.partial(call_after_backward, ended))  # after callbacks that are queued later (FSDP2)


def _note_changed_gradients(before: list[_GradBeforeBackward]) -> None:
    for record, name, p, grad, version in before:
        changed = p.grad is not grad or (grad is not None and tensor_version(local_gradient(grad)) != version)
        if changed and name not in record.mixed:
            record.mixed.append(name)
