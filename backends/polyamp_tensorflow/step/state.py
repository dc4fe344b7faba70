"""`TensorFlowState`: the user's model, the optimizer and polyamp's own scalars, all in variables updated in place.

Made by `TensorFlowBackend.init`; read and written by the step; exported to and imported from NumPy for checkpoints.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from polyamp.contract.backend import Backend
from polyamp.errors import ModelError
from polyamp.recipe.members import Members
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.rules import growing, refusals
from polyamp.rules.plan import Plan
from polyamp.rules.scale import LossScaleState
from polyamp.rules.stuck import Watch
from polyamp.shown import ShownState
from polyamp_tensorflow.arrays import Array, dtype_name, raw, to_numpy, write
from polyamp_tensorflow.models.layers import is_built, is_layer
from polyamp_tensorflow.models.places import Places
from polyamp_tensorflow.models.variables import Variables, variables_of
from polyamp_tensorflow.precision.autocast import planned
from polyamp_tensorflow.precision.layer_choice import choose
from polyamp_tensorflow.step.distribution import check_variables, several
from polyamp_tensorflow.step.optimizer_checks import warn_of_average
from polyamp_tensorflow.step.optimizers import groups_of, make_optimizer, optimizer_variables
from polyamp_tensorflow.step.resuming import described
from polyamp_tensorflow.step.writes import PREFIX, EagerReads, dtypes_of

if TYPE_CHECKING:
    from collections.abc import Callable


_TRAINABLE: Final = operator.attrgetter("trainable")
_PAUSE: Final = 1e-3
"""Seconds in which a thread that waits for a lock wakes up and takes it."""


class _Training(NamedTuple):
    """What exists once the model has its variables."""

    variables: Variables
    optimizer: Any
    flags: list[bool]
    places: Places


class TensorFlowState(ShownState):
    """A model under training. The step updates the model, the optimizer and the scalars in place.

    A model that is not built gets its variables, and is checked, at the first step or `value_and_grad`.

    Made in a strategy's scope, each replica has its copy of every variable, and the step keeps the copies alike.

    Attributes:
        model: the user's own model.
        recipe: the recipe it was made with.
        plan: its policy, resolved for the model; without the overrides until the model is built.
        groups: which parameter has which hyperparameters (S27); None until the model is built.
        strategy: the `tf.distribute.Strategy` in whose scope it was made; TensorFlow's default one otherwise.
        optimizer_settings: the optimizer's configuration as it was when it was made, for checkpoints.
        programs: the graph functions traced for this state, by the object that runs them.
        warned_of_additions: whether it was said that `loss_fn` leaves out what the model adds to its loss (S25).
        turn: held by a step, and by an export, which reads one variable after the other.
        watch: when the host looks whether the scale is stuck (S17).
        eager_reads: reads all parameters, in a step that is not compiled.
        waiting: how many threads wait for the turn to read or replace everything.
    """

    def __init__(self, model: Any, recipe: Recipe, backend: Backend) -> None:
        self.model = model
        self.recipe = recipe
        self.programs: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
        self.strategy = tf.distribute.get_strategy()
        self.warned_of_additions = False
        self.turn = threading.RLock()
        self.watch = Watch()
        self.waiting = 0
        self.eager_reads = EagerReads()
        self._backend = backend
        self._scale = LossScaleState(
            *(tf.Variable(value, trainable=False, name=name) for name, value in _fresh(recipe.loss_scaler))
        )
        self._step = tf.Variable(0, dtype=tf.int32, trainable=False, name="step")
        self._training: _Training | None = None
        self._retired = False
        self.groups: Members | None = None
        self.optimizer_settings: dict[str, Any] = {}
        self.plan: Plan
        if is_built(model):
            self.finish_building()
        elif several(self.strategy):
            raise ModelError(
                "model: on several replicas it must be built, so that each has its copy of the variables. Call it once "
                "in strategy.scope(), or give its first layer an Input."
            )
        else:
            self.plan = planned(model, recipe.policy)

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state, as tensors that later steps do not change."""
        return LossScaleState(*(variable.read_value() for variable in self._scale))

    @property
    def step(self) -> Any:
        """Number of applied updates, int32 scalar."""
        return self._step.read_value()

    @property
    def is_ready(self) -> bool:
        """False while the model waits for its first batch to create its variables."""
        return self._training is not None

    @property
    def variables(self) -> Variables:
        """The model's variables by role."""
        return self._ready().variables

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer in use."""
        return self._ready().optimizer

    def _place(self) -> tuple[str, int | str]:
        count, device = "not built", tf.constant(0).device
        if self.is_ready:
            parameters = [raw(variable) for variable in self.variables.parameters.values()]
            count, device = f"{sum(int(np.prod(p.shape)) for p in parameters):,}", parameters[0].device
        return device.rpartition("device:")[2], count

    def finish_building(self) -> None:
        """Check the model's variables and create the optimizer's.

        Raises:
            ModelError, UnsupportedError, PolicyError, RecipeError: what S20 asks for.
        """
        variables = variables_of(self.model)
        check_variables(self.strategy, [raw(v) for role in variables for v in role.values()])
        refusals.check_parameters([(n, dtype_name(v)) for n, v in variables.parameters.items()], self.recipe)
        self.plan = planned(self.model, self.recipe.policy)
        self.groups = groups_of(self.model, self.recipe, variables.parameters)
        optimizer = make_optimizer(self.recipe, variables.parameters, self.groups)
        warn_of_average(optimizer, self.recipe.accumulate_steps)
        self.optimizer_settings = described(optimizer)
        self._training = _Training(variables, optimizer, self._trainable(variables), Places(self.model))

    def check_unchanged(self) -> None:
        """Refuse a model of which other layers are trainable than at `init`, or that has other layers or weights.

        Raises:
            ModelError: names the first parameter that was frozen or unfrozen, or the layer that holds others.
            StateError: `refresh` made another state of this one.
        """
        variables, _, before, places = self._ready()
        self.check_alive()
        changed = places.changed()
        if changed is not None:
            raise ModelError(
                f"{changed} than at init, of which the traced step does not know. Go on with state = "
                "polyamp.refresh(state): what stayed keeps its optimizer state."
            )
        now = self._trainable(variables)
        if now == before:
            return
        names = [*variables.parameters, *variables.frozen, *variables.running]
        name, frozen = next((n, was) for n, was, new in zip(names, before, now, strict=True) if was != new)
        raise ModelError(
            f"parameter {name!r} was frozen after init. To train the others, state = polyamp.refresh(state): what "
            "stayed keeps its optimizer state. Or set trainable back."
            if frozen
            else f"parameter {name!r} was unfrozen after init, so no optimizer holds it. To train it too, state = "
            "polyamp.refresh(state): what stayed keeps its optimizer state. Or set trainable back."
        )

    def _trainable(self, variables: Variables) -> list[bool]:
        """Which variables Keras calls trainable; those of other models have no such switch."""
        every = [*variables.parameters.values(), *variables.frozen.values(), *variables.running.values()]
        if not is_layer(self.model):
            return []
        return list(map(_TRAINABLE, every)) if self.model.trainable else [False] * len(every)

    def read_statistics(self) -> dict[str, Any]:
        """Values of what a forward pass changes and a skipped update takes back: running statistics."""
        return _values(self.variables.left_by_a_forward_pass)

    def read_rng(self) -> dict[str, Any]:
        """Values of the random-number streams. They move on with every forward pass, at skipped steps too: an unlucky
        mask would come back."""
        return _values(self.variables.rng)

    def put_back(self, values: Mapping[str, Any]) -> None:
        """Write what `read_statistics` and `read_rng` returned; in a replica, or where all of them meet."""
        transient = {**self._transient(values), **self.variables.rng}
        _write_named({name: transient[name] for name in values}, values)

    def accept(self, running: Mapping[str, Any]) -> None:
        """Take over what the forward pass of an update that is applied left."""
        _write_named(self._transient(running), running)

    def _transient(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What a forward pass leaves: running statistics, and those parameters that it wrote by itself."""
        every = {**self.variables.frozen, **self.variables.parameters}
        written = {n: every[n.removeprefix(PREFIX)] for n in values if n.startswith(PREFIX)}
        return {**self.variables.left_by_a_forward_pass, **written}

    def computes_in(self) -> dict[int, str | None]:
        """By `id` of each variable, the dtype in which the layer that owns it computes in a step."""
        return dtypes_of(self.model, choose(self.model, self.plan)) if is_layer(self.model) else {}

    def commit(self, gradients: Mapping[str, Any]) -> None:
        """Then apply it to the parameters that have gradients and to the optimizer, in a replica."""
        parameters = self.variables.parameters
        self.optimizer.apply([gradients.get(name) for name in parameters], list(parameters.values()))

    def conclude(self, step: Any, scale: Sequence[Any] | None) -> None:
        """Write the counter, and the loss-scale state where it can have moved."""
        self._step.assign(step)
        if scale is not None:
            write(self._scale, scale)

    def export(self) -> dict[str, Array]:
        """Every array by name, on the host, as they are between two steps of whatever threads."""
        with self.between_steps():
            self.check_alive()
            return {name: to_numpy(variable) for name, variable in self._everything().items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Replace every array, between two steps."""
        with self.between_steps():
            for name, variable in self._everything().items():
                raw(variable).assign(tf.convert_to_tensor(arrays[name]))

    def go_on(self, before: TensorFlowState) -> None:
        """Scale, counters and steps of a state that this one takes the place of; that one refuses to step now."""
        write(self._scale, before.scale_state)
        self._step.assign(before.step)
        self.watch, self.warned_of_additions = before.watch, before.warned_of_additions
        before._retired = True

    def check_alive(self) -> None:
        """See `growing.check_alive`."""
        growing.check_alive(self._retired)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """The state's turn, before the next step of a thread that steps without a pause (see `turns`)."""
        self.waiting += 1
        try:
            with self.turn:
                yield
        finally:
            self.waiting -= 1

    def _everything(self) -> dict[str, Any]:
        parameters, frozen, running, rng, _ = self.variables
        groups = {
            "model": {**parameters, **frozen},
            "running": running,
            "rng": rng,
            "optimizer": optimizer_variables(self.optimizer, list(parameters)),
            "loss_scale": self._scale._asdict(),
        }
        named = {f"{group}/{name}": variable for group, members in groups.items() for name, variable in members.items()}
        return {**named, "step": self._step}

    def _ready(self) -> _Training:
        if self._training is None:
            raise ModelError(
                "the model is not built, so its variables do not exist yet. Run one step or value_and_grad first, or "
                "build the model before init: call it once, or give its first layer an Input."
            )
        return self._training


States = Sequence[TensorFlowState]


def turns(states: States) -> contextlib.AbstractContextManager[Any]:
    """The turn of each of the states, for one step, in one order whatever order they come in.

    A lock in Python goes back to the thread that has just released it as a rule: a thread that steps and steps would
    keep an export waiting, so it pauses first.
    """
    if any(state.waiting for state in states):
        time.sleep(_PAUSE)
    return states[0].turn if len(states) == 1 else _together(states)


@contextlib.contextmanager
def _together(states: States) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for state in sorted(states, key=id):
            stack.enter_context(state.turn)
        yield


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tf.identity(raw(variable)) for name, variable in variables.items()}


def _write_named(variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    write(variables.values(), [values[name] for name in variables])


def _fresh(scaler: LossScaler) -> list[tuple[str, Any]]:
    start = LossScaleState(np.float32(scaler.init_scale), 0, scaler.hysteresis, 0, 0)
    return [(name, v if name == "scale" else np.int32(v)) for name, v in start._asdict().items()]
