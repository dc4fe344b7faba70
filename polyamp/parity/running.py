"""`Run`: one phase of one side: steps are trained, looked at, and written to a trace. Called by `party`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from polyamp.parity import draws
from polyamp.parity.aligned import Agreed
from polyamp.parity.observing import Observer
from polyamp.parity.own_loop import Trainer
from polyamp.parity.sketch import sketch
from polyamp.parity.trace import BEFORE, Entry, Stage
from polyamp.porting.layouts.activations import applied
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.states import canonical as states
from polyamp.porting.states.canonical import Way
from polyamp.porting.states.sides import Training
from polyamp.porting.states.sides import side as state_side

if TYPE_CHECKING:
    import numpy as np

    from polyamp.results import LossFunction

    Array = np.ndarray[Any, Any]

Write = Callable[[Entry], None]
Batches = Callable[[int], Any]
"""Number of a step, from 0 -> its batch, NumPy."""


class Meeting(NamedTuple):
    """What a side knows of itself beside the first one.

    Attributes:
        agreed: what both know.
        ways: how its arrays lead to canonical ones under the first side's names.
        leaves: the values that it gets from the first side, by its own names; None of the first side itself.
    """

    agreed: Sequence[Agreed]
    ways: Sequence[Way]
    leaves: Mapping[str, Lazy] | None


class Run:
    """One phase of one side."""

    def __init__(
        self,
        inventory: Inventory,
        observer: Observer,
        loss_fn: LossFunction,
        meeting: Meeting,
        batches: Batches,
        write: Write,
    ) -> None:
        self._observer, self._loss_fn, self._meeting = observer, loss_fn, meeting
        self._batches, self._write = batches, write
        self._first = meeting.leaves is None
        own = meeting.agreed[0] if not self._first else None
        self._modules = None if own is None else own.modules
        self._applied = {} if own is None else own.applied
        self._behind: dict[str, str] = {}
        for each in meeting.agreed if self._first else ():
            self._behind |= each.behind
        self._blind = set() if own is None else {own.modules[path] for path in own.applied} | set(own.behind)
        self._rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0
        self._turned = {path for each in meeting.agreed for path in each.turned}
        self.operations: list[Any] = []
        self.at = 0
        self.unseen = ""
        self.spent = 0.0

    def steps(self, trainer: Trainer, steps: int, numbers: draws.Numbers | None, *, micro: bool) -> None:
        """Every step: a look at it, the step itself, and what it left.

        Args:
            trainer: what trains the side's model.
            steps: how many; 0 for a look alone.
            numbers: what random numbers are made of where both sides share them.
            micro: whether a list is a batch of micro-batches, of which the first is looked at.
        """
        self._update(trainer.training, 0)
        for number in range(max(steps, 1)):
            self.at = number + 1
            batch = self._batches(number)
            if numbers is not None:
                numbers.again()
            self._look(trainer.state, batch[0] if micro and isinstance(batch, list) else batch, number + 1)
            if not steps:
                return
            if numbers is not None:
                numbers.again()
            reported = trainer.step(batch)
            for name, value in reported.items():
                self._number(number + 1, "step", name, value)
            self._update(trainer.training, number + 1)

    def _look(self, state: Any, batch: Any, step: int) -> None:
        def see(path: str, what: str, array: Array, dtype: str) -> None:
            with self._aside():
                self._seen(path, what, array, dtype, step)

        watched = self._observer.watch(state, self._loss_fn, batch, see)
        with self._aside():
            self._number(step, "forward", "loss", watched.loss)
            self._gradients(watched.gradients, step)
            if step == 1:
                self.operations = self._named(watched.operations)
                self.unseen = watched.unseen

    def _seen(self, path: str, what: str, array: Array, dtype: str, step: int) -> None:
        name, mark, count = path.partition("#")
        module = name if self._modules is None else self._modules.get(name)
        if module is None:
            return
        stage: Stage = "backward" if what == "cotangent" else "forward"
        if (what == "cotangent" and module in self._blind) or (what == "input" and module in self._turned):
            return
        common = _laid(array, self._rank)
        if what == "output" and name in self._applied:
            self._array(step, stage, module + mark + count, BEFORE, "", common, dtype, path)
            behind = applied(self._applied[name], common)
            if behind is None:
                return
            common = behind.astype(common.dtype)
        self._array(step, stage, module + mark + count, what, "", common, dtype, path)
        if what == "output" and name in self._behind:
            behind = applied(self._behind[name], common)
            if behind is not None:
                out = behind.astype(common.dtype)
                self._array(step, stage, module + mark + count, f"output, {self._behind[name]}", "", out, dtype, path)

    def _gradients(self, gradients: Mapping[str, Array | None], step: int) -> None:
        for way in reversed(self._meeting.ways):
            for name, array in canonical_gradients(way, gradients).items():
                read = array.read()
                self._array(step, "backward", way.path, "gradient", name, read, str(read.dtype), way.layer.path)

    def _update(self, training: Any, step: int) -> None:
        with self._aside():
            own = state_side(training, target=False)
            if step and isinstance(training, Training):
                if "loss_scale/scale" in own.arrays:
                    self._number(step, "step", "scale", float(own.arrays["loss_scale/scale"]))
                if training.step is None and own.step is not None:  # else it says what it said at first
                    self._number(step, "step", "applied", float(own.step))
            for way in self._meeting.ways:
                found = states.canonical(own, [way._replace(order=None)])
                trained = _trained(way)
                for slot, arrays in found.slots.items() if step else ():
                    self._put(step, way, slot, arrays)
                self._put(step, way, "parameter", {k: v for k, v in found.parameters.items() if _name(k) in trained})
                rest = {k: v for k, v in found.parameters.items() if _name(k) not in trained}
                self._put(step, way, "statistic", rest)

    def _put(self, step: int, way: Way, what: str, arrays: Mapping[str, Lazy]) -> None:
        for name, array in _in_order(way, {_name(key): array for key, array in arrays.items()}).items():
            read = array.read()
            self._array(step, "update", way.path, what, name, read, str(read.dtype), way.layer.path)

    def _array(
        self, step: int, stage: Stage, module: str, what: str, name: str, array: Array, dtype: str, own: str
    ) -> None:
        entry = Entry(step=step, stage=stage, module=module, what=what, name=name, sketch=sketch(array, dtype), own=own)
        self._write(entry)

    def _number(self, step: int, stage: Stage, what: str, number: float) -> None:
        self._write(Entry(step=step, stage=stage, module="", what=what, number=number))

    def _named(self, operations: Sequence[Any]) -> list[Any]:
        if self._modules is None:
            return list(operations)
        return [
            row._replace(module=self._modules.get(row.module, _nearest(row.module, self._modules)))
            for row in operations
        ]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A block whose time is the comparison's and not the model's."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began


def canonical_gradients(way: Way, gradients: Mapping[str, Array | None]) -> dict[str, Lazy]:
    """The gradients of a layer's arrays in canonical layout, under the names of its canonical arrays.

    What is not trained, is tied to another array, or has no gradient is left out.
    """
    found: dict[str, Lazy] = {}
    for rule in way.form.rules:
        held: dict[str, Lazy] = {}
        for name in rule.native:
            leaf = way.layer.leaves[name]
            values_ = gradients.get(leaf.name) if leaf.trainable and leaf.tied is None else None
            if values_ is not None:
                held[name] = Lazy.of(values_)
        if len(held) < len(rule.native):
            continue
        made = dataclasses.replace(way.form, rules=(rule,)).arrays(held, gradients=True)
        if any(getattr(operation, "absent", ()) for operation in rule.operations):
            made = {rule.canonical[0]: made[rule.canonical[0]]}  # what a framework lacks has no gradient there
        found.update(made)
    return _in_order(way, found)


def _in_order(way: Way, arrays: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The arrays of a layer beside a flatten, as the first side has them."""
    if way.order is None or (way.order.rows and "kernel" not in arrays) or not arrays:
        return dict(arrays)
    return way.order.apply(arrays, back=True)


def _trained(way: Way) -> set[str]:
    return {
        name
        for rule in way.form.rules
        if all(way.layer.leaves[native].trainable for native in rule.native)
        for name in rule.canonical
    }


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _nearest(path: str, modules: Mapping[str, str]) -> str:
    """The first side's name of the innermost known module around one that has no partner."""
    while path and path not in modules:
        path = path.rpartition("/")[0]
    return modules.get(path, "")


def _laid(array: Array, rank: int) -> Array:
    """An output with its channels last, if it has the rank of an image."""
    import numpy as np

    return np.moveaxis(array, 1, -1) if rank and array.ndim == rank else array
