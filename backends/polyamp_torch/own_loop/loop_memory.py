"""What a `GradScaler` knows of the loop it is in, and what it refuses there.

Called by `GradScaler`; none of it is saved.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from polyamp.errors import UnsupportedError
from polyamp.rules.stuck import Watch
from polyamp_torch.compat import gathered_by_fsdp2, version_of, when_backward_ends
from polyamp_torch.own_loop.scaler_gradients import Kinds, parameters_behind, parameters_of
from polyamp_torch.own_loop.scaler_state import GradScalerError
from polyamp_torch.own_loop.shards import here
from polyamp_torch.own_loop.skip_report import Evidence, Names


class Known:
    """What is remembered of one optimizer.

    Attributes:
        optimizer: returns it, or None once it is gone.
        consumed: the value of `Run.calls` at its last step.
        partners: what is known of the optimizers that stepped the last time that it did, itself included, on
            gradients of the same `scale()` calls.
        mixed: the parameters to which a backward pass added scaled gradients after `unscale_`.
        takes_scaler: whether its `step` wants the scaler itself (an older contract of fused optimizers).
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer: Callable[[], Any]
        try:
            self.optimizer = weakref.ref(optimizer)
        except TypeError:  # a class with __slots__
            self.optimizer = lambda: optimizer
        self.consumed = 0
        self.partners: list[Known] = []
        self.mixed: list[str] = []
        self.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        self._with_momentum: set[int] = set()
        self._state: Any = None

    def refuse_mixed(self) -> None:
        """Refuse a step on gradients of which some parts are scaled and some are not."""
        if self.mixed:
            raise GradScalerError(
                "a backward pass ran after unscale_(optimizer) and added scaled gradients to unscaled ones, in: "
                f"{', '.join(self.mixed)}. Call unscale_ after the last backward pass; then zero_grad() and update()."
            )

    def lacks_momentum(self, optimizer: Any) -> bool:
        """True for an SGD with momentum that has not been made yet: the fused kernel would leave it uninitialised if it
        skipped, so the host has to decide."""
        if not isinstance(optimizer, torch.optim.SGD) or not any(g["momentum"] for g in optimizer.param_groups):
            return False
        held = {id(p): p for p in parameters_of(optimizer) if p.grad is not None}
        unchanged = self._state is optimizer.state and len(self._state) >= len(self._with_momentum)
        if unchanged and held.keys() <= self._with_momentum:
            return False
        has = {key for key, p in held.items() if optimizer.state.get(p, {}).get("momentum_buffer") is not None}
        self._state, self._with_momentum = optimizer.state, has
        return len(has) < len(held)


class Run:
    """What a `GradScaler` knows of the loop it is in; not kept when it is saved.

    Attributes:
        calls: how often `scale()` was called.
        scaled: the scale that the last call multiplied by: the one that its gradients have.
        inverse: its inverse, by which gradients were multiplied last.
        shared: whether losses may be multiplied by the scale without a call of `scale()`: somebody has its tensor, or
            a CUDA graph replays the call. Then it is as in torch: gradients have the present scale.
        least: a lower bound of the present scale, known without looking.
        scaled_least: the same of `scaled`.
        found: the joint flag of the steps since the last call of `scale()`, or None.
        stepped: what is known of the optimizers of these steps.
        watch: when the host looks whether the scale is stuck (S17).
        warned: whether a backward pass inside an autocast region was met.
        reached: until the first update, the parameters that scaled losses depend on, by id; then None.
    """

    def __init__(self, least: float) -> None:
        self.calls = 0
        self.scaled: torch.Tensor | None = None
        self.inverse: torch.Tensor | None = None
        self.shared = False
        self.least = self.scaled_least = least
        self.found: torch.Tensor | None = None
        self.stepped: list[Known] = []
        self.reached: dict[int, torch.Tensor] | None = {}
        self._known: dict[int, Known] = {}
        self.evidence: list[Evidence] = []
        self.ended = self.warned = False
        self.watch = Watch()
        self.names = Names()

    def of(self, optimizer: Any) -> Known:
        """What is known of an optimizer. By id, as in torch: not every optimizer can be hashed."""
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = Known(optimizer)
        return known

    def optimizers(self) -> list[tuple[Any, Known]]:
        """The optimizers that were stepped or unscaled, as far as they are still there."""
        pairs = [(known.optimizer(), known) for known in self._known.values()]
        return [(optimizer, known) for optimizer, known in pairs if optimizer is not None]

    def share(self) -> None:
        """From now on losses may be scaled behind the scaler's back."""
        if not self.shared:
            self.shared = True
            self.calls += 1

    def scale_called(self, scale: torch.Tensor) -> None:
        """`scale()` multiplies by this scale: what stepped since the last call stepped together."""
        for known in self.stepped:
            known.partners = self.stepped
        self.calls += 1
        self.scaled, self.scaled_least = scale, self.least
        self.found, self.stepped = None, []

    def scale_changes(self, scale: torch.Tensor) -> None:
        """The scale is about to be written: the gradients and reports of this iteration keep the old number."""
        old = scale.clone()
        if self.scaled is scale:
            self.scaled = old
        for evidence in self.evidence:
            evidence.keep(scale, old)

    def reach(self, scaled: torch.Tensor) -> None:
        """Note the parameters that a scaled loss depends on, in the first iteration."""
        if self.reached is not None:
            behind = list(parameters_behind(scaled))
            sharded = {id(each.whole): each.sharded for each in gathered_by_fsdp2()}  # the optimizer holds the shards
            self.reached.update((id(p), p) for p in (sharded.get(id(p), p) for p in behind))

    def updated(self, scale: torch.Tensor) -> None:
        """An iteration has ended, and the next one has this scale."""
        if self.shared:
            self.scale_called(scale)
        self._known = {id(optimizer): known for optimizer, known in self.optimizers()}
        for known in self._known.values():
            known.mixed = []
        self.reached = None
        self.ended = True


class _Before(NamedTuple):
    """A gradient as it was when a backward pass began."""

    known: Known
    name: str
    parameter: torch.Tensor
    grad: torch.Tensor | None
    version: int


def backward_begins(run: Run, unscaled: Sequence[tuple[Any, Known]], device_type: str) -> None:
    """Within a backward pass, as it enters a scaled tensor: watch these optimizers' gradients, and say once that it
    runs inside an autocast region (S3), which autograd took along when `backward` was called."""
    if not run.warned and torch.is_autocast_enabled(device_type):
        run.warned = True
        warnings.warn(
            "backward() runs inside an autocast region: torch computes its products in "
            f"{torch.get_autocast_dtype(device_type)} too, those of float32 parts of the model included, and "
            "GradScaler cannot keep them out of the gradients. End the region before backward().",
            stacklevel=6,
        )
    if unscaled:
        _watch_backward(unscaled, run.names)


def _watch_backward(unscaled: Sequence[tuple[Any, Known]], names: Names) -> None:
    """Within a backward pass: note, when it ends, which gradients of these optimizers it has changed.

    Clipping changes them too, but not within a backward pass.
    """
    before = [
        _Before(known, name, p, p.grad, -1 if p.grad is None else version_of(here(p.grad)))
        for optimizer, known in unscaled
        for name, p in zip(names.of(optimizer), parameters_of(optimizer), strict=True)
    ]
    ended = functools.partial(_backward_ended, before)
    when_backward_ends(functools.partial(when_backward_ends, ended))  # behind those who were told of it later: FSDP2


def _backward_ended(before: list[_Before]) -> None:
    for known, name, p, grad, version in before:
        changed = p.grad is not grad or (grad is not None and version_of(here(grad)) != version)
        if changed and name not in known.mixed:
            known.mixed.append(name)


def refuse_lbfgs(optimizer: Any) -> None:
    """Refuse torch's LBFGS."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the loss several times a step through a closure, which one finite flag and one scale "
            "cannot cover. Use another optimizer, or GradScaler(enabled=False)."
        )


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a closure among the arguments of `step`; None in its place is accepted."""
    if callable(kwargs.get("closure", args[0] if args else None)):
        raise UnsupportedError(
            "step() takes no closure, by position or by name: it would run backward after the gradients were unscaled "
            "and checked. Call scaler.scale(loss).backward() before step()."
        )


class Float16GradientError(UnsupportedError, ValueError):
    """Gradients in float16 cannot be unscaled. A ValueError too, as torch raises."""


def refuse_float16(grads: Kinds) -> None:
    """Refuse gradients in float16, in torch's words first: they are what is searched for."""
    if any(dtype is torch.float16 for _, dtype in grads):
        raise Float16GradientError(
            "Attempting to unscale FP16 gradients. Gradients must not be float16: they overflow and vanish before they "
            "can be unscaled. Keep the parameters in float32, and let autocast compute in float16."
        )
