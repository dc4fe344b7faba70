"""`diagnose`: trains a model in float32 and under its policy, and finds the modules that must stay in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

from polyamp.contract import registry
from polyamp.diagnosis.report import DiagnoseReport
from polyamp.diagnosis.report_data import DiagnosisTrial, ModuleMagnitudes
from polyamp.diagnosis.sensitive_set import find_sensitive
from polyamp.diagnosis.trainings import DiagnosisTraining, Magnitudes, OnTrial, loss_distance
from polyamp.errors import ArgumentError, describe_value
from polyamp.float_formats import FORMATS
from polyamp.monitor.exponents import tensor_stats
from polyamp.monitor.records import TensorStats
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction

MARGIN: Final = 8.0
"""Factor that the recommended loss scale keeps the largest gradient below the largest number."""
_ALLOWED_FACTOR: Final = 4.0
"""Multiple of the distance that rounded weights alone bring, up to which a training agrees with float32 (twice is what
S21 allows two backends; a training rounds in every step, and not only once)."""
_LOST_SHARE: Final = 0.01
"""Share of a module's numbers that underflow or are subnormal, from which on it is suspicious."""
_ROUNDINGS: Final = 16.0
"""Least tolerance, in units of the compute dtype's roundoff."""


def diagnose(
    model: Any,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    recipe: Recipe,
    *,
    backend: str | None = None,
    on_trial: OnTrial | None = None,
    **options: Any,
) -> DiagnoseReport:
    """Find the smallest set of modules that must stay in float32, and a loss scale, by training the model.

    The model is trained on the batches in float32 and then under the recipe's policy. If these losses do not follow the
    float32 ones, sets of modules are kept in float32, the most suspicious by their magnitudes first, until the smallest
    set that agrees is known: at most `2 * k * log2(n)` trainings for k of n modules. The given model does not change.

    Args:
        model: as `polyamp.init` takes it.
        loss_fn: `loss_fn(model, batch)`.
        batches: a list of batches; each is one update. Ten to fifty show most faults.
        recipe: its policy is what is diagnosed: "mixed_float16" or "mixed_bfloat16".
        backend: its name, if the model does not determine it.
        on_trial: `on_trial(done, most)` after each training.
        **options: of `polyamp.init`.

    Raises:
        ArgumentError: no batches, or a policy that computes in float32.
        UnsupportedError: the backend does not show its modules.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
        >>> x = np.random.default_rng(0).normal(size=(4, 8, 4)).astype("f4")
        >>> report = polyamp.diagnose(
        ...     MLP.random([4, 8, 1], seed=0),
        ...     lambda model, x: polyamp.losses.mean_squared_error(model(x), x[:, :1]),
        ...     list(x),
        ...     recipe,
        ... )
        >>> report.outcome, report.overrides
        ('fits', {})
    """
    if not isinstance(recipe, Recipe):
        raise ArgumentError(
            f"recipe must be a polyamp.Recipe. Received: {describe_value(recipe)}. Write "
            "diagnose(model, loss_fn, batches, recipe)."
        )
    if isinstance(batches, str) or not isinstance(batches, Sequence) or not batches:
        raise ArgumentError(f"batches must be a list of at least one batch. Received: {describe_value(batches)}.")
    compute = recipe.policy.compute
    if FORMATS[compute].bits >= 32:
        raise ArgumentError(
            f"recipe must have a policy that computes in 16 bits. Received: {recipe.policy}. Use "
            'recipe.replace(policy="mixed_float16").'
        )
    chosen = registry.get(backend) if backend is not None else registry.backend_for(model)
    training = DiagnosisTraining(chosen, model, loss_fn, batches, recipe, options)
    return _Diagnosis(training, chosen.name, recipe, len(batches), on_trial).run()


class _Diagnosis:
    """One diagnosis in progress."""

    def __init__(
        self, training: DiagnosisTraining, backend: str, recipe: Recipe, updates: int, on_trial: OnTrial | None
    ) -> None:
        self._training, self._backend, self._recipe, self._updates = training, backend, recipe, updates
        self._compute = recipe.policy.compute
        self._on_trial = on_trial
        self._done = 0
        self._trials: list[DiagnosisTrial] = []

    def run(self) -> DiagnoseReport:
        losses, magnitudes = self._training.float32_run()
        self._advance()
        scale = _recommended_scale(magnitudes.largest_gradient, self._compute)
        modules = [_module_magnitudes(name, magnitudes, self._compute, scale) for name in magnitudes.modules]
        report = functools.partial(
            DiagnoseReport,
            sensitive=[],
            backend=self._backend,
            policy=str(self._recipe.policy),
            compute=self._compute,
            updates=self._updates,
            loss_scale=scale,
            largest_gradient=magnitudes.largest_gradient,
            trials=self._trials,
            modules=modules,
            losses=losses,
        )
        if len(losses) < self._updates or not all(map(math.isfinite, losses)):
            return report(outcome="float32", tolerance=0.0)
        tolerance = self._tolerance(losses)

        def agrees(sensitive: frozenset[str]) -> bool:
            trial = self._training.trial(sorted(sensitive), magnitudes.modules, losses, tolerance)
            self._trials.append(trial)
            self._advance()
            return trial.agrees

        if agrees(frozenset()):
            return report(outcome="fits", tolerance=tolerance)
        # Of two modules in a row the later one comes first: float32 in the earlier one would be handed on to it.
        places = {each.module: place for place, each in enumerate(modules)}
        order = sorted(modules, key=lambda each: (_suspicion(each), places[each.module]), reverse=True)
        leaves = [each.module for each in order if _is_leaf(each, modules)]
        inner = [each.module for each in modules if not _is_leaf(each, modules)]
        if not leaves or not agrees(frozenset([*leaves, *inner])):
            return report(outcome="outside", tolerance=tolerance)
        sensitive = find_sensitive([*leaves, *inner], agrees)
        found = sorted(sensitive, key=places.__getitem__)
        return report(outcome="overrides", sensitive=found, tolerance=tolerance)

    def _tolerance(self, losses: Sequence[float]) -> float:
        """Return the distance up to which a training agrees, from what rounding the first weights alone brings."""
        rounded = self._training.rounded_run(self._compute)
        self._advance()
        own = loss_distance(rounded, losses) if len(rounded) == len(losses) else 0.0
        least = _ROUNDINGS * FORMATS[self._compute].unit_roundoff
        return max(_ALLOWED_FACTOR * own if math.isfinite(own) else 0.0, least)

    def _advance(self) -> None:
        self._done += 1
        if self._on_trial is not None:
            self._on_trial(self._done, None)


def _recommended_scale(largest: float, compute: str) -> float:
    """Return the largest power of two that keeps gradients `MARGIN` times below the largest number."""
    form = FORMATS[compute]
    if not form.needs_scale or not largest:
        return 1.0
    return float(2.0 ** min(max(math.floor(math.log2(form.largest / MARGIN / largest)), -126), 126))


def _module_magnitudes(name: str, found: Magnitudes, compute: str, scale: float) -> ModuleMagnitudes:
    def stats(kind: str, factor: float = 1.0) -> TensorStats | None:
        counts = found.counts.get((name, kind))
        return None if counts is None else tensor_stats(counts, found.squares[name, kind] ** 0.5, compute, factor)

    return ModuleMagnitudes(
        module=name,
        activations=stats("activations"),
        cotangents=stats("cotangents", scale),
        gradients=stats("gradients", scale),
        weights=stats("weights"),
    )


def _is_leaf(each: ModuleMagnitudes, modules: Sequence[ModuleMagnitudes]) -> bool:
    return not any(other.module.startswith(f"{each.module}/") for other in modules)


def _suspicion(each: ModuleMagnitudes) -> int:
    """Return what of a module's numbers does not fit the compute dtype: 2 an overflow, 1 a lost share, 0 nothing."""
    known = [stats for stats in (each.activations, each.weights, each.cotangents, each.gradients) if stats is not None]
    if any(stats.overflow for stats in known):
        return 2
    return int(any(stats.underflow + stats.subnormal > _LOST_SHARE for stats in known))
