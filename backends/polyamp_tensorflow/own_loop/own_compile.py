"""The arguments of a model's own `compile`: a class such as keras.io's `Distiller` takes losses of its own there.

Keras's arguments reach it as far as it takes them; what it leaves to `keras.Model.compile` is set on the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from polyamp.errors import RecipeError, UnsupportedError, did_you_mean
from polyamp_tensorflow.compat import is_kerass

_SET: Final = ("run_eagerly", "steps_per_execution", "jit_compile")
"""What a model takes by an attribute as well."""
_KERAS: Final = ("loss", "metrics", "loss_weights", "weighted_metrics", *_SET)
"""Keras's arguments, which reach a `compile` that takes them whether they were given or not."""
_POLYAMPS: Final = {
    "optimizer": "It is the recipe's: polyamp.Recipe(optimizer=...).",
    "auto_scale_loss": "The recipe's scaler scales the loss: polyamp.Recipe(scaler=...).",
}
"""What polyamp gives a model's `compile`, and where it is said instead."""


def check_own(model: Any, given: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Refuse what a model's `compile` does not take, before anything is put on the model.

    Args:
        model: the model.
        given: Keras's arguments that the user gave another value than the default.
        more: the other arguments that the user gave.

    Raises:
        UnsupportedError: names the argument and those that `compile` takes; or a `compile` without `optimizer`.
        RecipeError: an argument that it needs was not given.
    """
    for name in more:
        if name in _POLYAMPS:
            raise UnsupportedError(f"compile() makes {name}= itself. Received: {name}=. {_POLYAMPS[name]}")
    if is_kerass(type(model).compile):
        for name in more:
            raise UnsupportedError(
                f"compile() takes {', '.join(_KERAS)}, and what a compile of the model's own takes; "
                f"{type(model).__qualname__} has none. Received: {name}=.{did_you_mean(name, _KERAS)}"
            )
        return
    own, takes_all = _taken(model)
    if "optimizer" not in own and not takes_all:
        raise UnsupportedError(
            f"{type(model).__qualname__}.compile takes no optimizer=, which polyamp makes by the recipe. Call it "
            "yourself with polyamp_tensorflow.LossScaleOptimizer objects around the optimizers, and put the policy on "
            f"with polyamp_tensorflow.apply_policy. Received: a compile of {', '.join(own) or 'nothing'}."
        )
    for name in (*given, *more):
        if not takes_all and name not in (*own, *_SET):
            raise UnsupportedError(
                f"{type(model).__qualname__}.compile takes {', '.join(own)}. Received: {name}=."
                + did_you_mean(name, own)
            )
    received = {"optimizer", *given, *more}
    missing = [name for name, needed in own.items() if needed and name not in received and name not in _KERAS]
    if missing:
        raise RecipeError(
            f"{type(model).__qualname__}.compile needs {', '.join(f'{name}=' for name in missing)}. Give it to "
            "polyamp_tensorflow.compile, which hands it on."
        )


def compile_model(model: Any, settings: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """`model.compile` with what it takes of Keras's arguments, and all of the others; then the attributes that it left.

    Args:
        model: the model.
        settings: Keras's arguments, `optimizer` among them.
        more: the other arguments that the user gave.
    """
    if is_kerass(type(model).compile):
        model.compile(**settings)
        return
    own, takes_all = _taken(model)
    model.compile(**{name: value for name, value in settings.items() if takes_all or name in own}, **more)
    for name in _SET:
        if not takes_all and name not in own and settings[name] != "auto":
            setattr(model, name, settings[name])


def _taken(model: Any) -> tuple[dict[str, bool], bool]:
    """Names of the arguments of a model's `compile` and whether each must be given, and whether it takes all."""
    parameters = inspect.signature(model.compile).parameters.values()
    named = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)
