"""What the step asks of several processes: how many replicas there are, and what they do together (S9).

`state.replicas` is `ALONE` on one device, of which a step reads one attribute. What torch's engines need is in
`distributed`, which is imported where a model is held by one of them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import PolyampError, ReplicaError
from polyamp.rules import replicas as of_ranks
from polyamp.rules.weights import Totals
from polyamp_torch.compat import NOTHING, local_of
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.paths import path_of
from polyamp_torch.step.measure import looks, measured

Number = float | torch.Tensor

if TYPE_CHECKING:
    from polyamp_torch.distributed.agreement import Agreed, Begun
    from polyamp_torch.distributed.engine import Engine


class Pass(NamedTuple):
    """One forward and backward pass of a window.

    Attributes:
        part: the micro-batch.
        counts: False for one that is run because other processes wait for it, and leaves nothing behind.
        last: whether gradients are reduced over the replicas behind it.
    """

    part: Any
    counts: bool = True
    last: bool = True


class Own(NamedTuple):
    """This process's numbers for the one reduction of a step.

    Attributes:
        loss: the sum of its losses times what they count, or None.
        total: the sum of what they count.
        divided: what the gradients were divided by already.
        news: whether it has something to say of parameters that it wrote to.
    """

    loss: torch.Tensor | None = None
    total: Number = 1.0
    divided: float = 1.0
    news: bool = False


class Replicas:
    """The processes that train one model together.

    Attributes:
        held: what torch's engine does in a step; None on one device.
        engine: whose they are: "ddp", "fsdp2", "tensor_parallel", "fsdp2+tensor_parallel"; None on one device.
        group: all the processes that hold the model, whole or in parts; None on one device.
        data: those of them whose batches differ; None where all have the same.
        count: how many replicas there are, each with a batch of its own.
        rank: which of them this process belongs to.
        several: whether the step has to agree with other processes.
        sharded: whether parameters lie in parts in several processes.
        modules: what of the model belongs to the engine, outermost first.
        guard: the block that a step of several processes runs in (S32); None on one device.
        number: which of the group's states this is, from 1; 0 for one that did not come from `init`.
    """

    def __init__(self, held: Engine | None, named: Mapping[str, torch.Tensor]) -> None:
        self.held = held
        self.engine = None if held is None else held.name
        self.group: Any = None if held is None else held.group
        self.data: Any = None if held is None else held.data
        self.count = 1 if held is None else held.count
        self.rank = 0 if held is None else held.rank
        self.modules: tuple[Any, ...] = () if held is None else held.modules
        self.several = self.group is not None and self.group.size() > 1
        self.guard: Any = _guard(self.group) if self.several else None
        self.number = 0
        self.sharded = any(local_of(p) is not p for p in named.values())
        self._parts: dict[int, float] = {}
        self._unit: float | None = None
        if held is not None:
            from polyamp_torch.distributed.engine import copies

            self._parts = {id(p): 1.0 / copies(p, held.group) for p in named.values()}

    def local(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What this process holds of each."""
        if not self.sharded:
            return tensors
        from polyamp_torch.distributed.engine import locals_of

        return locals_of(tensors)

    def unit(self, most: Callable[[], Number]) -> Number:
        """What weights are counted in, so that the scaled loss stays about as large: on one device the most that a
        micro-batch can count; for several replicas, which need the same one before they know each other's weights, the
        power of two above the largest, on which they agree at the first step whose weight is not 0."""
        if self.count == 1:
            found = most()
            return found or 1.0 if isinstance(found, float) else torch.where(found > 0.0, found, torch.ones_like(found))
        if self._unit is None:
            from polyamp_torch.distributed.agreement import largest

            device = next((p.device for part in self.modules for _, p in tree_parameters(part)), torch.device("cpu"))
            found = largest(float(most()), self.group, device)
            if found == 0.0:
                return 1.0
            self._unit = 2.0 ** math.ceil(math.log2(found))
        return self._unit

    def totals(self, totals: Totals, device: torch.device) -> Totals:
        """Those of all replicas, from this one's own: a reduction that gradients wait for."""
        if self.count == 1:
            return totals
        from polyamp_torch.distributed.agreement import summed

        own = [*totals.counts, float(totals.parts)]
        *counts, parts = summed(own, self.group, device) * (self.count / self.group.size())
        return Totals(counts, round(parts.item()) if looks(device) else parts)

    def mean(self, total: Number, device: torch.device) -> Number:
        """The mean over the replicas of what each counts."""
        from polyamp_torch.distributed.agreement import summed

        found: torch.Tensor = summed([total], self.group, device)[0] / self.group.size()
        return found.item() if looks(device) else found

    def begin(self, loss: torch.Tensor, total: Number, *, news: bool = False) -> Begun | None:
        """Before the last backward pass of a window: send the loss off, if nothing but it needs a reduction; and with
        it whether there is something to say of parameters that were written to."""
        if not self.several or self.held is None or not self.held.same:
            return None
        from polyamp_torch.distributed.agreement import Begun

        return Begun(loss, total, self.group, self._mark(0), news=news)

    def _mark(self, gradients: int) -> int:
        return 0 if self.guard is None else int(self.guard.mark(self.number, gradients))

    def _check_marks(self, marks: torch.Tensor, mark: int, gradients: int) -> None:
        if looks(marks.device) and marks.item() != mark * self.group.size():
            self.guard.refuse(self.number, gradients)

    def agreed(
        self,
        parameters: list[torch.Tensor],
        grads: list[torch.Tensor],
        scale: torch.Tensor | None,
        own: Own,
        begun: Begun | None = None,
        **how: Any,
    ) -> Agreed:
        """Norm, flag and mean loss over all processes, in one small reduction.

        Args:
            parameters: those that have gradients.
            grads: what this process holds of these, in the same order.
            scale: what the gradients are multiplied by beside what their losses count, or None.
            own: this process's numbers.
            begun: what `begin` returned: then each process measures the gradients by itself, which are the same in all.
            **how: to measure; see `measured`.

        Raises:
            PartedError: the processes are in different steps, or have gradients of different parameters. Known where
                reading a number waits for nothing.
        """
        from polyamp_torch.distributed.agreement import Agreed, agreed

        if begun is not None:
            loss, total, marks, news = begun.arrived()
            scale = _scaled(scale, total, own.divided)
            norm, finite = measured(grads, scale, **how)
            self._check_marks(marks, begun.mark, len(grads))
            return Agreed(norm, finite, loss, total, marks, news, scale)
        device = grads[0].device
        classes: dict[float, list[torch.Tensor]] = {}
        for p, grad in zip(parameters, grads, strict=True):
            if grad.numel():
                classes.setdefault(self._parts[id(p)], []).append(grad)
        shares, flags = [], []
        for part, members in classes.items():
            norm, flag = measured(members, scale, **how)
            shares.append(norm.to(device, torch.float64).square() * part)
            flags.append(flag.to(device))
        if not shares:  # every shard that lies here is empty
            shares = [torch.zeros((), dtype=torch.float64, device=device)]
            flags = [torch.ones((), dtype=torch.bool, device=device)]
        squares = shares[0] if len(shares) == 1 else torch.stack(shares).sum()
        finite = flags[0] if len(flags) == 1 else torch.stack(flags).all()
        mark = self._mark(len(grads))
        found = agreed(squares, finite, own.loss, own.total, self.group, mark, news=own.news)
        self._check_marks(found.marks, mark, len(grads))
        by = _scaled(None, found.total, own.divided)
        if by is None:
            return found._replace(scale=scale)
        norm = found.norm / by
        finite = found.finite & torch.isfinite(norm.float())  # a quotient that left float32 would be written
        return found._replace(norm=norm, finite=finite, scale=_scaled(scale, found.total, own.divided))

    def passes(self, parts: list[Any], count: int, *, narrow: bool) -> list[Pass]:
        """The passes of a window (S8), which is reduced over the replicas behind the last one. Where each pass waits
        for the other processes, all run `count` of them.

        Args:
            parts: the micro-batches.
            count: the recipe's `accumulate_steps`.
            narrow: the gradients are summed in float32 behind each pass, as those of 16-bit parameters are, so that
                each is reduced.
        """
        assert self.held is not None
        end = len(parts) - 1
        alike = self.several and (self.held.alike or narrow)
        more = count - len(parts) if alike else 0
        found = [Pass(part, last=narrow or (number == end and not more)) for number, part in enumerate(parts)]
        return found + [Pass(parts[0], counts=False, last=narrow or left == 1) for left in range(more, 0, -1)]

    def whole(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss that is a sharded tensor, as under `loss_parallel`, as this process's own number."""
        sharded: Any = loss
        whole: torch.Tensor = loss if local_of(loss) is loss else sharded.full_tensor()
        return whole

    def enter(self, engines: contextlib.ExitStack) -> None:
        """Have the engine ready for a single pass, in the blocks that are closed with these."""
        if self.held is not None:
            engines.enter_context(self.held.window())
            engines.enter_context(self.held.one_pass(last=True))

    def fit(self, named: Mapping[str, torch.Tensor]) -> None:
        """Behind the last pass: refuse gradients that were not reduced over the replicas, and give the others the form
        that their parameters have."""
        if self.held is not None:
            self.held.check_reduced(named)
        if self.sharded:
            from polyamp_torch.distributed.engine import fitted

            fitted(named)


def _scaled(scale: torch.Tensor | None, total: torch.Tensor, divided: float) -> torch.Tensor | None:
    """What gradients are to be divided by: the scale times the mean of what the replicas count; where nothing counts
    the scale alone. None for 1, where reading it waits for nothing."""
    by = torch.where(total > 0.0, total, torch.ones_like(total)) / divided
    if looks(by.device) and by.item() == 1.0:
        return scale
    return by if scale is None else scale.to(by.device, torch.float64) * by


ALONE: Final = Replicas(None, {})


def replicas_of(model: nn.Module) -> Replicas:
    """The processes that train a model together, whose sharded parameters are in their places afterwards.

    Raises:
        UnsupportedError: an engine that polyamp does not train with.
    """
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    sharding = sys.modules.get("torch.distributed.fsdp")
    of_fsdp = [getattr(sharding, name, ()) for name in ("FSDPModule", "FullyShardedDataParallel")]
    held = any(isinstance(part, (DistributedDataParallel, *of_fsdp)) for part in model.modules())
    if not held and not (spread and any(isinstance(p, spread) for _, p in tree_parameters(model))):
        return ALONE
    from polyamp_torch.distributed import engines  # brings torch's sharded tensors

    for part in engines.sharded(model):
        part.reshard()
    path = path_of(model)
    named = {path(name): p for name, p in tree_parameters(model) if p.requires_grad}
    found = engines.found(model)
    return ALONE if found is None else Replicas(found, named)


def compare(state: Any) -> None:
    """At the end of `init` on several ranks: compare what they bring (S32), then see whether it can be trained.

    Raises:
        ReplicaError: names the ranks that differ, and in what they do; or that did not come.
    """
    replicas = state.replicas
    if replicas.guard is None:
        check(state)
        return
    from polyamp.train.ranks import brought
    from polyamp_torch.distributed.brought import described

    sections, part = described(state.model, replicas.engine, replicas.modules)
    replicas.guard.inits += 1
    replicas.number = replicas.guard.inits
    of_ranks.compare(replicas.guard.board.group, replicas.guard.inits, brought(state) | sections, part)
    check(state)


def check(state: Any) -> None:
    """Refuse a model whose engine would let the replicas part.

    Raises:
        ModelError: a trainable parameter that the engine does not hold.
        UnsupportedError: options of the engine.
    """
    if state.replicas.held is not None:
        state.replicas.held.check(state.parameters)


def guarded(states: Sequence[Any], *, second: bool = False) -> contextlib.AbstractContextManager[None]:
    """The block for a half of a step on some states, which on one device does nothing."""
    for state in states:
        guard = state.replicas.guard
        if guard is not None:
            found: contextlib.AbstractContextManager[None] = guard.second if second else guard
            return found
    return NOTHING


def withdraw(model: Any, error: BaseException) -> None:
    """Where `init` raised on this rank: the others need not wait for it."""
    if isinstance(error, ReplicaError):  # the store does not answer
        return
    try:
        guard = replicas_of(model).guard
    except PolyampError:  # that is what `init` raised, before it came to know the group
        groups = [part.process_group for part in model.modules() if isinstance(part, DistributedDataParallel)]
        guard = _guard(groups[0]) if groups and groups[0].size() > 1 else None
    except AttributeError:  # no model
        return
    if guard is not None:
        guard.inits += 1
        with contextlib.suppress(OSError):  # nobody can be told, and the error is on its way
            of_ranks.withdrawn(guard.board.group, guard.inits, error)


def _guard(group: Any) -> Any:
    from polyamp_torch.distributed.failure import guard_of

    return guard_of(group)
