"""Arguments of a model's own `compile`: a class such as keras.io's `Distiller` takes additional losses there.

It gets those of Keras's arguments that it accepts. Execution arguments that it does not accept are set as attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from polyamp.errors import RecipeError, UnsupportedError, did_you_mean
from polyamp.recipe.recipe import Recipe
from polyamp_keras.compat import is_keras_code
from polyamp_keras.models.keras_serialization import PUBLIC_MODULE

_EXECUTION_ARGUMENTS: Final = ("run_eagerly", "steps_per_execution", "jit_compile")
"""Arguments that can also be set as attributes of a model."""
_KERAS_ARGUMENTS: Final = ("loss", "metrics", "loss_weights", "weighted_metrics", *_EXECUTION_ARGUMENTS)
"""Keras's arguments, which are passed to a `compile` that accepts them, whether the user set them or not."""
_RESERVED_ARGUMENTS: Final = {
    "optimizer": "It is the recipe's: polyamp.Recipe(optimizer=...).",
    "auto_scale_loss": "The recipe's scaler scales the loss: polyamp.Recipe(scaler=...).",
}
"""Arguments that polyamp itself passes to a model's `compile`, with what to use instead."""


def check_compile_arguments(model: Any, arguments: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raise for arguments that a model's `compile` does not accept, before the model is changed.

    Args:
        model: the model.
        arguments: Keras's arguments that the user set to another value than the default.
        more: the other arguments of the user.

    Raises:
        UnsupportedError: names the argument and those that `compile` accepts; or a `compile` without `optimizer`.
        RecipeError: a required argument is missing.
    """
    for name in more:
        if name in _RESERVED_ARGUMENTS:
            raise UnsupportedError(f"compile() makes {name}= itself. Received: {name}=. {_RESERVED_ARGUMENTS[name]}")
    if is_keras_code(type(model).compile):
        for name in more:
            of_recipe = f" It is the recipe's: polyamp.Recipe({name}=...)." if name in Recipe.__annotations__ else ""
            raise UnsupportedError(
                f"compile() takes {', '.join(_KERAS_ARGUMENTS)}, and what a compile of the model's own takes; "
                f"{type(model).__qualname__} has none. Received: {name}=."
                f"{of_recipe or did_you_mean(name, _KERAS_ARGUMENTS)}"
            )
        return
    own, takes_all = _compile_parameters(model)
    if "optimizer" not in own and not takes_all:
        raise UnsupportedError(
            f"{type(model).__qualname__}.compile takes no optimizer=, which polyamp makes by the recipe. Call it "
            f"yourself with {PUBLIC_MODULE}.LossScaleOptimizer objects around the optimizers, and put the policy on "
            f"with {PUBLIC_MODULE}.apply_policy. Received: a compile of {', '.join(own) or 'nothing'}."
        )
    for name in (*arguments, *more):
        if not takes_all and name not in (*own, *_EXECUTION_ARGUMENTS):
            raise UnsupportedError(
                f"{type(model).__qualname__}.compile takes {', '.join(own)}. Received: {name}=."
                + did_you_mean(name, own)
            )
    received = {"optimizer", *arguments, *more}
    missing = [name for name, needed in own.items() if needed and name not in received and name not in _KERAS_ARGUMENTS]
    if missing:
        raise RecipeError(
            f"{type(model).__qualname__}.compile needs {', '.join(f'{name}=' for name in missing)}. Give it to "
            f"{PUBLIC_MODULE}.compile, which hands it on."
        )


def compile_model(model: Any, settings: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Call `model.compile` with those of Keras's arguments that it accepts, and all others; set the rest as attributes.

    Args:
        model: the model.
        settings: Keras's arguments, including `optimizer`.
        more: the other arguments of the user.
    """
    if is_keras_code(type(model).compile):
        model.compile(**settings)
        return
    own, takes_all = _compile_parameters(model)
    model.compile(**{name: value for name, value in settings.items() if takes_all or name in own}, **more)
    for name in _EXECUTION_ARGUMENTS:
        if not takes_all and name not in own and settings[name] != "auto":
            setattr(model, name, settings[name])


def _compile_parameters(model: Any) -> tuple[dict[str, bool], bool]:
    """Return the argument names of a model's `compile`, each with whether it is required; and whether it takes `**`."""
    parameters = inspect.signature(model.compile).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
