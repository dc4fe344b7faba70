"""`TraceRecorder`, which trains and records one phase of one side, and `SharedRandomNumbers` for its dropout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from polyamp.parity.trace.observer import DropoutCount, Observer, UniformSource
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import BEFORE_ACTIVATION, Entry, Stage
from polyamp.parity.trainers import SCALE, Trainer
from polyamp.parity.verdict.alignment import Alignment, nearest_module
from polyamp.porting.check import Batch, ChannelOrderAdapter
from polyamp.porting.layouts.activations import apply_activation
from polyamp.porting.layouts.inventory import Inventory, canonical_gradients
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.states.training_side import Training
from polyamp.porting.states.training_side import make_training_side as state_side
from polyamp.porting.states.training_state import (
    ArrayMapping,
    canonical_averages,
    canonical_parameters,
    canonical_slot,
)
from polyamp.results import LossFunction

Array = np.ndarray[Any, Any]
EntrySink = Callable[[Entry], None]
BatchSource = Callable[[int], Any]
"""Number of a step, from 0 -> its batch of NumPy arrays."""


class SharedRandomNumbers:
    """Uniform numbers of [0, 1) that depend only on the sequence of calls and their shapes.

    They are the same in every pass, because a compiled program draws only when it is traced, and an eager one in each
    pass.

    Example:
        >>> numbers = SharedRandomNumbers()
        >>> one = numbers.next((2, 3))
        >>> numbers.restart()
        >>> bool((numbers.next((2, 3)) == one).all())
        True
    """

    def __init__(self) -> None:
        self._count = 0

    def restart(self) -> None:
        """Start again from the first number, for a new pass."""
        self._count = 0

    def next(self, shape: tuple[int, ...]) -> Array:
        """Return the next numbers, float32."""
        self._count += 1
        return np.random.default_rng([self._count, *shape]).random(shape, np.float32)

    def uniform_source(self, inventory: Inventory) -> UniformSource:
        """Return `next` as a source for a side with the channel order of its inventory."""
        rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0

        def draws(shape: tuple[int, ...]) -> Array:
            if not rank or len(shape) != rank:
                return self.next(tuple(shape))
            return np.ascontiguousarray(np.moveaxis(self.next((shape[0], *shape[2:], shape[1])), -1, 1))

        return draws


class ParticipantAlignment(NamedTuple):
    """Alignment of a side with the first one.

    Attributes:
        alignments: the alignment that both sides use; of the first side, those with all others.
        mappings: mappings from its arrays to canonical ones under the first side's names.
        weights: the values that it gets from the first side, by its own names; None for the first side itself.
    """

    alignments: Sequence[Alignment]
    mappings: Sequence[ArrayMapping]
    weights: Mapping[str, Lazy] | None


def side_batch(batch: Any, adapter: ChannelOrderAdapter | None) -> Any:
    """Return a side's part of a batch.

    Args:
        batch: a batch in the layout of the first side, or a `porting.Batch`.
        adapter: converts images to the layout of the side; None for the first side.
    """
    if not isinstance(batch, Batch):
        return batch if adapter is None else adapter.tree(batch)
    if adapter is None:
        return batch.source
    return adapter.tree(batch.source) if batch.target is None else batch.target


class TraceRecorder:
    """Recorder of one phase of one side.

    Attributes:
        operations, hidden_reason: of the first pass.
        step_number: the current step, from 1.
        overhead_seconds: time that recording took.
        dropout: count of the calls of dropout that are turned off; None where they are not.
        dropouts: of these, those of the first pass.
    """

    def __init__(
        self,
        inventory: Inventory,
        observer: Observer,
        loss_fn: LossFunction,
        alignment: ParticipantAlignment,
        batches: BatchSource,
        write: EntrySink,
    ) -> None:
        self._inventory, self._observer, self._loss_fn = inventory, observer, loss_fn
        self._mappings = alignment.mappings
        self._trainable = {each.path: _trainable_names(each) for each in alignment.mappings}
        self._batches, self._write = batches, write
        is_first = alignment.weights is None
        own = None if is_first else alignment.alignments[0]
        self._modules = None if own is None else own.modules
        self._own_activations = {} if own is None else own.activations_after_second
        self._activations_after: dict[str, str] = {}
        for each in alignment.alignments if is_first else ():
            self._activations_after |= each.activations_after_first
        self._cotangent_exclusions = (
            set()
            if own is None
            else {own.modules[path] for path in own.activations_after_second} | set(own.activations_after_first)
        )
        self._rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0
        self._flatten_dense_layers = {path for each in alignment.alignments for path in each.reordered}
        self._column_orders = {
            each.path: each.order for each in alignment.mappings if each.order is not None and each.order.columns
        }
        self.operations: list[Any] = []
        self.step_number = 0
        self.hidden_reason = ""
        self.overhead_seconds = 0.0
        self.dropout: DropoutCount | None = None
        self.dropouts: int | None = None

    def steps(
        self, trainer: Trainer, steps: int, numbers: SharedRandomNumbers | None, pass_batch: Callable[[Any], Any]
    ) -> None:
        """Run every step and record its pass, its metrics and its update.

        Args:
            trainer: trainer of the side's model.
            steps: number of steps; 0 records one pass without a step.
            numbers: source of random numbers where both sides share them.
            pass_batch: returns what is recorded of a step's batch.
        """
        self._record_update(trainer.training, 0)
        for number in range(max(steps, 1)):
            self.step_number = number + 1
            batch = self._batches(number)
            if numbers is not None:
                numbers.restart()
            self._record_pass(trainer.state, pass_batch(batch), number + 1)
            if not steps:
                return
            if numbers is not None:
                numbers.restart()
            reported = trainer.step(batch)
            for name, value in reported.items():
                self._record_number(number + 1, "step", name, value)
            self._record_update(trainer.training, number + 1)

    def _record_pass(self, state: Any, batch: Any, step: int) -> None:
        def on_capture(path: str, what: str, array: Array, dtype: str) -> None:
            with self._measure_overhead():
                self._record_activation(path, what, array, dtype, step)

        before = self.dropout.calls if self.dropout is not None else None
        record = self._observer.capture_pass(state, self._loss_fn, batch, on_capture)
        after = self.dropout.calls if self.dropout is not None else None
        with self._measure_overhead():
            self._record_number(step, "forward", "loss", record.loss)
            self._record_gradients(record.gradients, step)
            if step == 1:
                self.operations = self._rename_modules(record.operations)
                self.hidden_reason = record.hidden_reason
                self.dropouts = None if before is None or after is None else after - before

    def _record_activation(self, path: str, what: str, array: Array, dtype: str, step: int) -> None:
        name, mark, count = path.partition("#")
        module = name if self._modules is None else self._modules.get(name)
        if module is None:
            return
        stage: Stage = "backward" if what == "cotangent" else "forward"
        if (what == "cotangent" and module in self._cotangent_exclusions) or (
            what == "input" and module in self._flatten_dense_layers
        ):
            return
        common = _channels_last(array, self._rank)
        if module in self._column_orders:  # a dense layer before a reshape
            common = self._column_orders[module].restore_output(common)
        if what == "output" and name in self._own_activations:
            self._record_array(step, stage, module + mark + count, BEFORE_ACTIVATION, "", common, dtype, path)
            activated = apply_activation(self._own_activations[name], common)
            if activated is None:
                return
            common = activated.astype(common.dtype)
        self._record_array(step, stage, module + mark + count, what, "", common, dtype, path)
        if what == "output" and name in self._activations_after:
            activation = self._activations_after[name]
            activated = apply_activation(activation, common)
            if activated is not None:
                after = activated.astype(common.dtype)
                self._record_array(step, stage, module + mark + count, f"output, {activation}", "", after, dtype, path)

    def _record_gradients(self, gradients: Mapping[str, Array | None], step: int) -> None:
        for mapping in reversed(self._mappings):
            self._record_arrays(
                step, "backward", mapping, "gradient", canonical_gradients(mapping.layer, mapping.form, gradients)
            )

    def _record_update(self, training: Any, step: int) -> None:
        with self._measure_overhead():
            own = state_side(training, target=False, inventory=self._inventory)
            if step and isinstance(training, Training):
                if SCALE in own.arrays:
                    self._record_number(step, "step", "scale", float(own.arrays[SCALE]))
                if training.step is None and own.step is not None:  # else it still has the initial value
                    self._record_number(step, "step", "applied", float(own.step))
            for mapping in self._mappings:
                for slot in own.optimizer.slots if step else ():
                    self._record_arrays(step, "update", mapping, slot, canonical_slot(own, slot, mapping))
                trainable, parameters = self._trainable[mapping.path], canonical_parameters(own, mapping)
                for what, is_trained in (("parameter", True), ("statistic", False)):
                    chosen = {name: array for name, array in parameters.items() if (name in trainable) is is_trained}
                    self._record_arrays(step, "update", mapping, what, chosen)
                if step:
                    self._record_arrays(step, "update", mapping, "average", canonical_averages(own, mapping))

    def _record_arrays(
        self, step: int, stage: Stage, mapping: ArrayMapping, what: str, arrays: Mapping[str, Lazy]
    ) -> None:
        for name, array in (arrays if mapping.order is None else mapping.order.apply(arrays, back=True)).items():
            values = array.read()
            self._record_array(step, stage, mapping.path, what, name, values, str(values.dtype), mapping.layer.path)

    def _record_array(
        self, step: int, stage: Stage, module: str, what: str, name: str, array: Array, dtype: str, own: str
    ) -> None:
        entry = Entry(step=step, stage=stage, module=module, what=what, name=name, sketch=sketch(array, dtype), own=own)
        self._write(entry)

    def _record_number(self, step: int, stage: Stage, what: str, number: float) -> None:
        self._write(Entry(step=step, stage=stage, module="", what=what, number=number))

    def _rename_modules(self, operations: Sequence[Any]) -> list[Any]:
        if self._modules is None:
            return list(operations)
        return [
            row._replace(module=self._modules.get(nearest_module(row.module, self._modules), "")) for row in operations
        ]

    @contextmanager
    def _measure_overhead(self) -> Iterator[None]:
        """Count the time of a block as overhead of the comparison."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.overhead_seconds += time.perf_counter() - began


def _trainable_names(mapping: ArrayMapping) -> set[str]:
    return {
        name
        for rule in mapping.form.rules
        if all(mapping.layer.leaves[native].trainable for native in rule.native)
        for name in rule.canonical
    }


def _channels_last(array: Array, rank: int) -> Array:
    """Return an output with its channels last, if it has the rank of an image."""
    return np.moveaxis(array, 1, -1) if rank and array.ndim == rank else array
