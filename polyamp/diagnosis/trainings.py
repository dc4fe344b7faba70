"""Trainings of a diagnosis: the float32 one with its magnitudes, and trials under the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from polyamp.contract.backend import Backend
from polyamp.diagnosis.report_data import DiagnosisTrial, overrides_of
from polyamp.errors import LossScaleStuckError, UnsupportedError
from polyamp.monitor.exponents import exponent_counts
from polyamp.parity.trace.observer import EagerTrainings, HasObserver, Observer, without_policies
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import LossFunction, StepResult
from polyamp.train.step import init, train_step

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

MOST_SKIPS: Final = 40
"""Skipped steps after which a trial has failed: more than a scale needs from 2^24 to below 1."""


class Magnitudes(NamedTuple):
    """Counts of exponent fields of a float32 run. Attributes: (module, kind) -> counts; (module, kind) -> sum of
    squares; the largest gradient or cotangent; the visible modules in the order of the program."""

    counts: dict[tuple[str, str], Array]
    squares: dict[tuple[str, str], float]
    largest_gradient: float
    modules: list[str]


class DiagnosisTraining:
    """The model, loss and batches of a diagnosis.

    Args:
        backend: the model's.
        model, loss_fn, batches, recipe: as `diagnose` takes them.
        options: of `init`.
    """

    def __init__(
        self,
        backend: Backend,
        model: Any,
        loss_fn: LossFunction,
        batches: Sequence[Any],
        recipe: Recipe,
        options: Mapping[str, Any],
    ) -> None:
        if not isinstance(backend, HasObserver):
            raise UnsupportedError(f"the {backend.name} backend of this version cannot record modules; see S20.")
        self._observer: Observer = backend.observer
        self._backend, self._model, self._loss_fn = backend, model, loss_fn
        self._batches = list(batches)
        self._recipe, self._options = recipe, dict(options)

    def float32_run(self) -> tuple[list[float], Magnitudes]:
        """Train in float32; return the losses and the magnitudes of the first and the last pass."""
        recipe = self._float32_recipe()
        found = Magnitudes({}, {}, 0.0, [])
        with without_policies(self._observer, self._model), self._observer.model_copy(self._model) as twin:
            state = init(twin, recipe, **self._options)
            found = self._record(state, self._batches[0], found)
            losses, state = self._train(state, recipe)
            if all(map(math.isfinite, losses)):
                found = self._record(state, self._batches[-1], found)
        return losses, found

    def rounded_run(self, compute: str) -> list[float]:
        """Train in float32 from weights that were rounded to the compute dtype; return the losses."""
        recipe = self._float32_recipe()
        with without_policies(self._observer, self._model), self._observer.model_copy(self._model) as twin:
            state = init(twin, recipe, **self._options)
            arrays = {
                name: _rounded(value, compute) if name.startswith("model/") else value
                for name, value in self._backend.export_state(state).items()
            }
            state = self._backend.import_state(state, arrays)
            return self._train(state, recipe)[0]

    def trial(
        self, sensitive: Sequence[str], modules: list[str], reference: Sequence[float], most: float
    ) -> DiagnosisTrial:
        """Train under the policy with these modules in float32; a skipped step is repeated with the same batch."""
        policy = self._recipe.policy
        overrides = {**policy.overrides, **overrides_of(list(sensitive), modules, policy.compute)}
        recipe = self._recipe.replace(policy=policy.replace(overrides=overrides), ema=None)
        with without_policies(self._observer, self._model), self._observer.model_copy(self._model) as twin:
            losses, _ = self._train(init(twin, recipe, **self._options), recipe)
        finite = len(losses) == len(self._batches) and all(map(math.isfinite, losses))
        distance = loss_distance(losses, reference) if finite else None
        return DiagnosisTrial(
            float32=sorted(sensitive),
            agrees=distance is not None and distance <= most,
            distance=distance,
            updates=len(losses),
        )

    def _float32_recipe(self) -> Recipe:
        return self._recipe.replace(policy=Policy("float32"), scaler=LossScaler.off(), ema=None)

    def _train(self, state: Any, recipe: Recipe) -> tuple[list[float], Any]:
        """Return the loss of each applied update, up to the first that is not finite or is never applied."""
        step = train_step(self._loss_fn, recipe, **self._step_options(recipe.policy))
        losses: list[float] = []
        skips = 0
        for batch in self._batches:
            while True:
                try:
                    state, result = step(state, batch)
                except LossScaleStuckError:
                    return losses, state
                if not bool(self._backend.to_numpy(result.skipped)):
                    break
                skips += 1
                if skips > MOST_SKIPS or not math.isfinite(self._host_loss(result)):  # no smaller scale mends a loss
                    return losses, state
            losses.append(self._host_loss(result))
            if not math.isfinite(losses[-1]):
                break
        return losses, state

    def _step_options(self, policy: Policy) -> dict[str, Any]:
        observer = self._observer
        if isinstance(observer, EagerTrainings) and observer.runs_eagerly(self._model, policy, len(self._batches)):
            return {"compile": False}
        return {}

    def _host_loss(self, result: StepResult) -> float:
        return float(self._backend.to_numpy(result.loss))

    def _record(self, state: Any, batch: Any, found: Magnitudes) -> Magnitudes:
        part = batch[0] if isinstance(batch, list) and self._recipe.accumulate_steps > 1 else batch
        largest = found.largest_gradient
        modules = dict.fromkeys(found.modules)

        def add(module: str, kind: str, array: Array) -> None:
            key = (module, kind)
            found.counts[key] = found.counts.get(key, 0) + exponent_counts(array)
            finite = array[np.isfinite(array)]
            found.squares[key] = found.squares.get(key, 0.0) + float(np.sum(np.square(finite, dtype=np.float64)))

        def on_capture(path: str, what: str, array: Array, dtype: str) -> None:
            nonlocal largest
            module = path.partition("#")[0]
            if what == "input" or not module:
                return
            modules.setdefault(module)
            add(module, "activations" if what == "output" else "cotangents", array)
            if what == "cotangent":
                largest = max(largest, largest_magnitude(array))

        record = self._observer.capture_pass(state, self._loss_fn, part, on_capture)
        exported = self._backend.export_state(state)
        for name, value in record.gradients.items():
            if value is not None:
                add(name.rpartition("/")[0], "gradients", np.asarray(value))
                largest = max(largest, largest_magnitude(np.asarray(value)))
        for name in state.groups.numbers:
            weight = exported.get(f"model/{name}")
            if weight is not None:
                add(name.rpartition("/")[0], "weights", np.asarray(weight))
        return found._replace(largest_gradient=largest, modules=list(modules))


def loss_distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest distance of two curves, relative to the reference and at least a twentieth of its first loss.

    >>> loss_distance([1.0, 0.5], [1.0, 0.4])
    0.2499999...
    """
    least = abs(reference[0]) / 20 or 1e-12
    pairs = zip(losses, reference, strict=True)
    return max(abs(one - other) / max(abs(other), least) for one, other in pairs)


def largest_magnitude(array: Array) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _rounded(array: Array, compute: str) -> Array:
    if array.dtype.kind != "f":
        return array
    import ml_dtypes

    narrow: Any = np.dtype(getattr(ml_dtypes, compute, compute))
    rounded: Array = array.astype(narrow).astype(array.dtype)
    return np.where(np.isfinite(rounded), rounded, array)


OnTrial = Callable[[int, int | None], None]
"""`on_trial(done, most)`: after each training; `most` is None while it is not known how many there will be."""
