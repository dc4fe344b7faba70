"""`Party`: one side of a comparison. It takes its weights from the first side, runs the phases, and writes what it saw.

`compare` makes two of them in one process; `worker` makes one in a process of its own.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.errors import ArgumentError, PortError, RecipeError, UnsupportedError
from polyamp.parity import draws
from polyamp.parity.aligned import Agreed, agreed, ways
from polyamp.parity.losses import against_noise
from polyamp.parity.observing import Observer, Observes
from polyamp.parity.phases import (
    FLOAT32,
    FLOAT64,
    Phase,
    check_own_optimizer,
    recipe_of,
    settled_recipe,
)
from polyamp.parity.report import Environment
from polyamp.parity.sketch import sketch
from polyamp.parity.trace import Entry, Stage, Trace
from polyamp.porting.layouts.activations import applied
from polyamp.porting.layouts.converter import Ports
from polyamp.porting.layouts.inventory import Inventory, NativeLayer
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.port import values
from polyamp.porting.settled import settled
from polyamp.porting.side import Side
from polyamp.porting.states import canonical as states
from polyamp.porting.states.canonical import Way
from polyamp.porting.states.sides import side as state_side
from polyamp.recipe.recipe import Recipe
from polyamp.train.step import init, train_step

if TYPE_CHECKING:
    import numpy as np

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


class Party:
    """One side.

    Args:
        label: what reports call it.
        model: as `polyamp.init` takes it.
        loss_fn: the loss; None for outputs against fixed random numbers.
        recipe: a recipe, a function of the model that makes one, or None for a forward and backward pass in float32.
        inputs: inputs of the model, where layers are known by their names alone (linen, haiku, plain functions).
        options: `{"init": {...}, "step": {...}}`, what `polyamp.init` and `polyamp.train_step` are given beyond.
        randomness: "off" or "shared".
    """

    def __init__(
        self,
        label: str,
        model: Any,
        loss_fn: Any = None,
        recipe: Any = None,
        *,
        inputs: Any = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        randomness: str = "off",
    ) -> None:
        self.label: Final = label
        self.model: Final = model
        self.backend: Final[Backend] = registry.backend_for(model)
        self._given_recipe: Final = recipe
        self.recipe: Final[Recipe | None] = settled_recipe(recipe, model)
        self._loss_fn: Final = loss_fn
        self._options: Final = {"init": {}, "step": {}, **(options or {})}
        self._shared: Final = randomness == "shared"
        if not isinstance(self.backend, Ports) or not isinstance(self.backend, Observes):
            raise UnsupportedError(
                f"the {self.backend.name} backend of this version cannot be watched (`observer`: "
                "polyamp.parity.observing.Observes), so that its models cannot be compared."
            )
        self._converter: Final = self.backend.porting
        self._observer: Final[Observer] = self.backend.observer
        check_own_optimizer(recipe, in_place=self._converter.in_place)
        if recipe is not None and loss_fn is None:
            raise ArgumentError(
                "loss_fn must be given where there is a recipe: a training step needs the loss that it trains. "
                "Received: loss_fn=None."
            )
        if self._shared and self.recipe is not None and self.recipe.accumulate_steps > 1:
            raise RecipeError(
                "randomness='shared' gives both sides the same masks, which frameworks draw in other orders where a "
                "step has several micro-batches. Received: a recipe with accumulate_steps="
                f"{self.recipe.accumulate_steps}. Use randomness='off'."
            )
        self.inventory: Final[Inventory] = self._converter.inventory(model, inputs)

    @property
    def side(self) -> Side:
        """As `polyamp.port` takes it."""
        return Side(self.inventory, self._converter, self.model)

    def environment(self) -> Environment:
        """Where it runs."""
        info = self.backend.info()
        kind = type(self.model[0] if isinstance(self.model, tuple) and self.model else self.model)
        return Environment(
            side=self.label,
            backend=self.backend.name,
            versions={info.framework: str(info.version), "polyamp": __version__},
            device=info.devices[0],
            model=f"{kind.__module__}.{kind.__qualname__}",
            parameters=self.parameters,
        )

    @property
    def parameters(self) -> int:
        """How many trained values it has."""
        leaves = (leaf for layer in self.inventory.layers for leaf in layer.leaves.values())
        return sum(leaf.array.size for leaf in leaves if leaf.trainable and leaf.tied is None)

    def first(self, others: Sequence[Agreed], taken: Sequence[Way] = ()) -> Meeting:
        """As the first side.

        Args:
            others: what it agreed on with each other side.
            taken: which of several readings of its layers the other side told, where it did.

        Raises:
            PortError: what some layers are is known by neither.
        """
        told = {way.path: way for way in taken}
        unknown = [layer.path for layer in self.inventory.layers if len(layer.forms) > 1 and layer.path not in told]
        if unknown:
            raise PortError(
                f"what these layers are cannot be told from names and shapes: {', '.join(unknown[:5])}. Give inputs=, "
                "what the model itself takes, so that a call of it shows that."
            )
        rest = [Way(layer.path, layer, layer.forms[0]) for layer in self.inventory.layers if layer.path not in told]
        return Meeting(others, [*told.values(), *rest], None)

    def meet(self, source: Inventory, names: Mapping[str, str] | None = None) -> tuple[Meeting, list[Way]]:
        """As another side: matched with the first one.

        Returns:
            What it knows, and the ways of the first side's arrays.

        Raises:
            PortError: the models do not fit each other.
        """
        way = settled(source, self.inventory, names, strict=True)
        leaves, _ = values(way, self.inventory, strict=False)
        found = ways(way)
        return Meeting([agreed(way)], found.second, leaves), found.first

    def run(self, phase: Phase, meeting: Meeting, batches: Batches, steps: int, write: Write) -> Trace:
        """Train a copy in one phase, and write what every step makes.

        Raises:
            UnsupportedError: a float64 phase, and the framework or the model cannot.
        """
        began = time.perf_counter()
        run = _Run(self, phase, meeting, batches, write)
        with self._observer.working(self.model, wide=phase.wide) as model:
            made = self._filled(model, meeting, phase)
            numbers = draws.Numbers() if self._shared else None
            given = None if numbers is None else numbers.laid(self.inventory)
            with self._observer.still(made, given):
                run.steps(made, steps, numbers)
        return Trace(
            side=self.label,
            phase=phase.name,
            operations=run.operations,
            unseen=run.unseen,
            seconds=time.perf_counter() - began - run.spent,
        )

    def recipe_for(self, phase: Phase, model: Any) -> Recipe:
        """The recipe that a copy of the model is trained with in a phase."""
        return recipe_of(settled_recipe(self._given_recipe, model), phase)

    def loss_for(self) -> Any:
        """The loss."""
        return against_noise(self.inventory) if self._loss_fn is None else self._loss_fn

    @property
    def options(self) -> Mapping[str, Mapping[str, Any]]:
        """What `init` and `train_step` are given."""
        return self._options

    @property
    def observer(self) -> Observer:
        """What watches its framework."""
        return self._observer

    def _filled(self, model: Any, meeting: Meeting, phase: Phase) -> Any:
        if meeting.leaves is None:
            return model
        leaves = meeting.leaves
        if phase.wide:
            import numpy as np

            leaves = {name: _widened(array, np.dtype(np.float64)) for name, array in leaves.items()}
        return self._converter.fill(model, leaves)


class _Run:
    """One phase of one side."""

    def __init__(self, party: Party, phase: Phase, meeting: Meeting, batches: Batches, write: Write) -> None:
        self._party, self._phase, self._meeting = party, phase, meeting
        self._batches, self._write = batches, write
        self._first = meeting.leaves is None
        own = meeting.agreed[0] if not self._first else None
        self._modules = None if own is None else own.modules
        self._applied = {} if own is None else own.applied
        self._behind: dict[str, str] = {}
        for each in meeting.agreed if self._first else ():
            self._behind |= each.behind
        self._blind = set() if own is None else {own.modules[path] for path in own.applied} | set(own.behind)
        inventory = party.inventory
        self._rank = inventory.spatial + 2 if inventory.spatial and inventory.channels == "first" else 0
        self.operations: list[Any] = []
        self.unseen = ""
        self.spent = 0.0

    def steps(self, model: Any, steps: int, numbers: draws.Numbers | None) -> None:
        """Every step: a look at it, the step itself, and what it left."""
        party = self._party
        recipe = party.recipe_for(self._phase, model)
        loss_fn = party.loss_for()
        state = init(model, recipe, **party.options["init"])
        train = train_step(loss_fn, recipe, **party.options["step"]) if party.recipe is not None else None
        self._update(state, 0)
        for number in range(steps if train is not None else 1):
            batch = self._batches(number)
            looked = batch[0] if isinstance(batch, list) and recipe.accumulate_steps > 1 else batch
            if numbers is not None:
                numbers.again()
            self._look(state, loss_fn, looked, number + 1)
            if train is None:
                return
            if numbers is not None:
                numbers.again()
            state, result = train(state, batch)
            self._report(state.backend, result, number + 1)
            self._update(state, number + 1)

    def _look(self, state: Any, loss_fn: Any, batch: Any, step: int) -> None:
        def see(path: str, what: str, array: Array, dtype: str) -> None:
            with self._aside():
                self._seen(path, what, array, dtype, step)

        watched = self._party.observer.watch(state, loss_fn, batch, see)
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
        stage: Stage = "forward" if what == "output" else "backward"
        if what == "cotangent" and module in self._blind:
            return
        common = _laid(array, self._rank)
        if what == "output" and name in self._applied:
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

    def _report(self, backend: Backend, result: Any, step: int) -> None:
        numbers = {name: backend.to_numpy(getattr(result, name)) for name in ("loss", "grad_norm", "scale", "skipped")}
        for name in ("loss", "grad_norm"):
            self._number(step, "step", name, float(numbers[name]))
        self._number(step, "step", "finite", float(not numbers["skipped"]))
        self._number(step, "step", "scale", float(numbers["scale"]))
        self._number(step, "step", "applied", float(backend.to_numpy(result.step)))

    def _update(self, state: Any, step: int) -> None:
        with self._aside():
            own = state_side(state, target=False)
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


def _widened(array: Lazy, dtype: Any) -> Lazy:
    if array.dtype.kind != "f" and str(array.dtype) != "bfloat16":
        return array
    return Lazy(array.shape, dtype, lambda: array.read().astype(dtype))


__all__ = ["FLOAT32", "FLOAT64", "Meeting", "NativeLayer", "Party"]
