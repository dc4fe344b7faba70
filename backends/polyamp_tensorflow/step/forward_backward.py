"""One forward and backward pass as graph code: the loss, its weight, and scaled gradients (S6, S7)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from polyamp.errors import LossError, describe_value
from polyamp.results import LossFunction
from polyamp.rules import loss_weights, step_checks
from polyamp.rules.batches import check_has_rows
from polyamp_keras.arrays import leaves_with_paths, native_variable
from polyamp_keras.engines.tensorflow import XP
from polyamp_keras.interrupts import EnsureUndo
from polyamp_keras.precision.output_casts import check_loss_dtype
from polyamp_keras.precision.regularization_losses import warn_missing_regularization
from polyamp_tensorflow.arrays import to_dense_float32
from polyamp_tensorflow.distributed.replicas import has_several_replicas
from polyamp_tensorflow.precision.autocast import apply_layer_policies
from polyamp_tensorflow.precision.policy_module import PolicyModule
from polyamp_tensorflow.step.grad_stats import scale_loss
from polyamp_tensorflow.step.loss_weights import LossWeighting, batch_rows, to_weight
from polyamp_tensorflow.step.state import States

ParameterKey = tuple[int, str]
"""Number of a state among those of a step, and name of one of its parameters."""
StateGradients = dict[ParameterKey, Any]
"""Gradients of several states; without parameters on which the loss does not depend (S23)."""


class PassResult(NamedTuple):
    """Float32 loss, aux, and float32 gradients of the scaled loss.

    Attributes:
        weight: divisor of the loss, float32 scalar (S8); None if it is weighted by its rows. Loss and gradients of one
            pass are not yet multiplied by it, those of several micro-batches are.
        size: maximum number of elements in the mean; None if unknown.
        counts: divisor of each term of a sum of means; empty for any other loss.
    """

    loss: Any
    aux: Any
    gradients: StateGradients
    weight: Any = None
    size: Any = None
    counts: Sequence[Any] = ()


def run_pass(states: States, loss_fn: LossFunction, batch: Any, weighing: LossWeighting) -> PassResult:
    """Return the loss of one micro-batch, and scaled gradients times its share of the rows. `loss_fn` runs with the
    models' layers under their policies.

    Raises:
        LossError: the loss is not a scalar, or depends on no parameter.
    """
    scaler = states[0].recipe.loss_scaler
    given = loss_weights.batch_loss_weight(weighing.function, batch)
    parameters = state_parameters(states)
    watched = [native_variable(variable) for variable in parameters.values()]
    with contextlib.ExitStack() as stack:
        tape = tf.GradientTape(watch_accessed_variables=False)
        stack.enter_context(EnsureUndo(functools.partial(tape.__exit__, None, None, None)))
        tape.__enter__()
        tape.watch(watched)
        for state in states:  # inside the tape, which must record the casts of variables
            stack.enter_context(apply_layer_policies(state.model, state.plan))
        with warn_missing_regularization(states):
            result, found = loss_weights.call_loss_fn(loss_fn, policy_modules(states), batch)
        rows = batch_rows(batch) if weighing.rows is None else weighing.rows
        among_others = weighing.rows is not None or has_several_replicas(states[0].strategy)
        own = loss_weights.parse_loss_output(result, found, XP, weight=given, totals=weighing.totals, rows=rows)
        counts = tf.is_tensor(own.size) or (among_others and tf.executing_eagerly() and own.size is not None)
        if own.weight is None and counts:  # of a selection, or of unknown rows
            own = own._replace(weight=own.size, size=None)
        check_loss_dtype(own.value, [state.plan for state in states])
        loss = scale_loss(own.value, None, what="loss_fn")
        wide = (
            tf.reshape(tf.cast(native_variable(own.value), tf.float64), ())
            if states[0].plan.param == "float64"
            else loss
        )
        scaled = wide * tf.cast(states[0].scale_state.scale, wide.dtype) if scaler.scales else wide
        if weighing.share != 1.0 and own.weight is None:
            scaled = scaled * weighing.share
    selects = weighing.rows is not None and own.own is None and any(tf.is_tensor(item.size) for item in found)
    if among_others and (selects or loss_weights.has_unclear_count(own, found)):
        loss_weights.warn_unclear_count(loss_fn, loss_weights.count_line(found))
    found_gradients = tape.gradient(scaled, watched)  # a parameter shared by states gets its full gradient in each
    pairs = zip(parameters, found_gradients, strict=True)
    gradients = {key: to_dense_float32(value, parameters[key]) for key, value in pairs if value is not None}
    step_checks.check_loss_dependence(bool(gradients))
    counts = [to_weight(count) for count in loss_weights.term_counts(own, rows)] if among_others else []
    weight = None if own.weight is None else to_weight(own.weight)
    return PassResult(loss, map_present(_aux_tensor, own.aux), gradients, weight, own.size, counts)


def _aux_tensor(leaf: Any) -> Any:
    """Convert a leaf of aux to a tensor.

    Raises:
        LossError: it cannot be converted.
    """
    try:
        return tf.convert_to_tensor(native_variable(leaf))
    except (TypeError, ValueError) as error:
        raise LossError(
            f"a leaf of aux is {describe_value(leaf)}. What loss_fn returns beside the loss must be tensors, numbers "
            "and strings, in dicts, tuples and lists."
        ) from error


def map_present(function: Callable[..., Any], *trees: Any) -> Any:
    """Map a function over the leaves of trees; a None of the first stays None."""
    return keras.tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *trees)


def present_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree that are not None."""
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def state_parameters(states: States) -> dict[ParameterKey, Any]:
    """Return the parameters of all states."""
    return {(n, name): v for n, state in enumerate(states) for name, v in state.variables.parameters.items()}


def policy_modules(states: States) -> Any:
    """Return the first argument of `loss_fn`: one `PolicyModule`, or a tuple of them."""
    models = tuple(PolicyModule(s.model, s.plan, s.variables.parameters if s.is_ready else None) for s in states)
    return models[0] if len(models) == 1 else models


def check_rows(batch: Any) -> None:
    """Raise for an empty batch, when its shape is first traced."""
    check_has_rows(leaf.shape[0] for _, leaf in leaves_with_paths(batch) if tf.is_tensor(leaf) and leaf.shape.rank)
