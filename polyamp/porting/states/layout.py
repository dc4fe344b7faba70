"""What a backend says of an optimizer's arrays: which of them is what, under the words of polyamp's specs.

A backend gives an `OptimizerLayout` of its states, and of its framework's own optimizers; `port_state` reads and writes
by it. It is data alone, so that a checkpoint holds it as JSON and can be read where its framework is not installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from polyamp.porting.layouts.inventory import Inventory

    Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Count:
    """Where the number of updates lies that a parameter took (S23).

    Attributes:
        array: the array that holds it, a scalar; several parameters may share one.
        missed: where not "", a vector of how many of those each parameter did not take; and
        index: this parameter's place in it.
    """

    array: str
    missed: str = ""
    index: int = 0


@dataclasses.dataclass(frozen=True)
class OptimizerLayout:
    """Which arrays of a training state are what of its optimizer.

    Attributes:
        slots: slot, as polyamp's specs call it ("exp_avg", "momentum"), -> name of the parameter's leaf -> array. Such
            an array may be missing as long as the optimizer has not made it.
        counts: leaf -> where its updates are counted.
        distinct: sets of hyperparameters, in the words of polyamp's specs ("type", "learning_rate", "betas", ...);
            what is not known is left out, what a spec has no word for has one of its own ("amsgrad").
        numbers: leaf -> index in `distinct`.
        positions: further arrays that hold the number of applied updates, such as a schedule's.
        factors: slot -> what its arrays are multiplied with to be what polyamp's formulas keep: Keras's momentum holds
            the learning rate.
        notes: what a report says of it, a sentence each.
        refused: what cannot be moved to another optimizer, a phrase each.
    """

    slots: Mapping[str, Mapping[str, str]]
    counts: Mapping[str, Count]
    distinct: Sequence[Mapping[str, Any]]
    numbers: Mapping[str, int]
    positions: Sequence[str] = ()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    refused: Sequence[str] = ()

    @property
    def type(self) -> str:
        """Its kind, as a recipe file calls it: "adam"; "" where there is none."""
        return str(self.distinct[0].get("type", "")) if self.distinct else ""

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        counts = {leaf: [count.array, count.missed, count.index] for leaf, count in self.counts.items()}
        return {**fields, "counts": counts}  # dataclasses.asdict copies every name

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> OptimizerLayout:
        """What `plain` described."""
        counts = {leaf: Count(*count) for leaf, count in plain["counts"].items()}
        return cls(**{**plain, "counts": counts})


class NativeTraining(Protocol):
    """A model with its framework's own optimizer and loss scaler: what `polyamp.porting.training` gives."""

    @property
    def model(self) -> Any:
        """The model, with its weights."""

    @property
    def optimizer(self) -> Any:
        """The framework's own optimizer, as it was given."""

    @property
    def loss_scaler(self) -> Any:
        """The framework's own loss scaler, as it was given."""

    @property
    def layout(self) -> OptimizerLayout:
        """Which of `arrays` are what of the optimizer."""

    @property
    def scaler(self) -> Mapping[str, Any]:
        """The scaler's constants, as `LossScaler` calls them; empty where there is none."""

    def arrays(self) -> dict[str, Array]:
        """Every array by name, named as `Backend.export_state` names them: `model/`, `running/`, `optimizer/`, and of
        `loss_scale/` what the scaler has."""

    def replaced(self, arrays: Mapping[str, Array]) -> NativeTraining:
        """The same with these arrays; in torch and Keras itself, filled in place."""


class StateConverter(Protocol):
    """What `polyamp.port` asks of a framework to move training states."""

    def layout(self, state: Any, arrays: Mapping[str, Array]) -> OptimizerLayout:
        """Of a polyamp state of this backend.

        Args:
            state: the state.
            arrays: what `export_state` gave of it.
        """

    def native(self, model: Any, optimizer: Any, scaler: Any) -> NativeTraining:
        """A model that is trained without polyamp.

        Args:
            model: the model.
            optimizer: the framework's own optimizer, or what it saved of it; None where the model holds it.
            scaler: the framework's loss scaler, or what it saved of it, or None.

        Raises:
            ArgumentError: objects that are none of these.
        """


@runtime_checkable
class PortsStates(Protocol):
    """A backend whose training states can be moved to other frameworks, and others' to it."""

    @property
    def porting_states(self) -> StateConverter:
        """What does it."""


def leaf_arrays(inventory: Inventory, arrays: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Name of a leaf -> the array that holds it in an export; and the leaves that none holds."""
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


def unnamed(leaves: Sequence[str]) -> str:
    """Why a state cannot be moved whose leaves no array holds: a sentence."""
    return (
        f"what a checkpoint holds of {', '.join(leaves[:3])} does not have that name (equinox numbers what its State "
        "holds), so that a training state with it cannot be moved. The model can: polyamp.port(model, other_model)."
    )
