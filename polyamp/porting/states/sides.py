"""`Side`: a training state as `port` sees it, whatever holds it: a polyamp state, a checkpoint, or a model with its
framework's own optimizer and loss scaler (`Training`). Called by `port_state`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from polyamp.contract import registry
from polyamp.contract.backend import Backend, State
from polyamp.errors import ArgumentError, CheckpointError, PortError, UnsupportedError, described
from polyamp.porting.layouts.converter import Converter, Ports
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.states.described import read as read_description
from polyamp.porting.states.layout import (
    NativeTraining,
    OptimizerLayout,
    PortsStates,
    StateConverter,
    leaf_arrays,
    unnamed,
)
from polyamp.recipe.scaler import LossScaler
from polyamp.train import changes, checkpoint, contents
from polyamp.train.arguments import is_state

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ACCEPTED: Final = (
    "a polyamp state, the path of a checkpoint that polyamp.save wrote, or polyamp.porting.training(model, optimizer, "
    "scaler)"
)


_RULE: Final = ("kind", "growth_factor", "backoff_factor", "growth_interval", "growth_delay", "hysteresis")
"""Fields of a `LossScaler` that a scaler of another library has too, in its own words."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A model that is trained without polyamp; see `training`.

    Attributes:
        model: the model, with its weights.
        optimizer: the framework's own optimizer, or what it saved of it.
        scaler: the framework's own loss scaler, or what it saved of it; None where there is none.
        step: number of applied updates, where it is known.
    """

    model: Any
    optimizer: Any = None
    scaler: Any = None
    step: int | None = None


def training(model: Any, optimizer: Any = None, scaler: Any = None, *, step: int | None = None) -> Training:
    """A model that is trained without polyamp, for `polyamp.port`: it goes on under polyamp, in this framework or in
    another, or the other way round.

    | framework | `optimizer` | `scaler` |
    |---|---|---|
    | torch | `torch.optim` SGD, Adam, AdamW, RMSprop, Adagrad, or (to read) a `state_dict()` | `GradScaler`; the same |
    | Keras | Keras's, or a `LossScaleOptimizer` around it; None: the compiled model's | None: it is in the optimizer |
    | JAX | an optax state, better `(transformation, state)`, or flax's `TrainState` | `DynamicScale`, jmp's, or None |

    Args:
        model: as `polyamp.init` takes it, with its weights.
        optimizer: see above.
        scaler: see above.
        step: number of applied updates, which polyamp's schedules follow. Needed where the optimizer does not count
            them: torch's SGD, optax's without a schedule.

    As a target it is filled in place in torch and Keras, and comes back anew in JAX, as a `Training` of three parts.

    Example::

        checkpoint = torch.load("run.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        source = polyamp.porting.training(model, checkpoint["optimizer"], checkpoint["scaler"])
        state, report = polyamp.port(source, state)  # of a JAX model, say
    """
    return Training(model, optimizer, scaler, step)


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two sides of a port.

    Attributes:
        name: as messages call it.
        inventory: the layers of its model.
        arrays: every array by name, as `export_state` names them.
        leaves: name of a leaf -> array.
        optimizer: which arrays are what of its optimizer.
        settings: its recipe as plain values, as far as it is known, without the optimizer.
        scaler: its loss scaler; None where it has none, or nobody knows which.
        whole: whether it has a whole recipe, and so the settings of one.
        replaced: arrays -> the state with them; None of a checkpoint.
    """

    name: str
    inventory: Inventory
    arrays: Mapping[str, Array]
    leaves: Mapping[str, str]
    optimizer: OptimizerLayout
    settings: Mapping[str, Any]
    scaler: LossScaler | None
    whole: bool
    replaced: Callable[[Mapping[str, Array]], Any] | None

    @property
    def step(self) -> int | None:
        """Number of applied updates: the largest count where nothing else tells; None where nothing does."""
        if "step" in self.arrays:
            return int(self.arrays["step"])
        held = {count.array for count in self.optimizer.counts.values()} | set(self.optimizer.positions)
        return max((int(self.arrays[name].reshape(-1)[0]) for name in held if name in self.arrays), default=None)


def is_side(value: Any) -> bool:
    """Whether `port` takes a value for a training state: anything of `ACCEPTED` but a path."""
    return is_state(value) or isinstance(value, Training)


def side(value: Any, *, target: bool) -> Side:
    """A training state as one side of a port.

    Raises:
        ArgumentError: none of these.
        PortError: of a backend that moves no states, or whose arrays cannot be named.
        CheckpointError: a damaged file.
    """
    if isinstance(value, Training):
        return _of_training(value)
    if is_state(value):
        return _of_state(value, target=target)
    if isinstance(value, str | os.PathLike) and not target:
        return _of_checkpoint(value)
    accepted = ACCEPTED if not target else "a polyamp state or polyamp.porting.training(model, optimizer, scaler)"
    raise ArgumentError(
        f"a training state moves to another one: {'target' if target else 'source'} must be {accepted}. Received: "
        f"{described(value)}."
    )


def _of_state(state: Any, *, target: bool) -> Side:
    backend: Backend = cast("State[Any]", state).backend
    converter, states = converters(backend)
    arrays = backend.export_state(state)
    inventory = converter.inventory(state.model)
    name = f"the {backend.name} state"
    if not target:
        arrays = {**arrays, **_numbered(inventory, arrays)}
    return Side(
        name,
        inventory,
        arrays,
        _leaves(inventory, arrays, name),
        states.layout(state, arrays),
        changes.settings(state),
        state.recipe.loss_scaler,
        True,
        lambda new: backend.import_state(state, new),
    )


def _of_training(given: Training) -> Side:
    import numpy as np

    backend = registry.backend_for(given.model)
    converter, states = converters(backend)
    native: NativeTraining = states.native(given.model, given.optimizer, given.scaler)
    arrays = native.arrays()
    if given.step is not None:
        arrays["step"] = np.asarray(given.step, np.int32)
    inventory = converter.inventory(native.model)
    name = f"the {backend.name} training"
    scaler = LossScaler(**native.scaler) if native.scaler else None

    def replaced(new: Mapping[str, Array]) -> Training:
        made = native.replaced({name: array for name, array in new.items() if name != "step"})
        return Training(made.model, made.optimizer, made.loss_scaler, None if given.step is None else int(new["step"]))

    return Side(
        name,
        inventory,
        arrays,
        _leaves(inventory, arrays, name),
        native.layout,
        {} if scaler is None else {"scaler": {name: getattr(scaler, name) for name in _RULE}},
        scaler,
        False,
        replaced,
    )


def _of_checkpoint(path: str | os.PathLike[str]) -> Side:
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
    problems = contents.impossible(arrays, contents.scaler_of(settings or None, LossScaler()))
    if problems:
        raise CheckpointError(f"{name} holds what no state can hold. {contents.listed(problems)}.")
    return Side(
        name,
        inventory,
        arrays,
        leaves,
        optimizer,
        settings,
        contents.scaler_of(settings, LossScaler.off()) if settings else None,
        bool(settings),
        None,
    )


def converters(backend: Backend) -> tuple[Converter, StateConverter]:
    """What moves a backend's models and states.

    Raises:
        UnsupportedError: it has none.
    """
    if not isinstance(backend, Ports) or not isinstance(backend, PortsStates):
        raise UnsupportedError(
            f"the {backend.name} backend of this version has no converter for training states (`porting` and "
            "`porting_states`: polyamp.porting.layouts.converter.Ports, polyamp.porting.states.layout.PortsStates)."
        )
    return backend.porting, backend.porting_states


def _numbered(inventory: Inventory, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Statistics that a checkpoint holds under numbers (equinox's `State`), read from the model by their names."""
    lost = set(leaf_arrays(inventory, arrays)[1])
    return {
        f"running/{leaf.tied or leaf.name}": leaf.array.read()
        for layer in inventory.layers
        for leaf in layer.leaves.values()
        if leaf.name in lost and not leaf.trainable
    }


def _leaves(inventory: Inventory, arrays: Mapping[str, Any], name: str) -> dict[str, str]:
    found, lost = leaf_arrays(inventory, arrays)
    if lost:
        raise PortError(f"{name}: {unnamed(lost)}")
    return found
