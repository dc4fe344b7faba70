"""`mode="cast"` for what is not a Keras model: a `tf.Module`, or any callable with `trainable_variables` (S3).

While the model runs, casts of its trainable variables stand in the attributes that hold them, so that all of the
model's own code computes in `compute`; gradients flow through the casts to the float32 masters. Keras layers inside get
the policy as layers do. Called by the step and by `autocast.autocast`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from polyamp.errors import ModelError, UnsupportedError
from polyamp.rules.plan import Plan
from polyamp_tensorflow.arrays import dtype_name, is_floating, raw
from polyamp_tensorflow.interrupts import ending
from polyamp_tensorflow.precision.layer_choice import choose
from polyamp_tensorflow.precision.layer_stack import Application
from polyamp_tensorflow.precision.op_list import gives_probabilities


def is_cast(model: Any, plan: Plan) -> bool:
    """True if the variables of this model, which is no Keras layer, are cast under the policy."""
    return plan.compute != plan.param and hasattr(model, "trainable_variables")


def check_castable(model: Any, plan: Plan) -> None:
    """Refuse what cannot be cast, or would not be trained, before the first step (S20).

    Raises:
        ModelError: a Keras layer inside whose variables are not among the model's; `tf.Module` does not see them.
        UnsupportedError: another mode, overrides, or a trainable variable that no attribute holds.
    """
    policy = plan.policy
    if policy.overrides or (is_cast(model, plan) and policy.mode == "autocast"):
        raise UnsupportedError(
            "on TensorFlow the Keras layer is the finest grain of mode='autocast' and of overrides. Received: "
            f"{type(model).__qualname__} with {policy}. Use policy.replace(mode='cast', overrides={{}})."
        )
    _check_layers(model)
    if not is_cast(model, plan):
        return
    held = {id(raw(variable)) for variable in _variables(model)}
    for variable in model.trainable_variables:
        if is_floating(raw(variable)) and id(raw(variable)) not in held:
            raise UnsupportedError(
                f"mode='cast' casts the variables that a model's attributes, lists and dicts hold. Received: "
                f"{type(model).__qualname__}, which keeps {variable.name!r} elsewhere. Make it an attribute."
            )


def _check_layers(model: Any) -> None:
    known = {id(raw(variable)) for variable in getattr(model, "trainable_variables", ())}
    for layer in _holders(model) if known or isinstance(model, tf.Module) else []:
        for variable in layer.trainable_variables if isinstance(layer, keras.Layer) else []:
            if id(raw(variable)) not in known:
                raise ModelError(
                    f"{variable.path!r} of a Keras layer is not in the model's trainable_variables, so it would "
                    "not be trained: tf.Module does not see Keras's variables. Make the model a keras.Model, or "
                    "define trainable_variables on it, with those of its layers."
                )


@contextlib.contextmanager
def cast_variables(model: Any, plan: Plan) -> Iterator[None]:
    """Casts of the trainable variables in the places of the variables, for the time of the block.

    One thread at a time may trace a model under it; the variables themselves are not touched.
    """
    trainable = {id(raw(variable)) for variable in model.trainable_variables}
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def narrow(value: Any) -> Any:
        if isinstance(value, tf.Variable):
            kept = id(value) not in trainable or not _is_narrowed(value, plan)
            return value if kept else tf.cast(value, plan.compute)
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

    applied: list[Application] = []

    def put_back() -> None:
        for slots, name, value in replaced:
            slots[name] = value
        for application in applied:
            application.restore()

    with ending(put_back):
        for holder in _holders(model):
            if isinstance(holder, keras.Layer):
                applied.append(Application(holder, _inside(holder, plan)))
                applied[-1].put()
                continue
            slots = vars(holder)
            for name, value in list(slots.items()):
                cast = narrow(value)
                if cast is not value:
                    replaced.append((slots, name, value))
                    slots[name] = cast
        yield


def _inside(layer: Any, plan: Plan) -> Plan:
    """The plan for a layer among code of the user's, which computes in 16 bits: its result too, unless it is
    probabilities, which stay in float32 for the loss."""
    probabilities = any(
        gives_probabilities(choice.target) and choice.dtype == "float32" and choice.parent is None
        for choice in choose(layer, plan)
    )
    return plan if probabilities else plan.policy.replace(output=plan.compute).plan()


def _is_narrowed(variable: Any, plan: Plan) -> bool:
    return is_floating(variable) and (dtype_name(variable) != "float64" or plan.float64)


def _variables(model: Any) -> Iterator[Any]:
    for holder in _holders(model):
        if isinstance(holder, keras.Layer):
            yield from (raw(variable) for variable in holder.variables)
        else:
            yield from (
                leaf for value in vars(holder).values() for leaf in _leaves(value) if isinstance(leaf, tf.Variable)
            )


def _holders(model: Any) -> list[Any]:
    """The model and the `tf.Module`s and Keras layers that its attributes, lists and dicts hold, each once. What lies
    inside a Keras layer is the layer's."""
    found: list[Any] = []
    waiting = [model]
    while waiting:
        holder = waiting.pop()
        if any(holder is other for other in found):
            continue
        found.append(holder)
        if not isinstance(holder, keras.Layer):
            leaves = (leaf for value in vars(holder).values() for leaf in _leaves(value))
            waiting += [leaf for leaf in leaves if isinstance(leaf, tf.Module | keras.Layer) and not _is_variable(leaf)]
    return found


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, tf.Variable | keras.Variable)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value
