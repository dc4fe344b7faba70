"""`TensorFlowState`: the user's model, the optimizer and polyamp's scalars, in variables updated in place.

Checkpoints export it to NumPy arrays and import it from them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import tensorflow as tf

from polyamp.contract.backend import Backend
from polyamp.display import StateClass, StateDisplayMixin
from polyamp.errors import ModelError
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.recipe.scaler import LossScaleState
from polyamp.rules import refresh, step_checks
from polyamp.rules.averages import averages_in_place_error
from polyamp.rules.group_members import GroupMembers
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_keras.arrays import dtype_name, native_variable
from polyamp_keras.models.layers import is_built, is_layer
from polyamp_keras.models.model_snapshot import ModelSnapshot
from polyamp_keras.models.variables import ModelVariables, model_variables
from polyamp_keras.own_loop.optimizer_checks import warn_about_average
from polyamp_keras.own_loop.spec_optimizer import optimizer_variables, resolve_groups
from polyamp_keras.precision.layer_dtypes import choose_layer_dtypes
from polyamp_tensorflow.arrays import Array, assign_values, to_numpy
from polyamp_tensorflow.distributed.replicas import check_replica_variables, find_replicas, has_several_replicas
from polyamp_tensorflow.precision.autocast import resolve_policy
from polyamp_tensorflow.step.averages import Averages, make_averages
from polyamp_tensorflow.step.optimizer_metadata import optimizer_metadata
from polyamp_tensorflow.step.optimizers import make_optimizer
from polyamp_tensorflow.step.parameter_writes import WRITE_PREFIX, EagerReader, variable_compute_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable


_PAUSE_SECONDS: Final = 1e-3
"""Seconds in which a thread that waits for a lock wakes up and acquires it."""


class _TrainingVariables(NamedTuple):
    """Variables, optimizer and records that exist once the model is built."""

    variables: ModelVariables
    optimizer: Any
    snapshot: ModelSnapshot
    averages: Averages


class TensorFlowState(StateDisplayMixin, metaclass=StateClass):
    """Training state of a model. The step updates the model, the optimizer and the scalars in place.

    An unbuilt model gets its variables, and is checked, at the first step or `value_and_grad`.

    In a strategy's scope, each replica has its copy of every variable, and the step keeps the copies equal.

    Attributes:
        model: the user's model.
        recipe: the recipe of the state.
        plan: its policy, resolved for the model; without the overrides until the model is built.
        groups: hyperparameters of each parameter (S27); None until the model is built.
        strategy: the `tf.distribute.Strategy` in whose scope the state was created; otherwise TensorFlow's default one.
        optimizer_settings: the optimizer's configuration at its creation, for checkpoints.
        programs: the graph functions traced for this state, by the object that runs them.
        warned_of_additions: whether the warning was given that `loss_fn` omits the model's own losses (S25).
        lock: lock of a step, and of an export, which reads one variable after the other.
        watch: schedule of the host's check for a stuck scale (S17).
        eager_reads: reader of all parameters, for steps that are not compiled.
        waiting: number of threads that wait for `lock` to read or replace everything.
        has_averages_in_place: whether the model has its averages at the moment, inside of `polyamp.averaged` (S34).
    """

    _shown = ("averages", "optimizer", "plan", "strategy", "variables")

    def __init__(self, model: Any, recipe: Recipe, backend: Backend) -> None:
        self.model = model
        self.recipe = recipe
        self.programs: weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
        self.strategy = find_replicas()
        self.warned_of_additions = False
        self.lock = threading.RLock()
        self.watch = StuckScaleMonitor()
        self.waiting = 0
        self.eager_reads = EagerReader()
        self._backend = backend
        scaler = recipe.loss_scaler
        start = LossScaleState(np.float32(scaler.init_scale), *map(np.int32, (0, scaler.hysteresis, 0, 0)))
        self._scale = LossScaleState(*(tf.Variable(v, trainable=False, name=n) for n, v in start._asdict().items()))
        self._step = tf.Variable(0, dtype=tf.int32, trainable=False, name="step")
        self._training: _TrainingVariables | None = None
        self._retired = False
        self.has_averages_in_place = False
        self.groups: GroupMembers | None = None
        self.optimizer_settings: dict[str, Any] = {}
        self.plan: ResolvedPolicy
        if is_built(model):
            self.finish_building()
        elif has_several_replicas(self.strategy):
            raise ModelError(
                "model: on several replicas it must be built, so that each has its copy of the variables. Call it once "
                "in strategy.scope(), or give its first layer an Input."
            )
        else:
            self.plan = resolve_policy(model, recipe.policy)

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def scale_state(self) -> LossScaleState:
        """Loss-scale state as tensors, which later steps do not change."""
        return LossScaleState(*(variable.read_value() for variable in self._scale))

    @property
    def step(self) -> Any:
        """Number of applied updates, int32 scalar."""
        return self._step.read_value()

    @property
    def is_ready(self) -> bool:
        """Whether the model has its variables; an unbuilt model gets them at its first batch."""
        return self._training is not None

    @property
    def variables(self) -> ModelVariables:
        """Variables of the model by role."""
        return self._ready().variables

    @property
    def optimizer(self) -> Any:
        """Keras optimizer in use."""
        return self._ready().optimizer

    @property
    def averages(self) -> Averages:
        """Variables of the moving averages by role and path (S34); empty without `Recipe(ema=...)`."""
        return self._ready().averages

    def _place(self) -> tuple[str, int | str]:
        count, device = "not built", tf.constant(0).device
        if self.is_ready:
            parameters = [native_variable(variable) for variable in self.variables.parameters.values()]
            count, device = f"{sum(int(np.prod(p.shape)) for p in parameters):,}", parameters[0].device
        return device.rpartition("device:")[2], count

    def finish_building(self) -> None:
        """Check the model's variables and create the optimizer's.

        Raises:
            ModelError, UnsupportedError, PolicyError, RecipeError: as S20 requires.
        """
        variables = model_variables(self.model)
        check_replica_variables(self.strategy, [native_variable(v) for role in variables for v in role.values()])
        step_checks.check_parameters([(n, dtype_name(v)) for n, v in variables.parameters.items()], self.recipe)
        self.plan = resolve_policy(self.model, self.recipe.policy)
        self.groups = resolve_groups(self.model, self.recipe, variables.parameters)
        optimizer = make_optimizer(self.recipe, variables.parameters, self.groups)
        warn_about_average(optimizer, self.recipe.accumulate_steps)
        self.optimizer_settings = optimizer_metadata(optimizer)
        self._training = _TrainingVariables(
            variables,
            optimizer,
            ModelSnapshot(self.model, variables, "polyamp.refresh(state)"),
            make_averages(self.recipe, variables),
        )

    def check_unchanged(self) -> None:
        """Raise if layers or weights, or which of them are trainable, have changed since `init`.

        Raises:
            ModelError: names the first parameter that was frozen or unfrozen, or the first changed layer.
            StateError: `refresh` replaced this state.
        """
        snapshot = self._ready().snapshot
        self.check_alive()
        snapshot.check()

    def read_statistics(self) -> dict[str, Any]:
        """Return the running statistics, which a forward pass changes and a skipped update restores."""
        return _read_values(self.variables.pass_updated_variables)

    def read_rng(self) -> dict[str, Any]:
        """Return the values of the random streams. They advance with every forward pass, also at skipped steps, so that
        the same dropout mask does not recur."""
        return _read_values(self.variables.rng)

    def restore_running_state(self, values: Mapping[str, Any]) -> None:
        """Write values from `read_statistics` and `read_rng`; in a replica or in the cross-replica context."""
        transient = {**self._transient(values), **self.variables.rng}
        _write_values({name: transient[name] for name in values}, values)

    def write_running_state(self, running: Mapping[str, Any]) -> None:
        """Write the running state from the forward pass of an applied update."""
        _write_values(self._transient(running), running)

    def _transient(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that a forward pass writes: running statistics, and parameters that it changed."""
        every = {**self.variables.frozen, **self.variables.parameters}
        written = {n: every[n.removeprefix(WRITE_PREFIX)] for n in values if n.startswith(WRITE_PREFIX)}
        return {**self.variables.pass_updated_variables, **written}

    def compute_dtypes(self) -> dict[int, str | None]:
        """Map the `id` of each variable to the compute dtype of its layer in a step."""
        return (
            variable_compute_dtypes(self.model, choose_layer_dtypes(self.model, self.plan))
            if is_layer(self.model)
            else {}
        )

    def write_counters(self, step: Any, scale: Sequence[Any] | None) -> None:
        """Write the step counter, and the loss-scale state unless it is None."""
        self._step.assign(step)
        if scale is not None:
            assign_values(self._scale, scale)

    def export(self) -> dict[str, Array]:
        """Return every array by name, on the host, as between two steps of any thread."""
        with self.exclusive_access():
            self.check_alive()
            return {name: to_numpy(variable) for name, variable in self._named_variables().items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Replace every array between two steps."""
        with self.exclusive_access():
            self.check_alive()
            for name, variable in self._named_variables().items():
                native_variable(variable).assign(tf.convert_to_tensor(arrays[name]))

    def take_over(self, before: TensorFlowState) -> None:
        """Take over scale, counters and steps of the state that this one replaces. That state then refuses to step."""
        assign_values(self._scale, before.scale_state)
        self._step.assign(before.step)
        self.watch, self.warned_of_additions = before.watch, before.warned_of_additions
        before._retired = True

    def check_alive(self) -> None:
        """Raise if `refresh` replaced this state, or its model has its averages in place of what is trained."""
        refresh.check_not_refreshed(self._retired)
        if self.has_averages_in_place:
            raise averages_in_place_error()

    @contextlib.contextmanager
    def exclusive_access(self) -> Iterator[None]:
        """Context manager that holds `lock`; a thread that steps continuously lets it in first (see `acquire_all`)."""
        self.waiting += 1
        try:
            with self.lock:
                yield
        finally:
            self.waiting -= 1

    def _named_variables(self) -> dict[str, Any]:
        parameters, frozen, running, rng, _ = self.variables
        groups = {
            "model": {**parameters, **frozen},
            "running": running,
            "rng": rng,
            "optimizer": optimizer_variables(self.optimizer, list(parameters)),
            **{f"average/{role}": own for role, own in self.averages.items()},
            "loss_scale": self._scale._asdict(),
        }
        named = {f"{group}/{name}": variable for group, members in groups.items() for name, variable in members.items()}
        return {**named, "step": self._step}

    def _ready(self) -> _TrainingVariables:
        if self._training is None:
            raise ModelError(
                "the model is not built, so its variables do not exist yet. Run one step or value_and_grad first, or "
                "build the model before init: call it once, or give its first layer an Input."
            )
        return self._training


States = Sequence[TensorFlowState]


def acquire_all(states: States) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that acquires the locks of all states for one step, always in the same order.

    A Python lock usually returns to the thread that has just released it, so a thread that steps continuously would
    block an export. So it pauses first if a thread waits.
    """
    if any(state.waiting for state in states):
        time.sleep(_PAUSE_SECONDS)
    return states[0].lock if len(states) == 1 else _acquire_in_order(states)


@contextlib.contextmanager
def _acquire_in_order(states: States) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for state in sorted(states, key=id):
            stack.enter_context(state.lock)
        yield


def _read_values(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tf.identity(native_variable(variable)) for name, variable in variables.items()}


def _write_values(variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    assign_values(variables.values(), [values[name] for name in variables])
