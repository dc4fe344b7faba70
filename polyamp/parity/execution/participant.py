"""`Participant`: one side of a parity run, which copies the first side's weights and records a trace of every phase."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from polyamp._version import __version__
from polyamp.contract import registry
from polyamp.contract.backend import Backend
from polyamp.errors import ArgumentError, PortError, RecipeError, UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.parity.execution.default_loss import random_target_loss
from polyamp.parity.execution.row_orders import MAX_SAMPLES, likeliest_orders, settle_orders
from polyamp.parity.execution.trace_recorder import (
    BatchSource,
    EntrySink,
    ParticipantAlignment,
    SharedRandomNumbers,
    TraceRecorder,
)
from polyamp.parity.precisions import (
    FLOAT32,
    POLICY,
    Phase,
    check_native_optimizer,
    phase_recipe,
    resolve_recipe,
    without_judge,
)
from polyamp.parity.report_data import Environment
from polyamp.parity.trace.observer import DropoutCount, HasObserver, Observer, without_policies
from polyamp.parity.trace.operation_log import OperationLog, OperationObserver, OperationRecorder, PassLocation
from polyamp.parity.trace.trace import Trace, TraceWriter
from polyamp.parity.trainers import LoopTrainer, OwnLoop, RecipeTrainer, Trainer
from polyamp.parity.verdict.alignment import Alignment, align, array_mappings
from polyamp.porting.layouts.converter import Evaluation, HasConverter
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.layer_kinds import find_kind
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.matching.flatten_order import Rows
from polyamp.porting.model_side import ModelSide, find_converter
from polyamp.porting.port_errors import PARTIAL_PORT_HINT
from polyamp.porting.states.training_state import ArrayMapping
from polyamp.porting.transfer_plan import TransferPlan, make_transfer_plan, new_leaf_values
from polyamp.recipe.recipe import Recipe

Array = np.ndarray[Any, Any]


_EVERY_LAYER: Final = "A comparison needs a partner for each of them: names={source: target} says which it is."


class FirstPass(NamedTuple):
    """What a side's modules took in its first pass.

    Attributes:
        evaluation: of the first samples; None if the pass failed.
        failure: why there is none.
    """

    evaluation: Evaluation | None
    failure: str = ""


class _TrainingCopy(NamedTuple):
    """A copy of a model in training.

    Attributes:
        trainer: its trainer.
        trains: whether it trains, or only runs passes.
        numbers: source of the random numbers that all sides share; None where dropout is off.
        dropout: count of the calls of dropout that are turned off; None where they are not.
    """

    trainer: Trainer
    trains: bool
    numbers: SharedRandomNumbers | None
    dropout: DropoutCount | None


class _FirstPassError(Exception):
    """A pass of the second side that failed."""


class Participant:
    """One side of a parity run.

    Args:
        label: name in reports.
        model: as `polyamp.init` takes it.
        loss_fn: the loss; None compares the outputs with fixed random numbers.
        recipe: a recipe, a function of the model that makes one, or None for a forward and backward pass in float32.
        inputs: inputs of the model, where layers are identified by name only (linen, haiku, plain functions).
        options: `{"init": {...}, "step": {...}}`, further arguments of `polyamp.init` and `polyamp.train_step`.
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
        self._recipe_argument: Final = recipe
        self.recipe: Final[Recipe | None] = resolve_recipe(recipe, model)
        self._loss_fn: Final = loss_fn
        self._options: Final = {"init": {}, "step": {}, **(options or {})}
        self._has_shared_randomness: Final = randomness == "shared"
        if not isinstance(self.backend, HasConverter) or not isinstance(self.backend, HasObserver):
            raise UnsupportedError(
                f"the {self.backend.name} backend of this version cannot be watched (`observer`: "
                "polyamp.parity.trace.observer.HasObserver), so that its models cannot be compared."
            )
        self._converter: Final = find_converter(model, "compare")
        self._observer: Final[Observer] = self.backend.observer
        check_native_optimizer(recipe, in_place=self._converter.in_place)
        if recipe is not None and loss_fn is None:
            raise ArgumentError(
                "loss_fn must be given where there is a recipe: a training step needs the loss that it trains. "
                "Received: loss_fn=None."
            )
        if self._has_shared_randomness and self.recipe is not None and self.recipe.accumulate_steps > 1:
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
    def side(self) -> ModelSide:
        """The side as `polyamp.port` takes it."""
        return ModelSide(self.inventory, self._converter, self.model)

    def environment(self) -> Environment:
        """Return the environment in which it runs."""
        info = self.backend.info()
        kind = type(self.model[0] if isinstance(self.model, tuple) and self.model else self.model)
        return Environment(
            side=self.label,
            backend=self.backend.name,
            versions={info.framework: str(info.version), "polyamp": __version__},
            device=self._observer.device(self.model),
            model=f"{kind.__module__}.{kind.__qualname__}",
            parameters=self.parameters,
        )

    @property
    def may_flatten(self) -> bool:
        """Whether a dense layer may take flattened channels."""
        kinds = {form.kind for layer in self.inventory.layers for form in layer.forms}
        return "dense" in kinds and any(find_kind(kind).is_convolution for kind in kinds)

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        leaves = (leaf for layer in self.inventory.layers for leaf in layer.leaves.values())
        return sum(leaf.array.size for leaf in leaves if leaf.trainable and leaf.tied is None)

    def align_as_first(
        self, alignments: Sequence[Alignment], mappings: Sequence[ArrayMapping] = ()
    ) -> ParticipantAlignment:
        """Return the alignment of this side as the first side.

        Args:
            alignments: its alignments with the other sides.
            mappings: mappings that the other sides chose where its layers have several readings; `align_with` raised
                where the choice was ambiguous.
        """
        chosen = {mapping.path: mapping for mapping in mappings}
        rest = [
            ArrayMapping(layer.path, layer, layer.forms[0])
            for layer in self.inventory.layers
            if layer.path not in chosen
        ]
        return ParticipantAlignment(alignments, [*chosen.values(), *rest], None)

    def align_with(
        self,
        source: Inventory,
        names: Mapping[str, str] | None,
        rows: Rows | None,
        first_pass: Callable[[], FirstPass],
        batches: BatchSource,
    ) -> tuple[ParticipantAlignment, list[ArrayMapping]]:
        """Align this side with the first one.

        Args:
            source: the first side's layers.
            names: as for `polyamp.port`.
            rows: as for `polyamp.port`.
            first_pass: returns the first side's; called if the order of a layer's rows is not known.
            batches: number of a step -> this side's batch.

        Returns:
            Its alignment, and the mappings of the first side's arrays.

        Raises:
            PortError: the models cannot be matched.
        """
        try:
            plan = make_transfer_plan(source, self.inventory, names, strict=True, rows=rows)
        except PortError as error:
            raise PortError(str(error).replace(PARTIAL_PORT_HINT, _EVERY_LAYER).rstrip()) from error.__cause__
        notes: list[str] = []
        if plan.questions:
            plan, notes = self._settle_orders(plan, source, first_pass(), batches)
        weights, _ = new_leaf_values(plan, self.inventory, strict=False)
        mappings = array_mappings(plan)
        alignment = align(plan)
        alignment = msgspec.structs.replace(alignment, notes=[*alignment.notes, *notes])
        return ParticipantAlignment([alignment], mappings.second, weights), mappings.first

    def _settle_orders(
        self, plan: TransferPlan, source: Inventory, one: FirstPass, batches: BatchSource
    ) -> tuple[TransferPlan, list[str]]:
        """Return the plan with the orders of rows that a pass of both sides shows, and notes on the others."""

        def run(tried: TransferPlan) -> Evaluation:
            found = self.first_pass(batches, new_leaf_values(tried, self.inventory, strict=False)[0])
            if found.evaluation is None:
                raise _FirstPassError(found.failure)
            return found.evaluation

        if one.evaluation is None:
            return likeliest_orders(plan, one.failure)
        try:
            return settle_orders(plan, source, self.inventory, one.evaluation, run)
        except _FirstPassError as failure:
            return likeliest_orders(plan, str(failure))

    def first_pass(self, batches: BatchSource, weights: Mapping[str, Lazy] | None = None) -> FirstPass:
        """Run a float32 pass of a copy on the first batch, and return what its modules took, and what it returned.

        An error becomes a reason: the comparison's own passes raise it again, with their phase and step.

        Args:
            batches: number of a step -> batch.
            weights: its values by its own names; None for those that it has.
        """
        inputs: dict[str, Array] = {}
        outputs: list[Array] = []

        def on_capture(path: str, what: str, array: Array, dtype: str) -> None:
            if what == "input":
                inputs.setdefault(path, array[:MAX_SAMPLES])
            elif what == "output" and not path and array.ndim:
                outputs.append(array[:MAX_SAMPLES])

        try:
            batch, loss_fn = self._pass_batch(batches(0)), self._loss_to_train
            with self._model_copy() as working:
                model = working if weights is None else self._converter.fill(working, weights)
                with self._observer.disable_dropout(model, None):
                    trainer, _ = self._trainer(model, Phase(name=FLOAT32, pass_only=True), loss_fn)
                    self._observer.capture_pass(trainer.state, loss_fn, batch, on_capture)
        except Exception as error:  # noqa: BLE001  # whatever the user's code raises, training raises it again
            return FirstPass(None, f"{self.label}'s pass fails: {str(error).partition(chr(10))[0]}")
        return FirstPass(Evaluation(outputs, {}, {}, inputs))

    def record(
        self,
        phase: Phase,
        alignment: ParticipantAlignment,
        batches: BatchSource,
        steps: int,
        path: Path,
        on_entry: EntrySink | None = None,
    ) -> tuple[Trace | None, str]:
        """Train a copy in one phase and write its entries to a file.

        Args:
            phase, alignment, batches, steps: as for `run`.
            path: the file.
            on_entry: also called with each entry.

        Returns:
            The trace without its entries and ""; or, where a float64 phase fails, None and a note that says why.
        """
        trace, note = None, ""
        with contextlib.closing(TraceWriter(path, on_entry)) as writer:
            try:
                trace = self.run(phase, alignment, batches, steps, writer)
            except Exception as error:
                if not phase.wide:
                    raise
                note = without_judge(self.label, error)
        if trace is None:
            path.unlink()  # an unfinished float64 run is no reference
        return trace, note

    def run(
        self, phase: Phase, alignment: ParticipantAlignment, batches: BatchSource, steps: int, write: EntrySink
    ) -> Trace:
        """Train a copy in one phase and write a trace of every step.

        Args:
            phase: the phase.
            alignment: of this side with the first one.
            batches: number of a step, from 0 -> its batch.
            steps: number of steps; without a recipe only one forward and backward pass runs.
            write: called with each entry.

        Raises:
            UnsupportedError: the framework or the model does not support a float64 phase.
        """
        began = time.perf_counter()
        recorder = TraceRecorder(self.inventory, self._observer, self._loss_to_train, alignment, batches, write)
        with self._training_copy(phase, alignment) as copy:
            recorder.dropout = copy.dropout
            try:
                recorder.steps(copy.trainer, steps if copy.trains else 0, copy.numbers, self._pass_batch)
            except Exception as error:
                error.add_note(
                    f"In a comparison: {self.label}, {phase.title or phase.name}, step {recorder.step_number}."
                )
                raise
        return Trace(
            side=self.label,
            phase=phase.name,
            operations=recorder.operations,
            library=self.inventory.framework,
            hidden_reason=recorder.hidden_reason,
            dropouts=recorder.dropouts,
            seconds=time.perf_counter() - began - recorder.overhead_seconds,
        )

    @property
    def records_operations(self) -> bool:
        """Whether the backend records single operations."""
        return isinstance(self._observer, OperationObserver)

    def record_operations(
        self, phase: Phase, alignment: ParticipantAlignment, batches: BatchSource, location: PassLocation
    ) -> OperationLog:
        """Return the operations of a forward pass of the first batch up to a value.

        Args:
            phase, alignment, batches: as for `run`.
            location: the value.
        """
        observer, recorder = self._observer, OperationRecorder(location)
        batch = self._pass_batch(batches(0))
        with self._training_copy(phase, alignment) as copy:
            if isinstance(observer, OperationObserver):
                observer.record_operations(copy.trainer.state, self._loss_to_train, batch, recorder)
        return recorder.log()

    def _pass_batch(self, batch: Any) -> Any:
        """Return what is recorded of a step's batch: the first of its micro-batches."""
        has_several = self.recipe is not None and self.recipe.accumulate_steps > 1 and isinstance(batch, list)
        return batch[0] if has_several else batch

    @functools.cached_property
    def _loss_to_train(self) -> Any:
        return random_target_loss(self.inventory) if self._loss_fn is None else self._loss_fn

    @contextlib.contextmanager
    def _model_copy(self, *, wide: bool = False) -> Iterator[Any]:
        """Context manager that yields a copy of the model without a policy of its own: the recipe's acts."""
        is_loop = isinstance(self._recipe_argument, OwnLoop)
        with (
            contextlib.nullcontext() if is_loop else without_policies(self._observer, self.model),
            self._observer.model_copy(self.model, wide=wide, inference=self._loss_fn is None) as working,
        ):
            yield working

    @contextlib.contextmanager
    def _training_copy(self, phase: Phase, alignment: ParticipantAlignment) -> Iterator[_TrainingCopy]:
        """Context manager that yields a copy with the first side's weights, ready to train in a phase."""
        with self._model_copy(wide=phase.wide) as working:
            model = self._fill_weights(working, alignment, phase)
            numbers = SharedRandomNumbers() if self._has_shared_randomness else None
            draws = None if numbers is None else numbers.uniform_source(self.inventory)
            with self._observer.disable_dropout(model, draws) as dropout:
                trainer, trains = self._trainer(model, phase, self._loss_to_train)
                yield _TrainingCopy(trainer, trains, numbers, None if self._has_shared_randomness else dropout)

    def _trainer(self, model: Any, phase: Phase, loss_fn: Any) -> tuple[Trainer, bool]:
        """Return the trainer of a copy, and whether it trains in this phase: a user's loop has only one precision."""
        if phase.pass_only:
            return RecipeTrainer(model, phase_recipe(None, phase), loss_fn, self._options), False
        if isinstance(self._recipe_argument, OwnLoop):
            recipe = phase_recipe(self.recipe, phase)
            if phase.name == POLICY or not self._recipe_argument.recipe.policy.is_mixed:
                return LoopTrainer(model, self._recipe_argument, recipe, self._options, self.inventory), True
            return RecipeTrainer(model, recipe, loss_fn, self._options), False
        recipe = phase_recipe(resolve_recipe(self._recipe_argument, model), phase)
        return RecipeTrainer(model, recipe, loss_fn, self._options), self.recipe is not None

    def _fill_weights(self, model: Any, alignment: ParticipantAlignment, phase: Phase) -> Any:
        weights = alignment.weights
        if weights is None:
            return model
        if phase.wide:
            weights = {name: _float64_array(array, np.dtype(np.float64)) for name, array in weights.items()}
        return self._converter.fill(model, weights)


def _float64_array(array: Lazy, dtype: Any) -> Lazy:
    if str(array.dtype) not in FLOAT_DTYPES:
        return array
    return Lazy(array.shape, dtype, lambda: array.read().astype(dtype))
