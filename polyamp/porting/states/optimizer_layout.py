"""`OptimizerLayout`, the roles of an optimizer's arrays in the names of polyamp's specs, and the protocols around it.

A backend returns an `OptimizerLayout` for its states, and for its framework's own optimizers; `port_state` reads and
writes with it. It is data alone, so that a checkpoint stores it as JSON and is readable without its framework.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from polyamp.porting.layouts.lazy_array import Array
from polyamp.recipe.optimizer_spec import Spec
from polyamp.recipe.optimizers import SPECS

if TYPE_CHECKING:
    from polyamp.porting.layouts.inventory import Inventory


@dataclasses.dataclass(frozen=True)
class UpdateCount:
    """Location of the number of updates that a parameter received (S23).

    Attributes:
        array: name of the scalar array with the count; several parameters may share one.
        missed: if not "", name of a vector with the number of updates that each parameter did not receive.
        index: this parameter's index in `missed`.
    """

    array: str
    missed: str = ""
    index: int = 0


@dataclasses.dataclass(frozen=True)
class OptimizerLayout:
    """Roles of a training state's arrays in its optimizer.

    Attributes:
        slots: slot in the names of polyamp's specs ("exp_avg", "momentum") -> name of the parameter's leaf -> array. An
            array may be missing until the optimizer has created it.
        counts: leaf -> location of its update count.
        distinct: sets of hyperparameters, in the names of polyamp's specs ("type", "learning_rate", "betas", ...).
            Unknown values are left out; settings that a spec lacks have another name ("amsgrad").
        numbers: leaf -> index in `distinct`.
        positions: further arrays with the number of applied updates, such as a schedule's.
        factors: slot -> factor that converts its arrays to those of polyamp's formulas: Keras's momentum includes the
            learning rate.
        notes: notes for a report, a sentence each.
        refused: reasons why the state cannot be moved to another optimizer, a phrase each.
    """

    slots: Mapping[str, Mapping[str, str]]
    counts: Mapping[str, UpdateCount]
    distinct: Sequence[Mapping[str, Any]]
    numbers: Mapping[str, int]
    positions: Sequence[str] = ()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    refused: Sequence[str] = ()

    @property
    def type(self) -> str:
        """Kind of optimizer, as in a recipe file: "adam"; "" if there is none."""
        return str(self.distinct[0].get("type", "")) if self.distinct else ""

    def spec_at(self, leaf: str) -> Spec | None:
        """Return the spec with the hyperparameters of a leaf; None for a kind that polyamp does not have."""
        return self._specs[self.numbers.get(leaf, 0)] if self._specs else None

    @functools.cached_property
    def _specs(self) -> list[Spec]:
        """The spec of each set of hyperparameters; empty for a kind that polyamp does not have."""
        kind = next((spec for spec in SPECS if spec.tag == self.type), None)
        return [] if kind is None else [kind.unchecked(settings) for settings in self.distinct]

    @functools.cached_property
    def number_slots(self) -> frozenset[str]:
        """Slots that are one number for each parameter, of any number of axes."""
        found = (
            {slot for slot in spec.slot_shapes if spec.slot_shape(slot, shape) == ()}
            for spec in self._specs
            for shape in ((3,), (2, 3))
        )
        return frozenset.intersection(*map(frozenset, found)) if self._specs else frozenset()

    def plain(self) -> dict[str, Any]:
        """Return the layout as JSON data."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        counts = {leaf: [count.array, count.missed, count.index] for leaf, count in self.counts.items()}
        return {**fields, "counts": counts}  # dataclasses.asdict would copy every name

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> OptimizerLayout:
        """Return the layout for the result of `plain`."""
        counts = {leaf: UpdateCount(*count) for leaf, count in plain["counts"].items()}
        return cls(**{**plain, "counts": counts})


class NativeTraining(Protocol):
    """Model with its framework's own optimizer and loss scaler, as `polyamp.porting.training` describes it."""

    @property
    def model(self) -> Any:
        """The model, with its weights."""

    @property
    def optimizer(self) -> Any:
        """The framework's own optimizer, as it was passed."""

    @property
    def loss_scaler(self) -> Any:
        """The framework's own loss scaler, as it was passed."""

    @property
    def layout(self) -> OptimizerLayout:
        """Roles of `arrays` in the optimizer."""

    @property
    def scaler(self) -> Mapping[str, Any]:
        """The scaler's constants, with the names of `LossScaler`; empty if there is no scaler."""

    def arrays(self) -> dict[str, Array]:
        """Return every array by its name as in `Backend.export_state`: `model/`, `running/`, `optimizer/`, and the
        scaler's `loss_scale/`."""

    def replaced(self, arrays: Mapping[str, Array]) -> NativeTraining:
        """Return the same training with these arrays; in torch and Keras the object itself, filled in place."""


class StateConverter(Protocol):
    """Operations that `polyamp.port` requires of a framework to move training states."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        """Return the optimizer layout of a polyamp state of this backend.

        Args:
            state: the state.
            arrays: result of `export_state` for the state.
        """

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        """Return the adapter of a model that is trained without polyamp.

        Args:
            model: the model.
            optimizer: the framework's own optimizer, or its saved state; None if the model contains it.
            scaler: the framework's loss scaler, its saved state, or None.

        Raises:
            ArgumentError: an argument is none of these.
        """


@runtime_checkable
class HasNativeTraining(Protocol):
    """Converter of models that adapts trainings of them without polyamp too, in place of the `StateConverter` of the
    backend: for a framework that runs on several others, as Keras does."""

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        """Return the adapter of a model that is trained without polyamp; see `StateConverter.native`."""


@runtime_checkable
class HasRunningArrays(Protocol):
    """State converter of a framework whose checkpoints do not store all running statistics under the names that the
    model's inventory gives them (equinox numbers what its `State` holds)."""

    def running_arrays(self, model: Any) -> dict[str, Array]:
        """Return the running statistics of a model under their names in an export, `running/...`."""


@runtime_checkable
class HasStateConverter(Protocol):
    """Backend whose training states can be moved to and from other frameworks."""

    @property
    def porting_states(self) -> StateConverter:
        """Converter of the backend's training states."""


def map_leaf_arrays(inventory: Inventory, arrays: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return leaf name -> array name in an export, and the leaves without an array."""
    found, lost = {}, []
    for layer in inventory.layers:
        for leaf in layer.leaves.values():
            own = leaf.tied or leaf.name
            held = [name for name in (f"model/{own}", f"running/{own}") if name in arrays]
            if held:
                found[leaf.name] = held[0]
            else:
                lost.append(leaf.name)
    return found, lost


def unnamed_leaves_reason(leaves: Sequence[str]) -> str:
    """Return a sentence on why a state with such leaves cannot be moved."""
    return (
        f"what a checkpoint holds of {', '.join(leaves[:3])} does not have that name (equinox numbers what its State "
        "holds), so that a training state with it cannot be moved. The model can: polyamp.port(model, other_model)."
    )
