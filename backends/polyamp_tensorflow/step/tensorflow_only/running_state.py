"""Values of the variables that a forward pass writes, before and after it, and their restoration (S12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.parameter_writes import ForwardWriteTracker, ParameterWrite
from polyamp_tensorflow.step.state import TensorFlowState


class RunningState:
    """Variables of one state that a forward pass writes, recorded from before the pass.

    Args:
        state: the state.
    """

    def __init__(self, state: TensorFlowState) -> None:
        self.state = state
        self._rng = state.read_rng()
        self._statistics = state.read_statistics()
        self._tracker = ForwardWriteTracker(state.variables, state.eager_reads, state.compute_dtypes)
        self._writes: dict[str, ParameterWrite] = {}

    def find_writes(self) -> None:
        """Find the parameters that the pass wrote; `values_before` includes them from then on."""
        self._writes = self._tracker.found()

    def values_before(self, *, with_rng: bool) -> dict[str, Any]:
        """Return the values before the pass, those of the random streams only if `with_rng`."""
        written = {name: each.before for name, each in self._writes.items()}
        return {**self._statistics, **(self._rng if with_rng else {}), **written}

    def values_after(self) -> dict[str, Any]:
        """Return the values after the pass, which take effect if the update is applied; without the random streams."""
        self.find_writes()
        return {**self.state.read_statistics(), **{name: each.after for name, each in self._writes.items()}}


def restore_running_states(running: Sequence[RunningState], *, with_rng: bool) -> None:
    """Write the values from before the pass. Call it in a replica."""

    def write(_: replicas.ReplicaRun, values: list[dict[str, Any]]) -> None:
        for each, before in zip(running, values, strict=True):
            each.state.restore_running_state(before)

    replicas.merge_replica_calls(write, [each.values_before(with_rng=with_rng) for each in running])
