"""`ReplicaFigures`: what a `LossScaleOptimizer` collects in `fit` for a monitor, on a strategy's replicas (S35)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from polyamp.monitor.slots import SlotFunctions
from polyamp_keras.own_loop.fit_figures import FitFigures
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.distributed.all_reduce import all_reduce_sum
from polyamp_tensorflow.step.monitor_slots import TensorFlowSlots


class ReplicaFigures(FitFigures):
    """Figures of the last update that was traced with them; made in the scope of the model's strategy."""

    functions: ClassVar[SlotFunctions] = TensorFlowSlots()

    def sum_over_replicas(self, loss: Any) -> Any:
        """Return the sum of a loss over the replicas."""
        (total,) = all_reduce_sum([loss])
        return total

    def write(self, values: Mapping[str, Any], completes: Any) -> None:
        """Write the figures of all replicas, which are equal."""
        replicas.merge_replica_calls(self._write, (dict(values), completes))

    def assign(self, values: Mapping[str, Any]) -> None:
        """Assign values of all replicas to variables by name."""
        super().assign({name: replicas.read_shared(value) for name, value in values.items()})

    def assign_if(self, flag: Any, values: Mapping[str, Any]) -> None:
        """Assign values to variables by name under a condition, which all replicas share."""
        if flag is None:
            self.assign(values)
        else:
            tf.cond(replicas.read_shared(flag), lambda: self.assign(values), lambda: None)

    def _write(self, _: replicas.ReplicaRun, found: tuple[Mapping[str, Any], Any]) -> None:
        super().write(*found)
