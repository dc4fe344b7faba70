"""`TrainingSide`, a uniform view of a training state for `port`, and `Training`.

A side is a polyamp state, a checkpoint, or a model with its framework's own optimizer and loss scaler (`Training`).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import numpy as np

from polyamp.backend_lookup import converter_of_choice
from polyamp.contract import registry
from polyamp.contract.backend import Backend, State
from polyamp.errors import ArgumentError, CheckpointError, PortError, UnsupportedError, describe_value
from polyamp.porting.layouts.converter import Converter, HasConverter
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Array, Lazy
from polyamp.porting.states.checkpoint_metadata import read_state_metadata as read_description
from polyamp.porting.states.optimizer_layout import (
    HasNativeTraining,
    HasRunningArrays,
    HasStateConverter,
    OptimizerLayout,
    StateConverter,
    map_leaf_arrays,
    unnamed_leaves_reason,
)
from polyamp.recipe.scaler import LossScaler
from polyamp.train import checkpoint, checkpoint_checks, recipe_changes
from polyamp.train.argument_checks import is_state

ACCEPTED_STATES: Final = (
    "a polyamp state, the path of a checkpoint that polyamp.save wrote, or polyamp.porting.training(model, optimizer, "
    "scaler)"
)


_SCALER_RULE_FIELDS: Final = (
    "kind",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "growth_delay",
    "hysteresis",
)
"""Fields of a `LossScaler` that other libraries' scalers have too, under other names."""


@dataclasses.dataclass(frozen=True)
class Training:
    """Model that is trained without polyamp; see `training`.

    Attributes:
        model: the model, with its weights.
        optimizer: the framework's own optimizer, or its saved state.
        scaler: the framework's own loss scaler, or its saved state; None if there is none.
        step: number of applied updates, if known.
    """

    model: Any
    optimizer: Any = None
    scaler: Any = None
    step: int | None = None


def training(model: Any, optimizer: Any = None, scaler: Any = None, *, step: int | None = None) -> Training:
    """Describe a model that is trained without polyamp, as a source or target of `polyamp.port`. Training continues
    under polyamp, in the same or another framework, or the other way round.

    | framework | `optimizer` | `scaler` |
    |---|---|---|
    | torch | a `torch.optim` optimizer with a spec, or (to read) its `state_dict()` | `GradScaler`; the same |
    | Keras | Keras's, or a `LossScaleOptimizer` around it; None: the compiled model's | None: it is in the optimizer |
    | JAX | an optax state, better `(transformation, state)`, flax's `TrainState` or `nnx.Optimizer` | `DynamicScale`, \
jmp's, or None |

    Args:
        model: as `polyamp.init` accepts it, with its weights.
        optimizer: see above.
        scaler: see above.
        step: number of applied updates, which polyamp's schedules follow. Required if neither the optimizer counts
            them (torch's SGD, optax's without a schedule) nor what holds it (`TrainState.step`, `nnx.Optimizer.step`).

    As a target it is filled in place in torch and Keras. In JAX a new `Training` of three parts is returned.

    Example::

        checkpoint = torch.load("run.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        source = polyamp.porting.training(model, checkpoint["optimizer"], checkpoint["scaler"])
        state, report = polyamp.port(source, state)  # of a JAX model, say
    """
    return Training(model, optimizer, scaler, step)


@dataclasses.dataclass(frozen=True)
class TrainingSide:
    """One of the two sides of a port.

    Attributes:
        name: name for messages.
        inventory: the layers of its model.
        arrays: every array by name, as `export_state` names them.
        leaves: name of a leaf -> array.
        optimizer: layout of its optimizer's arrays.
        settings: returns the known settings of its recipe as plain values, without the optimizer.
        scaler: its loss scaler; None if there is none or it is unknown.
        has_recipe: whether it has a complete recipe with all settings.
        replace_arrays: function from arrays to the state with them; None for a checkpoint.
    """

    name: str
    inventory: Inventory
    arrays: Mapping[str, Array]
    leaves: Mapping[str, str]
    optimizer: OptimizerLayout
    settings: Callable[[], Mapping[str, Any]]
    scaler: LossScaler | None
    has_recipe: bool
    replace_arrays: Callable[[Mapping[str, Array]], Any] | None

    @property
    def step(self) -> int | None:
        """Number of applied updates: the largest update count if not stored elsewhere; None if unknown."""
        if "step" in self.arrays:
            return int(self.arrays["step"])
        held = {count.array for count in self.optimizer.counts.values()} | set(self.optimizer.positions)
        return max((int(self.arrays[name].reshape(-1)[0]) for name in held if name in self.arrays), default=None)


def is_training_side(value: Any) -> bool:
    """Return whether `port` treats a value as a training state: any of `ACCEPTED_STATES` except a path."""
    return is_state(value) or isinstance(value, Training)


def make_training_side(value: Any, *, target: bool, inventory: Inventory | None = None) -> TrainingSide:
    """Return a training state as one side of a port.

    Args:
        value: the training state.
        target: whether it is the side that is filled.
        inventory: the layers of its model if they are known, with any values.

    Raises:
        ArgumentError: none of these.
        PortError: its backend cannot move states, or its arrays cannot be named.
        CheckpointError: a damaged file.
    """
    if isinstance(value, Training):
        return _side_of_native_training(value, inventory)
    if is_state(value):
        return _side_of_state(value, inventory)
    if isinstance(value, str | os.PathLike) and not target:
        return _side_of_checkpoint(value)
    accepted = (
        ACCEPTED_STATES if not target else "a polyamp state or polyamp.porting.training(model, optimizer, scaler)"
    )
    raise ArgumentError(
        f"a training state moves to another one: {'target' if target else 'source'} must be {accepted}. Received: "
        f"{describe_value(value)}."
    )


def _side_of_state(state: Any, known: Inventory | None) -> TrainingSide:
    backend: Backend = cast("State[Any]", state).backend
    converter, states = find_converters(backend, state.model)
    name = f"the {backend.name} state"
    inventory, arrays, leaves = _name_leaves(name, converter, state.model, backend.export_state(state), known)
    return TrainingSide(
        name,
        inventory,
        arrays,
        leaves,
        states.layout(state, arrays),
        lambda: recipe_changes.state_settings(state),
        state.recipe.loss_scaler,
        True,
        lambda new: backend.import_state(state, _unnamed_arrays(state.model, converter, states, leaves, new)),
    )


def _side_of_native_training(given: Training, known: Inventory | None) -> TrainingSide:
    own = converter_of_choice(given.model)
    if isinstance(own, HasNativeTraining):
        converter = cast("Converter", own)
        states: StateConverter | None = None
        framework, native = "keras", own.native(given.model, given.optimizer, given.scaler)
    else:
        backend = registry.backend_for(given.model)
        converter, states = find_converters(backend, given.model)
        framework, native = backend.name, states.native(given.model, given.optimizer, given.scaler)
    held = native.arrays()
    has_step = "step" in held
    if given.step is not None:
        held["step"] = np.asarray(given.step, np.int32)
    name = f"the {framework} training"
    inventory, arrays, leaves = _name_leaves(name, converter, native.model, held, known)
    scaler = LossScaler(**native.scaler) if native.scaler else None
    settings = {} if scaler is None else {"scaler": {field: getattr(scaler, field) for field in _SCALER_RULE_FIELDS}}

    def replace_arrays(new: Mapping[str, Array]) -> Training:
        new = _unnamed_arrays(native.model, converter, states, leaves, new)
        made = native.replaced({name: array for name, array in new.items() if name != "step" or has_step})
        return Training(made.model, made.optimizer, made.loss_scaler, None if given.step is None else int(new["step"]))

    return TrainingSide(
        name,
        inventory,
        arrays,
        leaves,
        native.layout,
        lambda: settings,
        scaler,
        False,
        replace_arrays,
    )


def _side_of_checkpoint(path: str | os.PathLike[str]) -> TrainingSide:
    name = os.fspath(path)
    meta, arrays = checkpoint.read(path)
    said = json.loads(meta.get("porting") or "{}")
    if not said or "error" in said:
        why = (
            f"when it was saved, its model could not be described ({said['error']})"
            if said
            else "an older polyamp wrote it, which did not describe the model in it"
        )
        raise PortError(
            f"{name} does not say what its arrays are in another framework: {why}. Restore it with its own framework, "
            "and save it again, or port the state that you restored: state = polyamp.restore(state, path); "
            "polyamp.port(state, other)."
        )
    try:
        inventory, leaves, optimizer = read_description(said, arrays)
    except (ValueError, KeyError, TypeError) as error:
        raise PortError(f"{name} cannot be read for another framework: {error}.") from error
    settings = checkpoint.saved_settings(meta) or {}
    problems = checkpoint_checks.list_impossible_values(
        arrays, checkpoint_checks.saved_scaler(settings or None, LossScaler())
    )
    if problems:
        raise CheckpointError(f"{name} holds what no state can hold. {checkpoint_checks.join_problems(problems)}.")
    return TrainingSide(
        name,
        inventory,
        arrays,
        leaves,
        optimizer,
        lambda: settings,
        checkpoint_checks.saved_scaler(settings, LossScaler.off()) if settings else None,
        bool(settings),
        None,
    )


def find_converters(backend: Backend, model: Any) -> tuple[Converter, StateConverter]:
    """Return the converters of a model of a backend, and of the backend's states.

    Raises:
        UnsupportedError: the backend has none.
    """
    if not isinstance(backend, HasConverter) or not isinstance(backend, HasStateConverter):
        raise UnsupportedError(
            f"the {backend.name} backend of this version has no converter for training states (`porting` and "
            "`porting_states`: polyamp.porting.layouts.converter.HasConverter, "
            "polyamp.porting.states.optimizer_layout.HasStateConverter)."
        )
    return converter_of_choice(model) or backend.porting, backend.porting_states


def _name_leaves(
    name: str, converter: Converter, model: Any, arrays: Mapping[str, Array], known: Inventory | None
) -> tuple[Inventory, Mapping[str, Array], dict[str, str]]:
    """Return the layers of a model, its arrays, and the name of each leaf's array. Statistics that an export stores
    under numbers (equinox's `State`) get the model's names too.

    Args:
        name: name of the side for messages.
        converter: converter of the model.
        model: the model.
        arrays: every array by name.
        known: the layers of the model if they are known; they are used if each of their leaves has an array.
    """
    if known is not None:
        leaves, lost = map_leaf_arrays(known, arrays)
        if not lost:
            return known, arrays, leaves
    inventory = converter.inventory(model)
    leaves, lost = map_leaf_arrays(inventory, arrays)
    if lost:
        arrays = {**arrays, **_statistics_by_name(inventory, set(lost))}
        leaves, lost = map_leaf_arrays(inventory, arrays)
    if lost:
        raise PortError(f"{name}: {unnamed_leaves_reason(lost)}")
    return inventory, arrays, leaves


def _statistics_by_name(inventory: Inventory, lost: set[str]) -> dict[str, Array]:
    return {
        f"running/{leaf.tied or leaf.name}": leaf.array.read()
        for layer in inventory.layers
        for leaf in layer.leaves.values()
        if leaf.name in lost and not leaf.trainable
    }


def _unnamed_arrays(
    model: Any, converter: Converter, states: StateConverter | None, leaves: Mapping[str, str], new: Mapping[str, Array]
) -> Mapping[str, Array]:
    """Return new arrays under the names of an export: those of statistics that it numbers come from a model that is
    filled with them."""
    if not isinstance(states, HasRunningArrays):
        return new
    own = states.running_arrays(model)
    named = {leaf: array for leaf, array in leaves.items() if array.startswith("running/") and array not in own}
    if not named:
        return new
    filled = converter.fill(model, {leaf: Lazy.of(new[array]) for leaf, array in named.items()})
    kept = {name: array for name, array in new.items() if name not in named.values()}
    return {**kept, **states.running_arrays(filled)}
