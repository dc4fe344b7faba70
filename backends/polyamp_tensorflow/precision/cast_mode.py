"""Cast mode: casts replace the variables of a `tf.Module` or another callable with `trainable_variables` (S3).

While the model runs, the casts stand in the attributes of its trainable variables, so that all of the model's own code
computes in `compute`. Gradients flow through the casts to the float32 masters. Keras layers, inside of such a model or
as the model, follow the policy in both modes by their own dtypes (`autocast`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import dtype_name, is_floating, native_variable
from polyamp_keras.interrupts import EnsureUndo
from polyamp_keras.precision.layer_dtypes import choose_layer_dtypes, flatten_value
from polyamp_keras.precision.op_list import has_probability_output
from polyamp_keras.precision.policy_application import PolicyApplication


def has_cast_variables(model: Any, plan: ResolvedPolicy) -> bool:
    """Return whether the policy casts the variables of this model, which is not a Keras layer."""
    return plan.compute != plan.param and hasattr(model, "trainable_variables")


def check_castable(model: Any, plan: ResolvedPolicy) -> None:
    """Raise before the first step if a model cannot be cast, or part of it would not be trained (S20).

    Raises:
        ModelError: the model lacks variables of a Keras layer inside it; `tf.Module` does not find them.
        UnsupportedError: another mode, overrides, or a trainable variable that is in no attribute.
    """
    policy = plan.policy
    if policy.overrides or (has_cast_variables(model, plan) and policy.mode == "autocast"):
        raise UnsupportedError(
            "on TensorFlow the Keras layer is the finest grain of mode='autocast' and of overrides. Received: "
            f"{type(model).__qualname__} with {policy}. Use policy.replace(mode='cast', overrides={{}})."
        )
    _check_layers(model)
    if not has_cast_variables(model, plan):
        return
    reachable = {id(native_variable(variable)) for variable in _variables(model)}
    for variable in model.trainable_variables:
        if is_floating(native_variable(variable)) and id(native_variable(variable)) not in reachable:
            raise UnsupportedError(
                f"mode='cast' casts the variables that a model's attributes, lists and dicts hold. Received: "
                f"{type(model).__qualname__}, which keeps {variable.name!r} elsewhere. Make it an attribute."
            )


def _check_layers(model: Any) -> None:
    known = {id(native_variable(variable)) for variable in getattr(model, "trainable_variables", ())}
    for layer in _variable_owners(model) if known or isinstance(model, tf.Module) else []:
        for variable in layer.trainable_variables if isinstance(layer, keras.Layer) else []:
            if id(native_variable(variable)) not in known:
                raise ModelError(
                    f"{variable.path!r} of a Keras layer is not in the model's trainable_variables, so it would "
                    "not be trained: tf.Module does not see Keras's variables. Make the model a keras.Model, or "
                    "define trainable_variables on it, with those of its layers."
                )


@contextlib.contextmanager
def cast_variables(model: Any, plan: ResolvedPolicy) -> Iterator[None]:
    """Context manager that replaces the trainable variables of a model by casts of them.

    Only one thread at a time may trace a model in it. The variables themselves do not change.
    """
    trainable = {id(native_variable(variable)) for variable in model.trainable_variables}
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def narrow(value: Any) -> Any:
        if isinstance(value, tf.Variable):
            keeps = id(value) not in trainable or not _is_cast_variable(value, plan)
            return value if keeps else tf.cast(value, plan.compute)
        if isinstance(value, list | tuple):
            items = [narrow(item) for item in value]
            changed = any(one is not other for one, other in zip(items, value, strict=True))
            if not changed:
                return value
            rebuild = getattr(value.__class__, "_make", None)  # of a NamedTuple, which tf.Module wraps
            if rebuild is not None:
                return rebuild(items)
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            named = {key: narrow(item) for key, item in value.items()}
            return named if any(named[key] is not value[key] for key in named) else value
        return value

    applied: list[PolicyApplication] = []

    def restore() -> None:
        for slots, name, value in replaced:
            slots[name] = value
        for application in applied:
            application.restore()

    with EnsureUndo(restore):
        for holder in _variable_owners(model):
            if isinstance(holder, keras.Layer):
                applied.append(PolicyApplication(holder, _inner_layer_plan(holder, plan)))
                applied[-1].put()
                continue
            slots = vars(holder)
            for name, value in list(slots.items()):
                cast = narrow(value)
                if cast is not value:
                    replaced.append((slots, name, value))
                    slots[name] = cast
        yield


def _inner_layer_plan(layer: Any, plan: ResolvedPolicy) -> ResolvedPolicy:
    """Return the plan of a layer inside the user's 16-bit code: its output is in 16 bits too, except probabilities,
    which stay in float32 for the loss."""
    probabilities = any(
        has_probability_output(choice.target) and choice.dtype == "float32" and choice.parent is None
        for choice in choose_layer_dtypes(layer, plan)
    )
    return plan if probabilities else plan.policy.replace(output=plan.compute).plan()


def _is_cast_variable(variable: Any, plan: ResolvedPolicy) -> bool:
    return is_floating(variable) and (dtype_name(variable) != "float64" or plan.float64)


def _variables(model: Any) -> Iterator[Any]:
    for holder in _variable_owners(model):
        if isinstance(holder, keras.Layer):
            yield from (native_variable(variable) for variable in holder.variables)
        else:
            yield from (leaf for leaf in flatten_value(vars(holder)) if isinstance(leaf, tf.Variable))


def _variable_owners(model: Any) -> list[Any]:
    """Return the model, and the `tf.Module`s and Keras layers in its attributes, lists and dicts, each once. Keras
    layers are not searched."""
    found: list[Any] = []
    waiting = [model]
    while waiting:
        holder = waiting.pop()
        if any(holder is other for other in found):
            continue
        found.append(holder)
        if not isinstance(holder, keras.Layer):
            leaves = [leaf for leaf in flatten_value(vars(holder)) if isinstance(leaf, tf.Module | keras.Layer)]
            waiting += [leaf for leaf in leaves if not isinstance(leaf, tf.Variable | keras.Variable)]
    return found
