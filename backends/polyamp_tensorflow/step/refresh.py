"""The state that goes on after a Keras model was changed in place, or another made around its layers (S28).

A parameter stayed if it is the same variable. polyamp's own optimizers are made anew and given the values of what
stayed; a native optimizer is the user's object, so it is built again in place. Called by the backend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.rules.growing import Growth, Known
from polyamp_tensorflow.arrays import raw
from polyamp_tensorflow.compat import NO_SLOTS, begin_again, index_in, moving_averages, own_trainable
from polyamp_tensorflow.models.layers import check_model, is_built
from polyamp_tensorflow.models.variables import variables_of
from polyamp_tensorflow.step.optimizer_checks import members
from polyamp_tensorflow.step.optimizers import SpecOptimizer
from polyamp_tensorflow.step.state import TensorFlowState

Named = Mapping[str, Any]


def refreshed(state: TensorFlowState, model: Any, growth: Growth) -> TensorFlowState:
    """A new state; the old one refuses to step from then on. Where this fails, all is as it was.

    Raises:
        ModelError: a model that is not built; what `init` refuses.
        UnsupportedError: a native optimizer that cannot be built again.
    """
    model = state.model if model is None else model
    check_model(model)
    if not is_built(model) or not state.is_ready:
        raise ModelError(
            "refresh: the model is not built, so its variables do not exist yet. Call the changed model once, or give "
            "its new layers an input shape, then polyamp.refresh."
        )
    with state.between_steps(), state.strategy.scope():
        state.check_alive()
        before, now = state.variables.parameters, variables_of(model).parameters
        stayed = growth.stayed(_known(before), _known(now))
        if is_spec(state.recipe.optimizer):
            new = TensorFlowState(model, state.recipe, state.backend)
            _carry(state.optimizer, new.optimizer, before, now, stayed)
        else:
            with _begun_again(state.optimizer) as (old, built_for):
                new = TensorFlowState(model, state.recipe, state.backend)
                places = {id(raw(variable)): number for number, variable in enumerate(built_for)}
                pairs = [(index_in(new.optimizer, now[n]), places[id(raw(before[was]))]) for n, was in stayed.items()]
                _carry_native(old, vars(new.optimizer), len(places), pairs)
                _begin_averages(new.optimizer, {number for number, _ in pairs})
            new.optimizer_settings = state.optimizer_settings  # as they were at init, for checkpoints
        new.go_on(state)
        return new


def _known(named: Named) -> dict[str, Known]:
    return {name: Known(id(raw(variable)), tuple(variable.shape)) for name, variable in named.items()}


def _carry(old: SpecOptimizer, new: SpecOptimizer, before: Named, now: Named, stayed: Mapping[str, str]) -> None:
    """Slots, rate and counts; a parameter that is new has missed all updates so far (S23)."""
    slots = old.named_slots(list(before))
    for name, slot in new.named_slots(list(now)).items():
        path, _, word = name.rpartition("/")
        found = slots.get(f"{stayed[path]}/{word}") if path in stayed else None
        if found is not None:
            raw(slot).assign(raw(found))
    missed, count = raw(old.missed_updates).numpy(), int(raw(old.iterations))
    places = {name: number for number, name in enumerate(before)}
    kept = [missed[places[stayed[name]]] if name in stayed else count for name in now]
    raw(new.missed_updates).assign(np.array(kept, np.int32))
    raw(new.iterations).assign(raw(old.iterations))
    if not callable(new.spec.learning_rate) and not callable(old.spec.learning_rate):
        raw(new.learning_rate).assign(raw(old.learning_rate))  # which a callback may have moved


@contextlib.contextmanager
def _begun_again(optimizer: Any) -> Iterator[tuple[Named, list[Any]]]:
    """A native optimizer as it was before it was built. What it held meanwhile, and holds again if the block fails, and
    the variables that it was built for.

    Raises:
        UnsupportedError: it keeps something that belongs to no parameter and to all of them.
    """
    if len(members(optimizer)) > 1:
        raise UnsupportedError(
            "refresh does not build a keras.optimizers.MultiOptimizer again. Use one optimizer, or one of polyamp's "
            "specs with groups=[polyamp.Group(...)]."
        )
    old, built_for = dict(vars(optimizer)), list(own_trainable(optimizer))
    _check_slots(optimizer, old)
    try:
        begin_again(optimizer)
        yield old, built_for
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(old)
        raise


def _begin_averages(optimizer: Any, kept: Collection[int]) -> None:
    """The moving average (`use_ema`) of a parameter that is new starts at the parameter, as Keras's does at the first
    update; from 0 it would come in as a weight of nearly nothing when it is written over the parameter."""
    for variable, average in moving_averages(optimizer) if optimizer.use_ema else ():
        if index_in(optimizer, variable) not in kept:
            average.assign(variable)


def _check_slots(optimizer: Any, held: Named) -> None:
    """Refuse an optimizer some of whose variables are neither slots, in lists like the parameters, nor scalars."""
    count = len(own_trainable(optimizer))
    known = {id(v) for name, value in held.items() for v in _variables(name, value, count)}
    for variable in optimizer.variables:
        if id(variable) not in known:
            raise UnsupportedError(
                f"refresh cannot tell which parameter {type(optimizer).__qualname__} keeps {variable.path!r} for. Use "
                "one of polyamp's specs, or an optimizer that keeps a list for each kind of slot."
            )


def _variables(name: str, value: Any, count: int) -> list[Any]:
    """The variables of one attribute: the optimizer's own, or a slot of every parameter."""
    if hasattr(value, "assign"):
        return [value]
    slots = isinstance(value, list) and len(value) == count and name not in NO_SLOTS
    return [slot for slot in value if hasattr(slot, "assign")] if slots else []


def _carry_native(old: Named, new: Named, count: int, pairs: list[tuple[int, int]]) -> None:
    """Values by the names of the optimizer's attributes: of all parameters together, and slots of what stayed.

    Args:
        old, new: its attributes before and now.
        count: parameters before.
        pairs: numbers of each parameter that stayed, now and before.
    """
    for name, value in new.items():
        was = old.get(name)
        if hasattr(value, "assign") and hasattr(was, "assign"):
            value.assign(was)
        elif isinstance(value, list) and name not in NO_SLOTS and isinstance(was, list) and len(was) == count:
            for mine, its in pairs:
                if hasattr(value[mine], "assign") and hasattr(was[its], "assign"):
                    value[mine].assign(was[its])
