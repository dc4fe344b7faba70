"""`init`, `train_step`, `value_and_grad` and `apply_gradients`.

They find the backend and do the host's part: one recipe per state, and the check for a stuck scale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Never, Protocol, TypeVar, overload

from polyamp.contract import registry
from polyamp.contract.backend import ConsumesStates, KeepsAverages, MonitorsSteps, State, ValueAndGrad
from polyamp.errors import ArgumentError, LossScaleStuckError, RecipeError, UnsupportedError
from polyamp.recipe.policy import check_supported
from polyamp.recipe.recipe import Recipe
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules import stuck_scale
from polyamp.rules.loss_weights import WeightFunction
from polyamp.rules.stuck_scale import StuckFinding
from polyamp.rules.update_decision import Skip
from polyamp.train import argument_checks

if TYPE_CHECKING:
    from polyamp.monitor.monitor import Monitor

M = TypeVar("M")
S = TypeVar("S", bound=State)


def init(model: M, recipe: Recipe, *, backend: str | None = None, **options: Any) -> State[M]:
    """Return the training state of a model under a recipe.

    Args:
        model: `nn.Module`; `keras.Model`; nnx or equinox module; `(linen_module, variables)`;
            `(hk.Transformed, params)`; `(apply_fn, params)`.
        recipe: the recipe to train it with.
        backend: the backend's name, if the model does not determine it, as `(apply_fn, NumPy params)` does not.
        **options: further options of the backend, such as `rngs={"dropout": 0}` in JAX.

    Returns:
        A state. In torch and Keras it contains the model itself, which the step updates in place; in JAX it is a
        pytree.

    Raises:
        PolyampError: this model, backend or device does not support a setting of the recipe (S20).
    """
    if not isinstance(recipe, Recipe):
        raise argument_checks.not_a_recipe_error(recipe, "Write polyamp.init(model, recipe)")
    argument_checks.check_model(model, backend)
    if backend is not None:
        registry.check_backend_argument(backend, model)
    found = registry.get(backend) if backend is not None else registry.backend_for(model)
    if recipe.ema is not None and not isinstance(found, KeepsAverages):
        raise UnsupportedError(f"the {found.name} backend keeps no averages. Received: {recipe.ema}. Use ema=None.")
    state: State[M] = check_supported(found, recipe.policy).init(model, recipe, **options)
    if getattr(recipe.optimizer, "groups", ()) and not hasattr(state, "groups"):
        raise UnsupportedError(
            f"the {found.name} backend of this version has one set of hyperparameters for all parameters. Received: "
            f"{len(recipe.optimizer.groups)} groups. Use optimizer.replace(groups=())."
        )
    return state


class TrainStep:
    """Training step: `state, result = step(state, batch)`; see `train_step`.

    It can be pickled and copied at any time, if `loss_fn` can; a copy compiles anew at its first call.
    """

    def __init__(
        self, loss_fn: LossFunction, recipe: Recipe, options: dict[str, Any], monitor: Monitor | None = None
    ) -> None:
        self.loss_fn: Final = loss_fn
        self.recipe: Final = recipe
        self.monitor: Final = monitor
        self._options = options
        self._loss_scaler = recipe.loss_scaler
        self._run: dict[Any, StepFunction] = {}
        self._accepted: Recipe | None = None

    def __repr__(self) -> str:
        return f"TrainStep(loss_fn={getattr(self.loss_fn, '__name__', self.loss_fn)!r}, recipe={self.recipe!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a pickle or a copy, without compiled functions, which belong to this object."""
        return {**self.__dict__, "_run": {}, "_accepted": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        """Return a copy for the same states. It shares the monitor, and the frozen recipe, which may
        contain the states' optimizer."""
        import copy

        memo.setdefault(id(self.recipe), self.recipe)
        if self.monitor is not None:
            memo.setdefault(id(self.monitor), self.monitor)
        made = TrainStep.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __call__(self, state: S, batch: Any, *more: Never) -> tuple[S, StepResult]:
        """Run one step: scaled loss, gradients, finite flag, clip, optimizer, scale adjustment (S6 to S15)."""
        try:
            backend, recipe = state.backend, state.recipe
        except AttributeError:
            raise argument_checks.not_a_state_error(state, batch, "step(state, batch)") from None
        if more:
            raise argument_checks.extra_batch_error(more)
        if recipe is not self._accepted:
            self._accept(recipe)
        run, due = (self._run.get(backend.name) if self.monitor is None else None), None
        if run is None:
            run, due = self._chosen_run(state)
        given = state
        try:
            state, result = run(state, batch)
        except Exception as error:
            if due is not None and self.monitor is not None:
                self.monitor.cancel_call()
            _add_loss_error_hints(error, self.loss_fn, [state], batch)
            raise
        try:
            if state.watch.is_due(self._loss_scaler):
                _check_stuck_scale(state, lambda: self._not_finite(state, batch))
        except LossScaleStuckError:
            if isinstance(backend, ConsumesStates):
                backend.hand_back(given, state)
            raise
        if due is not None and self.monitor is not None:
            self.monitor.end_call(state, result, due=due)
            result = result._replace(monitor=None)
        return state, result

    def _chosen_run(self, state: State) -> tuple[StepFunction, bool | None]:
        """Return the step to run, and whether a monitor reads its figures: of two compiled steps the host chooses one.

        Inside of a compiled function of the user's own the figures leave the step in its result (S35). There, and
        without a monitor, it is None.
        """
        backend, monitor = state.backend, self.monitor
        due: bool | None = None
        options = {}
        if monitor is not None:
            if not isinstance(backend, MonitorsSteps):
                raise UnsupportedError(
                    f"the {backend.name} backend of this version has no monitor. Leave out monitor=."
                )
            traced = not backend.is_concrete(state.step)
            due = None if traced else monitor.begin_call()
            if due or (traced and monitor.enabled):
                options = {"monitor": monitor.selection(state.recipe, traced=traced)}
        key: Any = (backend.name, *options.values()) if options else backend.name
        run = self._run.get(key)
        if run is None:
            run = self._run[key] = backend.train_step(self.loss_fn, self.recipe, **self._options, **options)
        return run, due

    def _accept(self, recipe: Recipe) -> None:
        if recipe != self.recipe:
            raise RecipeError(
                "state and step were made with different recipes; call init and train_step with the same one. "
                f"State: {recipe}. Step: {self.recipe}."
            )
        self._accepted = recipe

    def _not_finite(self, state: State, batch: Any) -> StuckFinding:
        """Return what is not finite on any micro-batch of this batch, by computing the gradients again."""
        names: dict[str, None] = {}
        finite, first = True, None
        value_and_grad_ = state.backend.value_and_grad(self.loss_fn)
        batches = batch if isinstance(batch, list) and self.recipe.accumulate_steps > 1 else [batch]
        for number, part in enumerate(batches):
            value, (gradients,) = value_and_grad_([state], part)
            loss = float(state.backend.to_numpy(value[0] if isinstance(value, tuple) else value))
            own = _non_finite_names(state.backend, gradients)
            names.update(dict.fromkeys(own))
            finite = finite and math.isfinite(loss)
            first = number if first is None and own else first
        which = "batch" if len(batches) == 1 or first is None else f"batch[{first}]"
        scale = self.recipe.loss_scaler.min_scale if self.recipe.loss_scaler.scales else 1.0
        loss_fn = getattr(self.loss_fn, "__name__", "loss_fn")
        given = f"{loss_fn if loss_fn.isidentifier() else 'loss_fn'}, state.recipe.policy, state.model, {which}"
        return StuckFinding(tuple(names), finite, f"polyamp.find_nonfinite({given}, loss_scale={scale:g})")


def train_step(
    loss_fn: LossFunction,
    recipe: Recipe,
    *,
    weight: WeightFunction | None = None,
    monitor: Monitor | None = None,
    **options: Any,
) -> TrainStep:
    """Return a training step for any framework.

    Args:
        loss_fn: `loss_fn(model, batch)` returning a scalar loss, or `(loss, aux)`; the loss may be a
            `polyamp.losses.Mean`.
        recipe: the recipe that the state was made with.
        weight: `weight(batch)` returns the divisor of that batch's mean loss: a number or a scalar of the framework, 0
            for a batch without contribution. Micro-batches and replicas are weighted by it (S8, S9). By default they
            are weighted by their rows, or by the divisor of a loss of `polyamp.losses`.
        monitor: a `polyamp.Monitor`, which reads figures of every n-th step (S35).
        **options: options of the state's backend, such as `compile=` (JAX and TensorFlow compile by default).

    Returns:
        A callable `(state, batch) -> (state, StepResult)`; inside your own `jit` or `vmap` it cannot check for a
        stuck scale. `batch` is a pytree of NumPy or native arrays of any number of rows; with
        `accumulate_steps` of N above 1, also a list of up to N micro-batches.

    Raises (from the returned callable):
        LossScaleStuckError: see `LossScaler.patience`.
        PolyampError: an unsupported state, loss, batch or option. Errors of `loss_fn` itself propagate, with a note
            that shows its arguments.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
        >>> def loss_fn(model, batch):
        ...     return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])
        >>> state = polyamp.init(MLP.random([4, 8, 1], seed=0), recipe)
        >>> step = polyamp.train_step(loss_fn, recipe)
        >>> state, result = step(state, {"x": np.ones((2, 4), "f4"), "y": np.zeros((2, 1), "f4")})
        >>> bool(result.skipped), int(result.step)
        (False, 1)
    """
    argument_checks.check_loss_fn(loss_fn, "polyamp.train_step(loss_fn, recipe)", registry.entries())
    if not isinstance(recipe, Recipe):
        raise argument_checks.not_a_recipe_error(recipe, "Write polyamp.train_step(loss_fn, recipe)")
    argument_checks.check_weight(weight)
    if monitor is not None:
        argument_checks.check_monitor(monitor, recipe)
    return TrainStep(loss_fn, recipe, options if weight is None else {**options, "weight": weight}, monitor)


class ValueAndGradients(Protocol):
    """Callable that `value_and_grad` returns."""

    @overload
    def __call__(self, state: State, batch: Any) -> tuple[Any, Gradients]: ...
    @overload
    def __call__(self, state: list[S], batch: Any) -> tuple[Any, list[Gradients]]: ...


def value_and_grad(loss_fn: LossFunction, *, weight: WeightFunction | None = None, **options: Any) -> ValueAndGradients:
    """Return the first half of a step: `value, gradients = value_and_grad(loss_fn)(state, batch)`.

    The loss is scaled before differentiation and the gradients are unscaled after it (S6, S7). For a list of states,
    `loss_fn` receives a tuple of their models, and the result has a list of `Gradients`. The state does not change,
    except for its random streams (S12). `weight` is that of `train_step`, by which replicas are weighted (S9).

    Returns:
        A callable. `value` is the result of `loss_fn`, with the unscaled loss in float32. A parameter that several
        states share is one parameter: each of their `Gradients` contains its whole gradient (S23).

    Raises (from the returned callable):
        ArgumentError: no state.
        RecipeError: one state twice.
    """
    argument_checks.check_loss_fn(loss_fn, "polyamp.value_and_grad(loss_fn)(state, batch)", registry.entries())
    argument_checks.check_weight(weight)
    options = options if weight is None else {**options, "weight": weight}
    runs: dict[str, ValueAndGrad] = {}

    def run(state: Any, batch: Any) -> Any:
        states, several = _as_list(state, batch, "value_and_grad(loss_fn)(state, batch)")
        _check_distinct(states)
        backend = states[0].backend
        if backend.name not in runs:
            runs[backend.name] = backend.value_and_grad(loss_fn, **options)
        try:
            value, gradients = runs[backend.name](states, batch)
        except Exception as error:
            _add_loss_error_hints(error, loss_fn, states, batch)
            raise
        return value, (gradients if several else gradients[0])

    return run


@overload
def apply_gradients(state: S, grads: Gradients, *, skip: Skip = "all") -> tuple[S, StepResult]: ...
@overload
def apply_gradients(
    state: list[S], grads: list[Gradients], *, skip: Skip = "all"
) -> tuple[list[S], list[StepResult]]: ...
def apply_gradients(state: Any, grads: Any, *, skip: Skip = "all") -> tuple[Any, Any]:
    """Run the second half of a step: finite flag, clip, optimizer, one scale adjustment (S9 to S15).

    Args:
        state: a state, or a list of states that share one scaler (S14).
        grads: the `Gradients` of each.
        skip: with several states, "all" (if one overflows, none is updated) or "each". The scale is adjusted once,
            on whether any overflowed.

    Returns:
        The new state and a `StepResult` whose `loss` is None; lists of them for a list of states. A parameter whose
        gradient is None, and its optimizer state, stay unchanged (S23). If several states share a parameter, each
        state's optimizer applies that parameter's one gradient.

    Raises:
        GradientError: gradients that do not match the state, or are all None.
        RecipeError: several states whose scalers differ, or one state twice.
        LossScaleStuckError: see `LossScaler.patience`.
    """
    states, several = _as_list(state, grads, "polyamp.apply_gradients(state, grads)")
    if skip not in ("all", "each"):
        raise RecipeError(f"skip must be 'all' or 'each'. Received: skip={skip!r}.")
    argument_checks.check_gradients(grads, len(states), several=several)
    _check_distinct(states)
    gradients: Sequence[Gradients] = grads if several else [grads]
    if len({item.recipe.loss_scaler for item in states}) > 1:
        raise RecipeError("states that step together must share one scaler; their recipes have different ones.")
    backend = states[0].backend
    new_states, results = backend.apply_gradients(states, gradients, skip)
    for new, item in zip(new_states, gradients, strict=True):
        if new.watch.is_due(new.recipe.loss_scaler):
            _check_stuck_scale(new, functools.partial(_non_finite_names, backend, item))
    return (new_states, results) if several else (new_states[0], results[0])


def _add_loss_error_hints(error: Exception, loss_fn: LossFunction, states: Sequence[Any], batch: Any) -> None:
    from polyamp.train import error_hints  # has imports that an ordinary start of polyamp does not need

    error_hints.add_error_hints(error, loss_fn, states, batch)


def _check_stuck_scale(state: State, names: Callable[[], StuckFinding | list[str]]) -> None:
    """Read the state on the host after a step for which a check is due (S17)."""
    backend = state.backend
    if backend.is_concrete(state.scale_state.stuck):
        stuck = int(backend.to_numpy(state.scale_state.stuck))
        stuck_scale.check_stuck(stuck, state.recipe.loss_scaler, names, stacklevel=4)


def _check_distinct(states: Sequence[Any]) -> None:
    """Raise if a list contains one state twice: its update would be applied twice, or partly lost."""
    for index, state in enumerate(states):
        first = next(number for number, other in enumerate(states) if other is state)
        if first != index:
            raise RecipeError(
                f"states must be different ones, each once. Received: the same state at positions {first} and {index}. "
                "Pass it once; loss_fn can call its model as often as it likes."
            )


def _as_list(state: Any, other: Any, call: str) -> tuple[list[Any], bool]:
    """Return the states as a list, and whether they were passed as one.

    Raises:
        ArgumentError: the value is neither.
    """
    if not isinstance(state, list):
        if not argument_checks.is_state(state):
            raise argument_checks.not_a_state_error(state, other, call, several=True)
        return [state], False
    if not state:
        raise ArgumentError(f"{call}: states must hold at least one state. Received: an empty list.")
    for position, each in enumerate(state):
        if not argument_checks.is_state(each):
            raise argument_checks.not_a_state_error(each, other, call, several=True, position=position)
    return state, True


def _non_finite_names(backend: Any, gradients: Gradients) -> list[str]:
    import numpy as np

    return [
        name
        for name, value in backend.named_gradients(gradients)
        if value is not None and not np.isfinite(backend.to_numpy(value).astype(np.complex128)).all()
    ]
