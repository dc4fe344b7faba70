"""The second half of a torch step: flag, unscale and clip, optimizer, scale adjustment (S9 to S15), in place.

Called by the step and, for people who run the two halves, by the backend. Nothing here reads a value on the host of an
accelerator; `optimizers.apply` does for the optimizers that must, and `buffers.settle` for buffers that were
resized or replaced. On the CPU, where reading costs nothing, the flag is read and a skipped step touches nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from polyamp.arrays import PYTHON
from polyamp.errors import GradientError, UnsupportedError
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, decide, refusals
from polyamp.rules.decide import Skip
from polyamp.rules.scale import LossScaleState, update
from polyamp_torch.arrays import XP
from polyamp_torch.compat import NOTHING, local_of
from polyamp_torch.precision.shield import shield
from polyamp_torch.step import optimizers
from polyamp_torch.step import running as buffers
from polyamp_torch.step.differentiate import Values, set_aside
from polyamp_torch.step.interrupts import Undisturbed
from polyamp_torch.step.measure import divide_, divide_in_two_steps_, divisor, looks, measured
from polyamp_torch.step.parameter_writes import Written
from polyamp_torch.step.rank_0_writes import WrittenHere, news, send_writes
from polyamp_torch.step.replicas import Own, guarded
from polyamp_torch.step.state import TorchState
from polyamp_torch.step.turns import together
from polyamp_torch.step.weighing import Weighing
from polyamp_torch.step.weighing import divisor as divisor_of
from polyamp_torch.step.window import produced_by

if TYPE_CHECKING:
    from polyamp_torch.distributed.agreement import Begun

_ORDINARY: Final = (2.0**-100, 2.0**100)
"""Divisors whose quotients are as exact as float32 allows."""


class Shared:
    """A step's own numbers that are shared with other processes in the one reduction.

    Args:
        weighing: what its micro-batches count.
        divided: what the sums of the gradients were divided by already.

    Attributes:
        loss: the sum of the losses of this process's micro-batches times what they count; behind the update the mean
            over the replicas.
        weight: behind the update, see `StepResult.weight`.
        begun: the reduction of the loss where it is under way already, or None.
        announced: where it is, whether it says that there is something to say of parameters that were written to.
    """

    def __init__(self, weighing: Weighing, *, divided: float = 1.0) -> None:
        self.weighing = weighing
        self.divided = divided
        self.loss: torch.Tensor | None = None
        self.weight: torch.Tensor | None = None
        self.begun: Begun | None = None
        self.announced = False

    def alone(
        self, scale: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Where the engine has this process alone: the loss becomes the mean, and what comes back is what the gradients
        are still multiplied by, and the weight."""
        total = self.weighing.total
        by = divisor_of(total)
        if self.loss is not None:
            self.loss = self.loss / by
        return produced_by(scale, by / self.divided, device), self.weighing.weight(total)


class Scaled(NamedTuple):
    """Gradients on their way into an update.

    Attributes:
        values: one per parameter that has one, in the parameters' order.
        scale: scalar that they are still multiplied by, or None.
        settle: gives the buffers their values, by the flag.
        shared: what else is shared with other processes, or None.
        weight: what the mean of the loss is over, float32 scalar, where that may be 0 (S8); else None.
        places: the parameters into whose `.grad` they are still to be put; they are the caller's then, and not to be
            overwritten. None for gradients that stand there, and that nobody else has.
        written: what the passes wrote to parameters, where other processes may have written something else.
    """

    values: list[torch.Tensor]
    scale: torch.Tensor | None
    settle: Callable[[torch.Tensor | None], None]
    places: list[torch.Tensor] | None = None
    shared: Shared | None = None
    weight: torch.Tensor | None = None
    written: WrittenHere | None = None


def apply_gradients(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and one scale adjustment, in place (S9 to S15). A gradient of None leaves its parameter,
    and the optimizer's state for it, as they are. A parameter of several states is stepped by each one's optimizer, as
    torch's optimizers over one `.grad` do."""
    with guarded(states, second=True), Undisturbed(), together([state.turn for state in states]), shield():
        return _applied_to(states, grads, skip)


def _applied_to(states: Sequence[TorchState], grads: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    ready: list[Scaled] = []
    written: list[Written] = []
    for state, item in zip(states, grads, strict=True):
        state.check_unchanged()
        _require(state, item.values)
        fitted = _fitted(state, item.values)
        places: list[torch.Tensor] = [state.parameters[name] for name in fitted]
        written.append(Written(state.writes.named, item.running))
        settle = functools.partial(_settle, state, item.running, written[-1])
        ready.append(Scaled(list(fitted.values()), None, settle, places, weight=item.weight, written=written[-1]))
    parameters = {id(p): p for state in states for p in state.parameters.values()}
    try:
        with set_aside(list(parameters.values()), used_up=True):
            return applied(states, ready, skip)
    except BaseException:
        for each in reversed(written):
            each.settle(torch.zeros((), dtype=torch.bool))
        raise


def _settle(state: TorchState, running: buffers.Running, written: Written, finite: torch.Tensor | None) -> None:
    """The running statistics of the gradients become the model's, rank 0's on every rank."""
    written.settle(finite)
    buffers.commit(state.model, {name: value for name, value in running.items() if name not in written}, finite)
    held = state.replicas.held
    if held is not None and running and (finite is None or not looks(finite.device) or bool(finite)):
        held.send_running([owner.slots for owner in state.buffer_owners], None)


@torch.no_grad()
def applied(states: Sequence[TorchState], grads: Sequence[Scaled], skip: Skip) -> list[StepResult]:
    """The update of several states by the rules of `decide`."""
    _, results = decide.update(states, grads, skip, _VERBS)
    torch.clear_autocast_cache()  # a caller's open region would serve the old weights to the next step
    return results


def nothing_applied(state: TorchState, loss: torch.Tensor, aux: Any, weight: torch.Tensor | None) -> StepResult:
    """The step of a batch in which nothing counts: it is skipped, and says nothing of the scale (S8)."""
    yes = torch.ones((), dtype=torch.bool, device=state.device)
    decision = decide.concluded(state.scaler, state.scale_state, state.step, yes, yes, XP, ~yes)
    state.scale_state = decision.scale_state
    return StepResult(
        loss, aux, torch.zeros_like(loss), state.scale_state.scale, decision.skipped, decision.step, weight
    )


class _Verbs(decide.Verbs[TorchState, Scaled]):
    """What torch does in the second half. Unscaling, clipping and the update are one pass where the kernels can."""

    xp = XP

    def scaler(self, state: TorchState) -> LossScaler:
        return state.scaler

    def measure(self, state: TorchState, grads: Scaled) -> decide.Measured:
        """With the norm in float64 and the divisor that unscales and clips as `more`.

        Off the CPU, gradients that are so large that this divisor leaves float32 count as not finite: above
        3.4e38 * clip_norm before unscaling.
        """
        clip_norm, scale, weight = state.recipe.clip_norm, grads.scale, grads.weight
        if state.replicas.several:
            norm, finite, scale = _agreed(state, grads)
            weight = weight if grads.shared is None else grads.shared.weight
        else:
            if grads.shared is not None:
                scale, weight = grads.shared.alone(scale, state.device)
            values = state.plain(grads.values)
            least = state.scaler.min_scale if weight is None else 0.0
            norm, finite = measured(values, scale, least=least, alike=state.one_device)
        by = divisor(norm, scale, clip_norm)
        if by is not None and clip_norm is not None and not looks(norm.device):
            finite = finite & torch.isfinite(by.float())
        return decide.Measured(norm.float(), finite, (norm, by, scale), weight)

    def every(self, flags: Sequence[torch.Tensor]) -> torch.Tensor:
        return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()

    def concluded(
        self,
        state: TorchState,
        finite: torch.Tensor | None,
        every: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> decide.Decision:
        """On the CPU over NumPy's float32 and int32 numbers, which is five times faster."""
        scaler, old, here = state.scaler, state.scale_state, state.device
        if counts is not None and looks(here) and bool(counts):
            counts = None
        if counts is not None:
            finite = None if finite is None else finite.to(here)
            return decide.concluded(scaler, old, state.step, finite, every.to(here), XP, counts.to(here))
        if finite is None:
            return decide.Decision(None, old, state.step + 1, torch.zeros((), dtype=torch.bool, device=here))
        finite = finite.to(here)
        if not looks(here):
            return decide.concluded(scaler, old, state.step, finite, every.to(here), XP)
        new = update(scaler, LossScaleState(*(field.numpy()[()] for field in old)), bool(every), PYTHON)
        moved = LossScaleState(*(torch.scalar_tensor(v.item(), dtype=o.dtype) for v, o in zip(new, old, strict=True)))
        return decide.Decision(finite, moved, state.step + finite.to(torch.int32), ~finite)

    def commit(
        self, state: TorchState, grads: Scaled, measured: decide.Measured, decision: decide.Decision
    ) -> TorchState:
        norm, by, scale = measured.more
        _update(state, grads._replace(scale=scale), norm, by, decision.finite)
        grads.settle(decision.finite)
        state.scale_state, state.step = decision.scale_state, decision.step
        return state


_VERBS: Final = _Verbs()


def _update(
    state: TorchState, grads: Scaled, norm: torch.Tensor, by: torch.Tensor | None, finite: torch.Tensor | None
) -> None:
    """Unscale, clip and step; on the CPU not at all if the flag says so."""
    if looks(state.device):
        if finite is not None and not bool(finite):
            return
        if by is not None and by.item() == 1.0:
            by = None
    values = grads.values
    if grads.places is not None:
        if by is not None:
            values = [torch.empty_like(p).copy_(value) for p, value in zip(grads.places, values, strict=True)]
        for p, value in zip(grads.places, values, strict=True):
            p.grad = value
    values = state.plain(values)
    if by is not None:
        by = _divided_before(state, values, grads.scale, norm, by)
    shards = state.shards
    with NOTHING if shards is None else shards.inside(state.optimizer, _with(state, grads), values):
        optimizers.apply(
            state.optimizer,
            state.recipe.optimizer,
            state.step,
            finite,
            by=by,
            grads=values,
            kernels=state.kernels,
            rates=state.rates,
            groups=state.groups,
        )
    for p in grads.places or ():  # another state's optimizer may hold it too, with a gradient of its own clipping
        p.grad = None


def _with(state: TorchState, grads: Scaled) -> list[torch.Tensor]:
    """The parameters that have gradients, in order."""
    return grads.places or [p for p in state.parameters.values() if p.grad is not None]


def _agreed(state: TorchState, grads: Scaled) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Norm and flag over all processes, and what the gradients are still multiplied by; the mean of the loss and the
    weight go into `grads.shared`. What was written to parameters is rank 0's then."""
    replicas, shared = state.replicas, grads.shared
    parameters, values = _with(state, grads), state.plain(grads.values)
    begun = None if shared is None else shared.begun
    if shared is not None and begun is not None:
        announced = shared.announced
    else:
        announced = grads.written is not None and news(state, grads.written.found)
    own = Own(news=announced)
    if shared is not None:
        own = Own(shared.loss, shared.weighing.total, shared.divided, announced)
    found = replicas.agreed(parameters, values, grads.scale, own, begun, alike=state.one_device)
    if shared is not None:
        shared.loss = found.loss
        shared.weight = shared.weighing.weight(found.total * replicas.count)
    if grads.written is not None:
        try:
            send_writes(state, grads.written, announced=announced, of_all=found.news, finite=found.finite)
        except UnsupportedError:
            with contextlib.suppress(UnsupportedError):  # a value that was not kept: the error at hand says why
                grads.settle(torch.zeros((), dtype=torch.bool))
            raise
    return found.norm, found.finite, found.scale


def _divided_before(
    state: TorchState, values: list[torch.Tensor], scale: torch.Tensor | None, norm: torch.Tensor, by: torch.Tensor
) -> torch.Tensor | None:
    """Divide the gradients, unless the optimizer's kernels can: what is left to divide them by."""
    limit = state.recipe.clip_norm
    if looks(state.device) and not _ORDINARY[0] < by.item() < _ORDINARY[1] and limit is not None:
        divide_in_two_steps_(values, scale, clip.factor(norm, limit, XP))
        return None
    if optimizers.takes_divisor(state.optimizer):
        return by.float()
    divide_(values, by, alike=state.one_device)
    return None


def _fitted(state: TorchState, values: Values) -> dict[str, torch.Tensor]:
    """Gradients that a user may have replaced: in the parameters' order, dtype and memory layout, without the None."""
    fitted, has_complex = {}, bool(state.complex_parameters)
    for name, parameter in state.parameters.items():
        value = values[name]
        if value is None:
            continue
        if (local_of(value) is value) != (local_of(parameter) is parameter):
            raise GradientError(
                f"the gradient of {name!r} must be sharded as the parameter is. Received: "
                f"{'a whole tensor for a sharded parameter' if local_of(value) is value else 'a sharded tensor'}. "
                "torch.distributed.tensor.distribute_tensor(gradient, parameter.device_mesh, parameter.placements) "
                "makes one."
            )
        if value.dtype != parameter.dtype and value.is_complex() and not parameter.is_complex():
            raise GradientError(
                f"the gradient of {name!r} must be real as the parameter is. Received: {value.dtype}. Give its real "
                "part, gradient.real, if that is what is meant."
            )
        conjugate = has_complex and value.is_conj()
        if conjugate or value.dtype != parameter.dtype or value.stride() != parameter.stride():
            value = torch.empty_like(parameter).copy_(value)
        fitted[name] = value.detach()
    return fitted


def _require(state: TorchState, values: Values) -> None:
    """Refuse gradients that do not fit the parameters."""
    refusals.check_gradients(
        [(name, tuple(p.shape)) for name, p in state.parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in values.items()],
    )
