"""Replicas of a training state: their number, and the operations of a step over several processes (S9).

On one device `state.replicas` is `SINGLE_DEVICE`, whose engine does nothing. The code for torch's parallel engines is
imported only for a model under one of them.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import PolyampError, ReplicaError
from polyamp.rules import rank_comparison as of_ranks
from polyamp.rules.loss_weights import TermTotals
from polyamp_torch.arrays import can_read_without_sync
from polyamp_torch.compat import NULL_CONTEXT, local_tensor_of
from polyamp_torch.distributed.all_reduce import AsyncStepScalars, all_reduce_max, all_reduce_sum
from polyamp_torch.distributed.torch_only.engine import ParallelEngine
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function

ScalarOrTensor = float | torch.Tensor


class MicroBatchPass(NamedTuple):
    """Forward and backward pass of one micro-batch.

    Attributes:
        part: the micro-batch.
        counts: False for a pass that runs only because other processes wait for it, and has no effect.
        last: whether gradients are reduced over the replicas after it.
    """

    part: Any
    counts: bool = True
    last: bool = True


class TorchReplicas:
    """The processes that train one model together.

    Attributes:
        engine: the parallel engine; the base class on one device.
        group: all the processes of the model, whether replicated or sharded; None on one device.
        data: the processes whose batches differ; None if all have the same batch.
        count: the number of replicas, each with a separate batch.
        rank: the index of this process's replica.
        several: whether the step must agree with other processes.
        sharded: whether parameters are sharded over several processes.
        modules: the modules that the engine wraps or shards, outermost first.
        guard: the context manager around a distributed step (S32); None on one device.
        number: the number of the state in its group, from 1; 0 for a state that is not from `init`.
        parts: parameter, by id -> part of its local elements that this process counts; empty on one device.
    """

    def __init__(self, engine: ParallelEngine, named: Mapping[str, torch.Tensor]) -> None:
        self.engine = engine
        self.group = engine.group
        self.data = engine.data
        self.count = engine.count
        self.rank = engine.rank
        self.modules = engine.modules
        self.several = self.group is not None and self.group.size() > 1
        self.guard: Any = _group_guard(self.group) if self.several else None
        self.number = 0
        self.sharded = any(local_tensor_of(p) is not p for p in named.values())
        self.parts: dict[int, float] = {}
        self._unit: float | None = None
        if engine.name is not None:
            from polyamp_torch.distributed.torch_only.sharded_tensors import replication_factor

            self.parts = {id(p): 1.0 / replication_factor(p, engine.group) for p in named.values()}

    def unit(self, most: Callable[[], ScalarOrTensor]) -> ScalarOrTensor:
        """Return the unit of the weights, which keeps the scaled loss about as large as without weights.

        On one device it is the largest weight that a micro-batch can have. Several replicas need the same unit before
        they know each other's weights. It is the power of two above the largest, agreed in the first step with a
        weight other than 0."""
        if self.count == 1:
            found = most()
            return found or 1.0 if isinstance(found, float) else torch.where(found > 0.0, found, torch.ones_like(found))
        if self._unit is None:
            device = next((p.device for part in self.modules for _, p in tree_parameters(part)), torch.device("cpu"))
            found = all_reduce_max(float(most()), self.group, device)
            if found == 0.0:
                return 1.0
            self._unit = 2.0 ** math.ceil(math.log2(found))
        return self._unit

    def totals(self, totals: TermTotals, device: torch.device) -> TermTotals:
        """Return the totals of all replicas, by a reduction that gradients wait for."""
        if self.count == 1:
            return totals
        own = [*totals.counts, float(totals.parts)]
        *counts, parts = all_reduce_sum(own, self.group, device) * (self.count / self.group.size())
        return TermTotals(counts, round(parts.item()) if can_read_without_sync(device) else parts)

    def mean(self, total: ScalarOrTensor, device: torch.device) -> ScalarOrTensor:
        """Return the mean of the replicas' weights."""
        if self.count == 1:
            return total
        found: torch.Tensor = all_reduce_sum([total], self.group, device)[0] / self.group.size()
        return found.item() if can_read_without_sync(device) else found

    def start_reduction(
        self, loss: torch.Tensor, total: ScalarOrTensor, *, announced: bool = False
    ) -> AsyncStepScalars | None:
        """Start the reduction of the loss before the last backward pass, if gradients need no further reduction.

        It also announces parameter writes."""
        if not self.several or not self.engine.has_equal_gradients:
            return None
        return AsyncStepScalars(loss, total, self.group, self.mark(0), announced=announced)

    def mark(self, gradients: int) -> int:
        """Return the program mark of a step with this number of gradients (S32); 0 on one device."""
        return 0 if self.guard is None else int(self.guard.mark(self.number, gradients))

    def check_marks(self, marks: torch.Tensor, mark: int, gradients: int) -> None:
        """Raise `PartedError` if the sum of the processes' marks shows that theirs differ."""
        if can_read_without_sync(marks.device) and marks.item() != mark * self.group.size():
            self.guard.refuse(self.number, gradients)

    def parts_by_name(self, named: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return what part of a parameter's local elements this process counts (1/n if n processes have them); empty if
        every process has all gradients."""
        if not self.several or self.engine.has_equal_gradients:
            return {}
        return {name: self.parts[id(p)] for name, p in named.items()}

    def all_reduce_vector(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of a float64 vector over the processes."""
        torch.distributed.all_reduce(vector, group=self.group)
        return vector

    def passes(self, parts: list[Any], count: int, *, narrow: bool) -> list[MicroBatchPass]:
        """Return the passes of a step (S8); gradients are reduced over the replicas after the last one.

        If each pass waits for the other processes, all run `count` passes.

        Args:
            parts: the micro-batches.
            count: the recipe's `accumulate_steps`.
            narrow: whether gradients are summed in float32 after each pass, as for 16-bit parameters; each pass is then
                reduced.
        """
        end = len(parts) - 1
        alike = self.several and (self.engine.needs_equal_passes or narrow)
        more = count - len(parts) if alike else 0
        if end == more == 0:
            return [MicroBatchPass(parts[0])]
        found = [MicroBatchPass(part, last=narrow or (number == end and not more)) for number, part in enumerate(parts)]
        return found + [MicroBatchPass(parts[0], counts=False, last=narrow or left == 1) for left in range(more, 0, -1)]

    def full_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss as a local tensor; under `loss_parallel` it is a sharded tensor."""
        sharded: Any = loss
        whole: torch.Tensor = loss if local_tensor_of(loss) is loss else sharded.full_tensor()
        return whole

    def fit_gradients(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise, after the last pass, if gradients were not reduced; redistribute them like their parameters."""
        self.engine.check_reduced(named)
        if self.sharded:
            from polyamp_torch.distributed.torch_only.sharded_tensors import redistribute_gradients

            redistribute_gradients(named)


SINGLE_DEVICE: Final = TorchReplicas(ParallelEngine(), {})


def find_replicas(model: nn.Module) -> TorchReplicas:
    """Return the processes that train a model together, after resharding its gathered parameters.

    Raises:
        UnsupportedError: polyamp does not support the engine.
    """
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    sharding = sys.modules.get("torch.distributed.fsdp")
    of_fsdp = [getattr(sharding, name, ()) for name in ("FSDPModule", "FullyShardedDataParallel")]
    is_wrapped = any(isinstance(part, (DistributedDataParallel, *of_fsdp)) for part in model.modules())
    if not is_wrapped and not (spread and any(isinstance(p, spread) for _, p in tree_parameters(model))):
        return SINGLE_DEVICE
    from polyamp_torch.distributed.torch_only import engine_detection  # imports torch's sharded tensors

    for part in engine_detection.fsdp_modules(model):
        part.reshard()
    path = path_function(model)
    named = {path(name): p for name, p in tree_parameters(model) if p.requires_grad}
    return TorchReplicas(engine_detection.detect_engine(model), named)


def compare_and_check_ranks(state: Any) -> None:
    """Compare the ranks' fingerprints at the end of `init` (S32), then check that the model can be trained.

    Raises:
        ReplicaError: ranks differ or are missing; the message names them, and the differences.
    """
    replicas = state.replicas
    if replicas.guard is None:
        check_replicas(state)
        return
    from polyamp.train.rank_fingerprint import state_fingerprint
    from polyamp_torch.distributed.torch_only.fingerprint import rank_fingerprint

    sections, part = rank_fingerprint(state.model, replicas.engine.name, replicas.modules)
    replicas.guard.inits += 1
    replicas.number = replicas.guard.inits
    of_ranks.compare_ranks(replicas.guard.board.group, replicas.guard.inits, state_fingerprint(state) | sections, part)
    check_replicas(state)


def check_replicas(state: Any) -> None:
    """Raise if the replicas of a model would diverge under its engine.

    Raises:
        ModelError: a trainable parameter is outside of the engine's modules.
        UnsupportedError: an engine option is not supported.
    """
    state.replicas.engine.check(state.parameters)


def guard_states(states: Sequence[Any], *, second: bool = False) -> contextlib.AbstractContextManager[None]:
    """Return the guard for one half of a step on some states; on one device it does nothing."""
    for state in states:
        guard = state.replicas.guard
        if guard is not None:
            found: contextlib.AbstractContextManager[None] = guard.second if second else guard
            return found
    return NULL_CONTEXT


def report_failed_init(model: Any, error: BaseException) -> None:
    """Report an error of `init` on this rank, so that the others do not wait for it."""
    if isinstance(error, ReplicaError):  # the store does not answer
        return
    try:
        guard = find_replicas(model).guard
    except PolyampError:  # the error of `init` itself, raised before the group was known
        groups = [part.process_group for part in model.modules() if isinstance(part, DistributedDataParallel)]
        guard = _group_guard(groups[0]) if groups and groups[0].size() > 1 else None
    except AttributeError:  # no model
        return
    if guard is not None:
        guard.inits += 1
        with contextlib.suppress(OSError):  # no rank can be reached; the original error is raised anyway
            of_ranks.report_init_error(guard.board.group, guard.inits, error)


def _group_guard(group: Any) -> Any:
    from polyamp_torch.distributed.torch_only.failure_guard import failure_guard_of_group

    return failure_guard_of_group(group)
