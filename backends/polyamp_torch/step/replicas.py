"""What the step asks of several processes: how many replicas there are, and what they do together (S9).

`state.replicas` is `ALONE` on one device, of which a step reads one attribute. What torch's engines need is in
`distributed`, which is imported where a model is held by one of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyamp.rules import replicas as of_ranks
from polyamp_torch.compat import NOTHING

if TYPE_CHECKING:
    from polyamp_torch.distributed.engines import Engine


class Replicas:
    """The processes that train one model together.

    Attributes:
        engine: whose they are: "ddp", "fsdp2", "tensor_parallel", "fsdp2+tensor_parallel"; None on one device.
        group: all the processes that hold the model, whole or in parts; None on one device.
        data: those of them whose batches differ; None where all have the same.
        count: how many replicas there are, each with a batch of its own.
        rank: which of them this process belongs to.
        several: whether the step has to agree with other processes.
        modules: what of the model belongs to the engine, outermost first.
        guard: the block that a step of several processes runs in (S32); None on one device.
    """

    def __init__(self, found: Engine | None) -> None:
        self.engine = None if found is None else found.name
        self.group: Any = None if found is None else found.group
        self.data: Any = None if found is None else found.data
        self.count = 1 if found is None else found.count
        self.rank = 0 if found is None else found.rank
        self.modules: tuple[Any, ...] = () if found is None else found.modules
        self.several = self.group is not None and self.group.size() > 1
        self.guard: Any = _guard(self.group) if self.several else None


ALONE: Final = Replicas(None)


def replicas_of(model: nn.Module) -> Replicas:
    """The processes that train a model together.

    Raises:
        UnsupportedError: an engine that polyamp does not train with.
    """
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    held = any(isinstance(part, DistributedDataParallel) for part in model.modules())
    if not held and not (spread and any(isinstance(p, spread) for p in model.parameters())):
        return ALONE
    from polyamp_torch.distributed import engines  # brings torch's sharded tensors

    return Replicas(engines.found(model))


def compare(state: Any) -> None:
    """At the end of `init` on several ranks: compare what they bring (S32).

    Raises:
        ReplicaError: names the ranks that differ, and in what they do; or that did not come.
    """
    replicas = state.replicas
    if replicas.guard is None:
        return
    from polyamp.train.ranks import brought
    from polyamp_torch.distributed.brought import described

    sections, part = described(state.model, replicas.engine, replicas.modules)
    replicas.guard.inits += 1
    of_ranks.compare(replicas.guard.board.group, replicas.guard.inits, brought(state) | sections, part)


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
    try:
        guard = replicas_of(model).guard
    except Exception:  # noqa: BLE001  # no model, or one that no rank can train
        return
    if guard is not None:
        guard.inits += 1
        of_ranks.withdrawn(guard.board.group, guard.inits, error)


def _guard(group: Any) -> Any:
    from polyamp_torch.distributed.failure import guard_of

    return guard_of(group)
