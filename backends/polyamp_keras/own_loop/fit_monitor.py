"""`MonitorCallback`: gives the steps of Keras's `fit` to a `polyamp.Monitor` (S35).

The host chooses one of two train functions before each execution: Keras's own, and one that was made with
`LossScaleOptimizer.figures`. So a switch traces nothing again, and what is not read computes nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import keras

from polyamp.errors import ArgumentError, describe_value
from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp_keras.arrays import read_value
from polyamp_keras.compat import is_keras_code
from polyamp_keras.engine import ENGINE
from polyamp_keras.interrupts import replace_methods
from polyamp_keras.models.layers import own_class
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.fit_checks import scaling_optimizer
from polyamp_keras.own_loop.fit_figures import FitFigures
from polyamp_keras.own_loop.scaled_optimizer import ScaledOptimizer
from polyamp_keras.precision.apply_policy import APPLIED_BY_COMPILE

if TYPE_CHECKING:
    from polyamp.monitor.monitor import Monitor


class MonitorCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Callback that gives the steps of `fit` to a `polyamp.Monitor`: `fit(callbacks=[MonitorCallback(monitor)])`.

    A call of the monitor is an update: `accumulate_steps` batches. With `steps_per_execution` above 1 the host sees
    whole executions, and the last update of one in which a call is due is read. The loss is that of the batch, which
    `logs` do not have: Keras's is a mean over the epoch. On JAX it is NaN for a model with a
    `compute_loss_and_updates` of its own. Writers stay open; close the monitor after the last `fit`.

    On several workers of TensorFlow, give every worker's `fit` the callback, with the same `every`.

    Args:
        monitor: the monitor.
        policy: the policy that the model computes in, or its spelling; None for that of `polyamp_keras.compile`.

    Raises:
        ArgumentError: not a monitor; or, when `fit` starts, no policy for a model that has none from `compile`.
        LossScaleError: when `fit` starts, the model's optimizer is not a `polyamp_keras.LossScaleOptimizer`.

    Example:
        >>> import keras, polyamp
        >>> import polyamp_keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
        >>> polyamp_keras.compile(model, recipe, loss="mse")
        >>> monitor = polyamp.Monitor(every=2)
        >>> watch = polyamp_keras.MonitorCallback(monitor)
        >>> x, y = keras.ops.ones((8, 4)), keras.ops.zeros((8, 2))
        >>> history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[watch])
        >>> [(record.call, record.step, record.word) for record in monitor.records]
        [(2, 2, 'settled'), (4, 4, 'settled')]
    """

    def __init__(self, monitor: Monitor, policy: Policy | str | None = None) -> None:
        super().__init__()
        from polyamp.monitor.monitor import Monitor  # imports what an ordinary start does not need

        if not isinstance(monitor, Monitor):
            raise ArgumentError(f"monitor must be a polyamp.Monitor. Received: {describe_value(monitor)}.")
        self.monitor = monitor
        self._policy = None if policy is None else Policy.of(policy)
        self._run: _FitRun | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the model's train function one that the monitor can read."""
        scaling_optimizer(self.model)
        policy = self._policy or _compiled_policy(self.model)
        self._run = _FitRun(self.model, self.monitor, policy)
        function = self.model.train_function
        if not isinstance(function, _MonitoredFunction):
            function = self.model.train_function = _MonitoredFunction(self.model, function)
        function.run = None  # of a `fit` that was interrupted
        function.prepare(self._run.selection)  # on JAX the variables have no values while `fit` runs

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the next execution be the monitor's: one that no callback announces, of `train_on_batch`, is not."""
        function = self.model.train_function
        if not isinstance(function, _MonitoredFunction):  # made anew meanwhile
            return
        if function.run is not None:
            raise ArgumentError(
                "callbacks must have one MonitorCallback. Received: two. Give one polyamp.Monitor both writers."
            )
        function.run = self._run

    def on_train_end(self, logs: Any = None) -> None:
        """Read what is still on the device."""
        if self._run is not None:
            self._run.end()
        self._run = None


class _FitRun:
    """One `fit` with a monitor: which executions are read, and what the monitor gets after each.

    Args:
        model: the model.
        monitor: the monitor.
        policy: the policy that it computes in.
    """

    def __init__(self, model: Any, monitor: Monitor, policy: Policy) -> None:
        self.monitor = monitor
        self.selection = monitor.loop_selection()
        self._model = model
        self._optimizer: ScaledOptimizer = model.optimizer
        self._counts_itself = model.steps_per_execution == 1 and is_keras_code(own_class(model).train_step)
        self._per_execution = model.steps_per_execution  # calls of `apply` in an execution, as far as they are known
        self._batches = self._count_batches()
        self._collected_from: int | None = None  # the batch from which on all figures were collected
        self._view = SimpleNamespace(
            backend=SimpleNamespace(name=keras.config.backend(), to_numpy=_to_numpy),
            recipe=Recipe(policy=policy, scaler=self._optimizer.scaler),
            groups=SimpleNamespace(numbers=dict.fromkeys(model_variables(model).parameters, 0)),
        )
        monitor.begin_run(self._count_updates())

    def is_due(self) -> bool:
        """Return whether an update is due that the next execution works on. It is collected from its first batch on."""
        window = self._optimizer.accumulate_steps
        first = self._batches // window
        last = (self._batches + self._per_execution - 1) // window
        calls = self.monitor.calls + 1
        return any(self.monitor.is_due(calls + number) for number in range(last - first + 1))

    def end_execution(self, result: Any, figures: FitFigures | None) -> None:
        """Count what ran, and give the last update to the monitor if one was due.

        Args:
            result: what the train function returned.
            figures: those that were collected; None for none.
        """
        if not self._counts_itself:
            ENGINE.store_fit_state(self._model, result)
        window, before = self._optimizer.accumulate_steps, self._batches
        self._batches = before + 1 if self._counts_itself else self._count_batches()
        self._per_execution = max(self._per_execution, self._batches - before)
        if figures is None:
            self._collected_from = None
        elif self._collected_from is None:
            self._collected_from = before
        ended = self._batches // window - before // window
        due = [self.monitor.begin_call() for _ in range(ended)]
        begin = (self._batches // window - 1) * window  # of the last update that ended
        if any(due) and figures is not None and self._collected_from is not None and self._collected_from <= begin:
            self.monitor.end_call(self._view, figures.read(), due=True)
        else:
            self.monitor.flush()

    def end(self) -> None:
        """End the run."""
        ENGINE.write_fit_state(self._model)
        self.monitor.end_run(self._count_updates())

    def _count_updates(self) -> int:
        return int(_to_numpy(self._optimizer.iterations))

    def _count_batches(self) -> int:
        """Return the number of calls of `apply` so far, from the device, for which Keras waits after each execution."""
        state = self._optimizer.scale_state
        updates = self._count_updates() + int(_to_numpy(state.skipped))
        return updates * self._optimizer.accumulate_steps + int(_to_numpy(self._optimizer.micro_step))


class _MonitoredFunction:
    """A model's train function, and that with figures, made by Keras for each selection.

    Attributes:
        run: the run of the next call; None for a call that no monitor reads.
    """

    def __init__(self, model: Any, plain: Any) -> None:
        self.run: _FitRun | None = None
        self._model = model
        self._plain = plain
        self._monitored: dict[MonitorSelection, tuple[Any, FitFigures]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run an execution: of an iterator; on JAX of the state of `fit` and one."""
        run, self.run = self.run, None
        if run is None:
            return self._plain(*arguments)
        if not run.is_due():
            result = self._plain(*arguments)
            run.end_execution(result, None)
            return result
        function, figures = self._monitored[run.selection]
        optimizer = self._model.optimizer
        optimizer.figures = figures
        try:
            result = ENGINE.run_with_variables(function, figures.variables, arguments)
        finally:
            optimizer.figures = None
        run.end_execution(result, figures)
        return result

    def prepare(self, selection: MonitorSelection) -> None:
        """Make the function with figures of a selection, unless there is one."""
        if selection in self._monitored:
            return
        model = self._model
        figures = model.optimizer.make_figures(model, selection)
        step = ENGINE.monitored_train_step(model, model.train_step, figures)
        try:
            with replace_methods(model, {"train_step": step}):
                model.make_train_function(force=True)
            self._monitored[selection] = (model.train_function, figures)
        finally:
            model.train_function = self


def _to_numpy(value: Any) -> Any:
    return keras.ops.convert_to_numpy(read_value(value))


def _compiled_policy(model: Any) -> Policy:
    """Return the policy that `polyamp_keras.compile` applied to a model."""
    applied = vars(model).get(APPLIED_BY_COMPILE)
    if applied is None:
        raise ArgumentError(
            f"policy must say in which dtype {model.name!r} computes, since polyamp_keras.compile did not set it. "
            "Received: None. Write MonitorCallback(monitor, policy='mixed_float16'), or the policy in use."
        )
    policy: Policy = applied.policy
    return policy
