"""Applies a `Policy` to Keras layers: as a `keras.DTypePolicy`, on a built model, and around any callable.

In Keras a compute dtype belongs to a layer, and in a functional model also to an operation. So both modes (S3) set the
compute dtype of each layer; variables do not change. `layer_dtypes` chooses the dtypes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from polyamp.context_values import temporary_value
from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.arrays import cast
from polyamp_keras.backend_choice import backend_name
from polyamp_keras.engine import ENGINE
from polyamp_keras.interrupts import EnsureUndo, close_stale_blocks
from polyamp_keras.models.layers import is_built, is_layer
from polyamp_keras.precision import apply_policy
from polyamp_keras.precision.float8_layers import refuse_float8
from polyamp_keras.precision.op_rules import refuse_op_rules
from polyamp_keras.precision.output_casts import cast_output
from polyamp_keras.precision.policy_application import PolicyApplication
from polyamp_tensorflow.precision.cast_mode import cast_variables, check_castable, has_cast_variables
from polyamp_tensorflow.precision.policy_module import POLICY_REGIONS, PolicyModule, PolicyRegion, root_model


def require_tensorflow() -> None:
    """Raise if Keras runs on another backend than TensorFlow.

    Raises:
        UnsupportedError: names the current backend and how to change it.
    """
    name = backend_name()
    if name != "tensorflow":
        raise UnsupportedError(
            f"polyamp's TensorFlow backend is for Keras on TensorFlow. Received: Keras on its {name!r} backend. Leave "
            "out backend=, or set KERAS_BACKEND=tensorflow before Keras is imported."
        )


@contextlib.contextmanager
def apply_layer_policies(model: Any, plan: ResolvedPolicy) -> Iterator[None]:
    """Context manager that applies the policy to every layer of a model, and restores the layers on exit.

    For a model that is not a layer it casts the variables (see `cast_mode`); for a function it does nothing.
    """
    if not is_layer(model):
        with cast_variables(model, plan) if has_cast_variables(model, plan) else contextlib.nullcontext():
            yield
        return
    application = PolicyApplication(model, plan)
    with EnsureUndo(application.restore):
        application.put()
        yield


def resolve_policy(model: Any, policy: Policy) -> ResolvedPolicy:
    """Resolve a policy for a model, and raise before the first step if the model cannot follow it (S20).

    Overrides are matched once the model is built; until then the plan has none.

    Raises:
        UnsupportedError: dtypes without a Keras policy; overrides, `op_rules` or mode="autocast" on a model that is not
            a Keras layer; `op_rules` for what a layer computes inside.
        PolicyError: an override or a rule matches no layer, or sets a softmax head to 16 bits.
    """
    require_tensorflow()
    if is_layer(model):
        return apply_policy.resolve_policy(model, policy)
    apply_policy.check_keras_dtypes(policy)
    refuse_op_rules(policy, type(model).__qualname__)
    refuse_float8(policy, type(model).__qualname__)
    plan = policy.plan()
    check_castable(model, plan)
    return plan


def autocast(target: Any, policy: Policy) -> Callable[..., Any]:
    """Return a callable that runs a Keras layer or model, another model, or a function under the policy.

    A layer's child layers follow the policy; the first call builds an unbuilt layer. Anything else runs in "cast" mode:
    floating arguments are cast to `compute`, and so are the trainable variables of a `tf.Module`. Floating results are
    always cast to `output`.

    Raises:
        UnsupportedError: mode="autocast" for a function; dtypes for which Keras has no policy.
    """
    require_tensorflow()
    if isinstance(target, PolicyModule):  # inside a step, which has its own policy
        resolve_policy(root_model(target), policy)
        return _wrap_function(target, policy)
    plan = policy.plan()
    if not is_layer(target):
        refuse_op_rules(policy, getattr(target, "__qualname__", type(target).__qualname__))
        refuse_float8(policy, getattr(target, "__qualname__", type(target).__qualname__))
    if is_layer(target):
        plan = resolve_policy(target, policy)
    elif policy.mode == "autocast" or policy.overrides:
        raise UnsupportedError(
            "on TensorFlow the layer is the finest grain of mode='autocast' and of overrides, so they need a "
            f"keras.Model or layer. Received: {getattr(target, '__qualname__', type(target).__qualname__)} with "
            f"{policy}. Use policy.replace(mode='cast') for a function."
        )
    elif hasattr(target, "trainable_variables"):
        check_castable(target, plan)
    known = is_built(target)
    run = target if is_layer(target) else _wrap_function(target, policy)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan, known
        close_stale_blocks()
        if not known:
            if not is_built(target):
                _build_layer(target, args, kwargs)
            plan, known = resolve_policy(target, policy), True
        with ENGINE.matmul_precision(plan.float32_matmul), apply_layer_policies(target, plan):
            if not is_layer(target):
                args, kwargs = cast((args, kwargs), plan.compute, float64=plan.float64)
            return cast_output(run(*args, **kwargs), plan.output, float64=plan.float64)

    return call


def _wrap_function(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Wrap a function so that its calls of a step's model run under the policy (S3)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        inner: PolicyRegion = functools.partial(_policy_region, policy)
        with temporary_value(POLICY_REGIONS, (*POLICY_REGIONS.get(), inner)):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _policy_region(policy: Policy, model: Any, outer: ResolvedPolicy) -> Iterator[ResolvedPolicy]:
    """Context manager in which a step's model follows this policy instead of the step's.

    Raises:
        UnsupportedError: the model's variables are already cast.
    """
    plan = resolve_policy(model, policy)
    if not is_layer(model) and has_cast_variables(model, outer) and plan.compute != outer.compute:
        raise UnsupportedError(
            f"{type(model).__qualname__} is no Keras layer, and the step has casts to {outer.compute} in the places of "
            f"its variables: another policy inside of loss_fn has none of their digits. Received: {policy}. Make the "
            "step's policy float32, and open the 16-bit one in loss_fn around what it is for."
        )
    with ENGINE.matmul_precision(plan.float32_matmul), apply_layer_policies(model, plan):
        yield plan


def _build_layer(layer: Any, args: Any, kwargs: Any) -> None:
    """Create a layer's variables and child layers by tracing a call that never runs. Compute dtypes are chosen after
    all of them exist."""
    tf.function(lambda: layer(*args, **kwargs), autograph=False).get_concrete_function()
