"""Wrong rules of a step, planted into one framework's half of polyamp while a comparison runs. Called by `finding`.

Each is what a training loop that was written by hand gets wrong; the loop here is polyamp's own, so one of its
functions is put in the place of another. The other side, in another framework, keeps the right one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from polyamp.recipe import optimizers

_BACKENDS: Final = {"torch": "polyamp_torch", "keras": "polyamp_tensorflow"}


@contextlib.contextmanager
def stepping(rule: str, library: str) -> Iterator[None]:
    """A block in which a library's side steps by a wrong rule.

    Args:
        rule: of `RULES`; "" for the right ones.
        library: of `planting.LIBRARIES`.
    """
    with contextlib.ExitStack() as stack:
        for each in RULES[rule](_BACKENDS.get(library, "polyamp_jax")) if rule else ():
            stack.enter_context(each)
        yield


def _module(backend: str, name: str) -> Any:
    return importlib.import_module(f"{backend}.{name}")


def _sum_of_micro_batches(backend: str) -> list[Any]:
    if backend == "polyamp_torch":
        update = _module(backend, "step.update")
        divisor = update.total_scale
        return [mock.patch.object(update, "total_scale", lambda scale, total, device: divisor(scale, 1.0, device))]
    if backend == "polyamp_jax":
        import jax

        home = _module(backend, "step.accumulation")
        mean = home.accumulate_gradients

        def total(loss_fn: Any, state: Any, *arguments: Any, **others: Any) -> Any:
            loss, aux, gradients = mean(loss_fn, state, *arguments, **others)
            values = jax.tree.map(lambda each: each * state.recipe.accumulate_steps, gradients.values)
            return loss, aux, gradients._replace(values=values)

        return [mock.patch.object(home, "accumulate_gradients", total)]
    home = _module(backend, "step.step")
    means = home.accumulate_gradients

    def totals(states: Any, loss_fn: Any, batch: Any, count: int, *others: Any) -> Any:
        loss, aux, found = means(states, loss_fn, batch, count, *others)
        values = [{name: None if v is None else v * float(count) for name, v in each.values.items()} for each in found]
        return loss, aux, [each._replace(values=own) for each, own in zip(found, values, strict=True)]

    return [mock.patch.object(home, "accumulate_gradients", totals)]


def _clipped_before_unscaling(backend: str) -> list[Any]:
    update = _module(backend, "step.update")
    if backend == "polyamp_torch":
        right = update.unscale_and_clip_divisor

        def divisor(norm: Any, scale: Any, limits: Any) -> Any:
            return right(norm if scale is None else norm * scale, scale, limits)

        return [mock.patch.object(update, "unscale_and_clip_divisor", divisor)]
    commit = update._commit_update

    def commits(state: Any, grads: Any, values: Any, norm: Any, decision: Any) -> Any:
        return commit(state, grads, values, norm * state.scale_state.scale, decision)

    def tensorflow_commits(state: Any, values: Any, running: Any, norm: Any, decision: Any) -> Any:
        return commit(state, values, running, norm * state.scale_state.scale, decision)

    wrong = tensorflow_commits if backend == "polyamp_tensorflow" else commits
    return [mock.patch.object(update, "_commit_update", wrong)]


def _not_unscaled(backend: str) -> list[Any]:
    if backend == "polyamp_torch":
        update = _module(backend, "step.update")
        right = update.StepReduction.finish_alone

        def without_scale(self: Any, scale: Any, device: Any) -> Any:
            return right(self, None, device)

        return [mock.patch.object(update.StepReduction, "finish_alone", without_scale)]
    if backend == "polyamp_jax":
        home = _module(backend, "step.accumulation")
        return [mock.patch.object(home, "unscale_leaf", lambda leaf, scale, dtype: leaf.astype(dtype))]
    home = _module(backend, "step.accumulation")
    made = home.Gradients
    large = 2.0**16  # the scale that a LossScaler begins with

    def gradients(values: Any, *others: Any) -> Any:
        return made({name: value * large for name, value in values.items()}, *others)

    return [mock.patch.object(home, "Gradients", gradients)]


def _never_skipped(backend: str) -> list[Any]:
    update = _module(backend, "step.update")
    right = update.decide

    def decide(scaler: Any, scale_state: Any, step: Any, stats: Any, flags: Any, *others: Any) -> Any:
        always = [flag | True for flag in flags]
        return right(scaler, scale_state, step, stats._replace(finite=stats.finite | True), always, *others)

    return [mock.patch.object(update, "decide", decide)]


def _no_bias_correction(backend: str) -> list[Any]:
    if backend == "polyamp_torch":
        made = _module(backend, "step.optimizers")
        right = made._initialize_slots

        def fill(optimizer: Any, *others: Any) -> None:
            right(optimizer, *others)
            for slots in optimizer.state.values():
                slots["step"].fill_(1e6)

        return [mock.patch.object(made, "_initialize_slots", fill)]
    home = "polyamp_keras.engines.tensorflow" if backend == "polyamp_tensorflow" else f"{backend}.arrays"
    here = importlib.import_module(home).XP
    kind = optimizers.adamw
    corrections_of = kind.corrections

    def corrections(self: Any, xp: Any, rate: Any, count: Any) -> Any:
        if xp is not here:
            return corrections_of(self, xp, rate, count)
        return {"root": 1.0 + 0.0 * count, "rate": rate + 0.0 * count}

    found = [mock.patch.object(kind, "corrections", corrections)]
    if backend == "polyamp_tensorflow":  # whose kernels make them by themselves
        kernels = importlib.import_module("polyamp_keras.engines.tensorflow_kernels")
        found.append(mock.patch.object(kernels, "_one_minus_power", lambda beta, counts: 1.0 + 0.0 * counts))
    return found


RULES: Final[dict[str, Callable[[str], list[Any]]]] = {
    "sum of micro-batches": _sum_of_micro_batches,
    "clipped before unscaling": _clipped_before_unscaling,
    "not unscaled": _not_unscaled,
    "never skipped": _never_skipped,
    "no bias correction": _no_bias_correction,
}
"""Name -> patches of a backend's package."""
