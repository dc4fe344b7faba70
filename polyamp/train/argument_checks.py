"""Argument checks of `init`, `train_step`, its two halves, `save` and `restore` (S20).

They detect a model in place of a state, arguments in the wrong order, or a loss in place of a function. They run only
if an argument has an unexpected type, so an ordinary call pays nothing.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from polyamp.errors import ArgumentError, GradientError, ModelError, RecipeError, describe_value
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.records import Record
from polyamp.results import Gradients, StepResult

_STATE_REQUIREMENT: Final = "state must be what polyamp.init returned"
_INIT_EXAMPLE: Final = "Make one: state = polyamp.init(model, recipe)."


def check_weight(weight: Any) -> None:
    """Raise if `weight` is not a function.

    Raises:
        ArgumentError: it is no function.
    """
    if weight is not None and not callable(weight):
        raise ArgumentError(
            "weight must be a function of a batch that returns what the mean of its loss is over, such as "
            f"weight=lambda batch: (batch['labels'] != -100).sum(). Received: {describe_value(weight)}."
        )


def is_state(value: Any) -> bool:
    """Whether a value is a training state of some backend."""
    return all(hasattr(value, name) for name in ("backend", "recipe"))


def not_a_state_error(
    given: Any, other: Any, call: str, *, several: bool = False, position: int | None = None
) -> ArgumentError:
    """Return the error for another value in place of a state.

    Args:
        given: the received value.
        other: the next argument.
        call: how the call is written, such as "step(state, batch)".
        several: whether a list of states is accepted too.
        position: index of the value in such a list.
    """
    accepted = f"{_STATE_REQUIREMENT}, or a list of states" if several else _STATE_REQUIREMENT
    where = "" if position is None else f" at position {position}"
    return ArgumentError(
        f"{call}: {accepted}. Received{where}: {_describe_argument(given, other)}. {_state_hint(given, other, call)}"
    )


def _describe_argument(given: Any, other: Any) -> str:
    swapped = (
        f", and the state as {_SWAPPED_ARGUMENTS.get(type(given).__name__, 'the next argument')}"
        if is_state(other)
        else ""
    )
    if isinstance(given, StepResult | Gradients):
        return f"a {type(given).__name__}{swapped}"
    if type(given) in (list, tuple) and given:
        states = sum(map(is_state, given))
        kind = type(given).__name__
        if len(given) == 2 and states == 1 and isinstance(given[1], StepResult):
            return f"a {kind} of a state and a StepResult"
        if states == len(given):
            return f"a {kind} of {states} state{'s' if states > 1 else ''}"
    return f"{describe_value(given)}{swapped}"


_SWAPPED_ARGUMENTS: Final = {
    "dict": "batch",
    "Gradients": "grads",
    "PosixPath": "path",
    "WindowsPath": "path",
    "str": "path",
}


def _state_hint(given: Any, other: Any, call: str) -> str:
    if is_state(other):
        return f"The two are swapped: {call}."
    results = (given, *given) if type(given) in (list, tuple) else (given,)
    if any(isinstance(each, StepResult) for each in results):
        return "A step returns both: state, result = step(state, batch)."
    if type(given) in (list, tuple) and given and all(map(is_state, given)):
        if "value_and_grad" in call or "apply_gradients" in call:
            return "Several states come as a list: [state, other]."
        return (
            "One state at a time: for a loss of several models, polyamp.value_and_grad(loss_fn)([...], batch) and "
            "polyamp.apply_gradients([...], grads); otherwise call it for each, one by one."
        )
    return _INIT_EXAMPLE


def extra_batch_error(more: Sequence[Any]) -> ArgumentError:
    """Return the error for more than one batch."""
    return ArgumentError(
        f"a step takes a state and one batch. Received: {len(more) + 2} arguments. Put the arrays into one batch: "
        "step(state, (x, y)), or a dict."
    )


def check_model(model: Any, backend: str | None) -> None:
    """Raise if no framework accepts the value as a model.

    Args:
        model: the received value.
        backend: the `backend=` argument of the call.

    Raises:
        ModelError: None, a class, a list of models or parameters, an iterator, or a state.
    """
    if is_state(model):
        said, advice = describe_value(model), "It is a state already; for a new one: polyamp.init(state.model, recipe)."
    elif model is None:
        said, advice = "None", "Does the function that makes it lack a `return`?"
    elif isinstance(model, Recipe | Policy):
        said, advice = describe_value(model), "Write polyamp.init(model, recipe)."
    elif isinstance(model, type) and backend is None:
        said, advice = describe_value(model), f"Make one: {model.__name__}(...)."
    elif type(model) is list:
        said = describe_value(model)
        advice = "Call init for each of several models, and give value_and_grad the list of their states. Parameters "
        advice += "alone are no model: pass the model itself."
        raise ModelError(f"model must be one model. Received: {said}. {advice}")
    elif type(model) in (dict, OrderedDict):
        said = describe_value(model)
        advice = "Parameters alone are no model: pass the model that has them. torch: after "
        advice += "model.load_state_dict(...). JAX: with the function that uses them, (apply_fn, params)."
    elif hasattr(model, "__next__"):
        said, advice = describe_value(model), "Pass the model itself, not model.parameters()."
    else:
        return
    raise ModelError(f"model must be a model of one of the frameworks. Received: {said}. {advice}")


def not_a_recipe_error(value: Any, call: str) -> RecipeError:
    """Return the error for another value in place of a recipe."""
    own = f" {call}." if not isinstance(value, Record | Mapping | str | type) else ""
    if isinstance(value, type):
        own = " Call it: polyamp.Recipe(policy='mixed_float16')." if value is Recipe else own
    elif isinstance(value, str):
        file = value.endswith((".toml", ".json"))
        own = f" Write polyamp.Recipe.load({value!r})." if file else f" Write polyamp.Recipe(policy={value!r})."
    elif isinstance(value, Policy):
        own = " Write polyamp.Recipe(policy=policy)."
    elif isinstance(value, Record):
        name = {"spec": "optimizer", "scaler": "scaler"}.get(value.word)
        own = f" Write polyamp.Recipe(policy='mixed_float16', {name}=...)." if name else own
        return RecipeError(f"recipe must be a polyamp.Recipe. Received: {value!r}.{own}")
    elif isinstance(value, Mapping):
        own = " Write polyamp.Recipe(**fields), or polyamp.Recipe.load(path) for a file."
    return RecipeError(f"recipe must be a polyamp.Recipe. Received: {describe_value(value)}.{own}")


_NO_ROOTS: Final = {"polyamp", "reference"}
"""Backend names that are not a framework's root module; a user's module may have such a name."""
LOSS_FN_EXAMPLE: Final = (
    "Write: def loss_fn(model, batch): return polyamp.losses.mean_squared_error(model(batch['x']), batch['y'])."
)


def check_loss_fn(loss_fn: Any, call: str, roots: Collection[str]) -> None:
    """Raise if `loss_fn` is not callable, or is a framework's own loss of predictions and targets.

    Args:
        loss_fn: the received value.
        call: how the call is written.
        roots: root modules of the frameworks.

    Raises:
        RecipeError: describes the received value.
    """
    if isinstance(loss_fn, Recipe) or is_state(loss_fn):
        advice = f" Write {call}."
    elif not callable(loss_fn):
        value = isinstance(loss_fn, int | float) or hasattr(loss_fn, "dtype")
        advice = f" Pass the function itself, without calling it. {LOSS_FN_EXAMPLE}" if value else f" {LOSS_FN_EXAMPLE}"
    elif _is_frameworks_own(loss_fn, roots):
        advice = f" It takes predictions and targets. {LOSS_FN_EXAMPLE}"
    else:
        return
    shown = describe_value(loss_fn)
    raise RecipeError(f"loss_fn must be a function of (model, batch). Received: {shown}.{advice}")


def _is_frameworks_own(loss_fn: Any, roots: Collection[str]) -> bool:
    """Whether it is a loss function or class defined by a framework, not a user's function that wraps one."""
    if hasattr(loss_fn, "__wrapped__"):
        return False
    if isinstance(loss_fn, types.FunctionType | types.BuiltinFunctionType):
        module = loss_fn.__module__ or ""
        own = f"{module}.".startswith("polyamp.losses.")
        return own or module.partition(".")[0] in ({*roots, "optax"} - _NO_ROOTS)
    module = type(loss_fn).__module__
    return module.partition(".")[0] in roots and "loss" in module and not module.startswith("polyamp")


def check_gradients(gradients: Any, states: int, *, several: bool) -> None:
    """Raise if the values are not gradients of these states.

    Raises:
        GradientError: their number differs, or they are something else.
    """
    if several and (not isinstance(gradients, list) or len(gradients) != states):
        known = f"{states} state{'s were' if states > 1 else ' was'} given"
        received = f"{len(gradients)} gradients" if isinstance(gradients, list) else _format_gradients(gradients)
        raise GradientError(
            f"apply_gradients needs one Gradients per state: {known}. Received: {received}. A list of states goes with "
            "the list that value_and_grad returned for it."
        )
    for item in gradients if several else [gradients]:
        if not isinstance(item, Gradients):
            pair = isinstance(item, tuple) and len(item) == 2 and _has_gradients(item[1])
            advice = " value_and_grad returns both: value, grads = ..." if pair else ""
            raise GradientError(
                "grads must be the Gradients that value_and_grad returned (change them with "
                f"gradients._replace(values=...)). Received: {_format_gradients(item)}.{advice}"
            )


def _has_gradients(value: Any) -> bool:
    return isinstance(value, Gradients) or (type(value) is list and any(isinstance(each, Gradients) for each in value))


def _format_gradients(value: Any) -> str:
    return "a Gradients" if isinstance(value, Gradients) else describe_value(value)


def check_monitor(monitor: Any, recipe: Recipe) -> None:
    """Raise for a `monitor=` that is none, or that reads what a step of the recipe does not have.

    Raises:
        ArgumentError: says what it takes.
    """
    from polyamp.monitor.monitor import Monitor  # imports what an ordinary start of polyamp does not need

    if not isinstance(monitor, Monitor):
        raise ArgumentError(f"monitor must be a polyamp.Monitor. Received: {describe_value(monitor)}.")
    monitor.check_recipe(recipe)
