"""`Party`: one side of a comparison. It takes its weights from the first side, runs the phases, and writes what it saw.

`compare` makes two of them in one process; `worker` makes one in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.errors import ArgumentError, RecipeError, UnsupportedError
from polyamp.parity import draws
from polyamp.parity.aligned import Agreed, agreed, ways
from polyamp.parity.losses import against_noise
from polyamp.parity.observing import Observer, Observes
from polyamp.parity.own_loop import LoopTrainer, OwnLoop, RecipeTrainer, Trainer
from polyamp.parity.phases import POLICY, Phase, check_own_optimizer, recipe_of, settled_recipe
from polyamp.parity.report import Environment
from polyamp.parity.running import Batches, Meeting, Run, Write
from polyamp.parity.trace import Trace
from polyamp.porting.layouts.converter import Ports
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy
from polyamp.porting.port import values
from polyamp.porting.settled import settled
from polyamp.porting.side import Side
from polyamp.porting.states.canonical import Way
from polyamp.recipe.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


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
        for layer in self.inventory.layers:
            for leaf in layer.leaves.values():
                if leaf.trainable and leaf.array.dtype.kind == "c":  # distances are of real numbers
                    raise UnsupportedError(
                        f"{layer.path!r} has a complex parameter ({leaf.array.dtype}), which is trained (S1), and not "
                        "compared. Store it as a real one with a last axis of two: torch.view_as_complex(parameter) in "
                        "forward()."
                    )

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
            taken: which of several readings of its layers the other side told, where it did; `meet` refused what
                nothing told.
        """
        told = {way.path: way for way in taken}
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

        Args:
            phase: the phase.
            meeting: what this side knows of itself beside the first one.
            batches: number of a step, from 0 -> its batch.
            steps: how many; without a recipe one forward and backward pass is made, and no step.
            write: takes the entries.

        Raises:
            UnsupportedError: a float64 phase, and the framework or the model cannot.
        """
        began = time.perf_counter()
        loss_fn = against_noise(self.inventory) if self._loss_fn is None else self._loss_fn
        run = Run(self.inventory, self._observer, loss_fn, meeting, batches, write)
        with self._observer.working(self.model, wide=phase.wide, inference=self._loss_fn is None) as model:
            made = self._filled(model, meeting, phase)
            numbers = draws.Numbers() if self._shared else None
            with self._observer.still(made, None if numbers is None else numbers.laid(self.inventory)):
                trainer, trains = self._trainer(made, phase, loss_fn)
                micro = self.recipe is not None and self.recipe.accumulate_steps > 1
                try:
                    run.steps(trainer, steps if trains else 0, numbers, micro=micro)
                except Exception as error:
                    error.add_note(f"In a comparison: {self.label}, {phase.shown or phase.name}, step {run.at}.")
                    raise
        return Trace(
            side=self.label,
            phase=phase.name,
            operations=run.operations,
            unseen=run.unseen,
            seconds=time.perf_counter() - began - run.spent,
        )

    def _trainer(self, model: Any, phase: Phase, loss_fn: Any) -> tuple[Trainer, bool]:
        """What trains a copy of the model, and whether it does in this phase: a loop has one precision, its own."""
        if phase.looks:
            return RecipeTrainer(model, recipe_of(None, phase), loss_fn, self._options), False
        if isinstance(self._given_recipe, OwnLoop):
            recipe = recipe_of(self.recipe, phase)
            own = phase.name == POLICY or not self._given_recipe.recipe.policy.is_mixed
            if own:
                return LoopTrainer(model, self._given_recipe, recipe, self._options), True
            return RecipeTrainer(model, recipe, loss_fn, self._options), False
        recipe = recipe_of(settled_recipe(self._given_recipe, model), phase)
        return RecipeTrainer(model, recipe, loss_fn, self._options), self.recipe is not None

    def _filled(self, model: Any, meeting: Meeting, phase: Phase) -> Any:
        if meeting.leaves is None:
            return model
        leaves = meeting.leaves
        if phase.wide:
            import numpy as np

            leaves = {name: _widened(array, np.dtype(np.float64)) for name, array in leaves.items()}
        return self._converter.fill(model, leaves)


def _widened(array: Lazy, dtype: Any) -> Lazy:
    if array.dtype.kind != "f" and str(array.dtype) != "bfloat16":
        return array
    return Lazy(array.shape, dtype, lambda: array.read().astype(dtype))
