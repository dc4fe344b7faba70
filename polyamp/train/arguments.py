"""What `init`, `train_step`, the two halves, `save` and `restore` refuse to take (S20): a model where a state belongs,
arguments in the wrong order, a loss in the place of a function.

Called where an argument turned out not to be what it should; the ordinary call looks at nothing.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from polyamp.errors import ArgumentError, GradientError, ModelError, RecipeError, described
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.records import Record
from polyamp.results import Gradients, StepResult

_STATE: Final = "state must be what polyamp.init returned"
_MAKE: Final = "Make one: state = polyamp.init(model, recipe)."


def check_weight(weight: Any) -> None:
    """Refuse what cannot say how much a batch counts.

    Raises:
        ArgumentError: it is no function.
    """
    if weight is not None and not callable(weight):
        raise ArgumentError(
            "weight must be a function of a batch that returns what the mean of its loss is over, such as "
            f"weight=lambda batch: (batch['labels'] != -100).sum(). Received: {described(weight)}."
        )


def is_state(value: Any) -> bool:
    """Whether a value is a training state of some backend."""
    return all(hasattr(value, name) for name in ("backend", "recipe"))


def no_state(given: Any, other: Any, call: str, *, several: bool = False, position: int | None = None) -> ArgumentError:
    """The error for something else in the place of a state.

    Args:
        given: what came.
        other: what came as the next argument.
        call: how the call is written, such as "step(state, batch)".
        several: whether a list of states is accepted too.
        position: where in such a list it came.
    """
    accepted = f"{_STATE}, or a list of states" if several else _STATE
    where = "" if position is None else f" at position {position}"
    return ArgumentError(f"{call}: {accepted}. Received{where}: {_named(given, other)}. {_advice(given, other, call)}")


def _named(given: Any, other: Any) -> str:
    swapped = f", and the state as {_SECOND.get(type(given).__name__, 'the next argument')}" if is_state(other) else ""
    if isinstance(given, StepResult | Gradients):
        return f"a {type(given).__name__}{swapped}"
    if type(given) in (list, tuple) and given:
        states = sum(map(is_state, given))
        kind = type(given).__name__
        if len(given) == 2 and states == 1 and isinstance(given[1], StepResult):
            return f"a {kind} of a state and a StepResult"
        if states == len(given):
            return f"a {kind} of {states} state{'s' if states > 1 else ''}"
    return f"{described(given)}{swapped}"


_SECOND: Final = {"dict": "batch", "Gradients": "grads", "PosixPath": "path", "WindowsPath": "path", "str": "path"}


def _advice(given: Any, other: Any, call: str) -> str:
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
    return _MAKE


def too_many(more: Sequence[Any]) -> ArgumentError:
    """The error for more than one batch."""
    return ArgumentError(
        f"a step takes a state and one batch. Received: {len(more) + 2} arguments. Put the arrays into one batch: "
        "step(state, (x, y)), or a dict."
    )


def check_model(model: Any, backend: str | None) -> None:
    """Refuse what no framework takes for a model.

    Args:
        model: what came.
        backend: the `backend=` that came with it.

    Raises:
        ModelError: nothing, a class, a list of models or parameters, an iterator, a state.
    """
    if is_state(model):
        said, advice = described(model), "It is a state already; for a new one: polyamp.init(state.model, recipe)."
    elif model is None:
        said, advice = "None", "Does the function that makes it lack a `return`?"
    elif isinstance(model, Recipe | Policy):
        said, advice = described(model), "Write polyamp.init(model, recipe)."
    elif isinstance(model, type) and backend is None:
        said, advice = described(model), f"Make one: {model.__name__}(...)."
    elif type(model) is list:
        said = described(model)
        advice = "Call init for each of several models, and give value_and_grad the list of their states. Parameters "
        advice += "alone are no model: pass the model itself."
        raise ModelError(f"model must be one model. Received: {said}. {advice}")
    elif type(model) in (dict, OrderedDict):
        said = described(model)
        advice = "Parameters alone are no model: pass the model that has them. torch: after "
        advice += "model.load_state_dict(...). JAX: with the function that uses them, (apply_fn, params)."
    elif hasattr(model, "__next__"):
        said, advice = described(model), "Pass the model itself, not model.parameters()."
    else:
        return
    raise ModelError(f"model must be a model of one of the frameworks. Received: {said}. {advice}")


def no_recipe(value: Any, call: str) -> RecipeError:
    """The error for something else in the place of a recipe."""
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
    return RecipeError(f"recipe must be a polyamp.Recipe. Received: {described(value)}.{own}")


_NO_ROOTS: Final = {"polyamp", "reference"}
"""Names of backends that are no framework's root module; a module of the user's may be called so."""
WRITE: Final = (
    "Write: def loss_fn(model, batch): return polyamp.losses.mean_squared_error(model(batch['x']), batch['y'])."
)


def check_loss_fn(loss_fn: Any, call: str, roots: Collection[str]) -> None:
    """Refuse what cannot be a `loss_fn`: what is not callable, and a framework's own loss of predictions and targets.

    Args:
        loss_fn: what came.
        call: how the call is written.
        roots: root modules of the frameworks.

    Raises:
        RecipeError: says what came.
    """
    if isinstance(loss_fn, Recipe) or is_state(loss_fn):
        advice = f" Write {call}."
    elif not callable(loss_fn):
        value = isinstance(loss_fn, int | float) or hasattr(loss_fn, "dtype")
        advice = f" Pass the function itself, without calling it. {WRITE}" if value else f" {WRITE}"
    elif _is_frameworks_own(loss_fn, roots):
        advice = f" It takes predictions and targets. {WRITE}"
    else:
        return
    shown = described(loss_fn)
    raise RecipeError(f"loss_fn must be a function of (model, batch). Received: {shown}.{advice}")


def _is_frameworks_own(loss_fn: Any, roots: Collection[str]) -> bool:
    """Whether it is a loss function or class that a framework defines, and not one that the user wrapped in one."""
    if hasattr(loss_fn, "__wrapped__"):
        return False
    if isinstance(loss_fn, types.FunctionType | types.BuiltinFunctionType):
        module = loss_fn.__module__ or ""
        return module == "polyamp.losses" or module.partition(".")[0] in ({*roots, "optax"} - _NO_ROOTS)
    module = type(loss_fn).__module__
    return module.partition(".")[0] in roots and "loss" in module and not module.startswith("polyamp")


def check_gradients(gradients: Any, states: int, *, several: bool) -> None:
    """Refuse what are no gradients of these states.

    Raises:
        GradientError: another number of them, or something else.
    """
    if several and (not isinstance(gradients, list) or len(gradients) != states):
        known = f"{states} state{'s were' if states > 1 else ' was'} given"
        received = f"{len(gradients)} gradients" if isinstance(gradients, list) else _shown(gradients)
        raise GradientError(
            f"apply_gradients needs one Gradients per state: {known}. Received: {received}. A list of states goes with "
            "the list that value_and_grad returned for it."
        )
    for item in gradients if several else [gradients]:
        if not isinstance(item, Gradients):
            pair = isinstance(item, tuple) and len(item) == 2 and _holds_gradients(item[1])
            advice = " value_and_grad returns both: value, grads = ..." if pair else ""
            raise GradientError(
                "grads must be the Gradients that value_and_grad returned (change them with "
                f"gradients._replace(values=...)). Received: {_shown(item)}.{advice}"
            )


def _holds_gradients(value: Any) -> bool:
    return isinstance(value, Gradients) or (type(value) is list and any(isinstance(each, Gradients) for each in value))


def _shown(value: Any) -> str:
    return "a Gradients" if isinstance(value, Gradients) else described(value)
