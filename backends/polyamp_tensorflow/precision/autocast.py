"""Applies a `Policy` to Keras layers: as a `keras.DTypePolicy`, on a built model, and around any callable.

In Keras a compute dtype belongs to a layer, and in a functional model also to an operation. So both modes (S3) set the
compute dtype of each layer; variables do not change. `layer_dtypes` chooses the dtypes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import keras
import tensorflow as tf

from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.process_setting import ProcessSetting
from polyamp_tensorflow.arrays import cast
from polyamp_tensorflow.interrupts import EnsureUndo, close_stale_blocks
from polyamp_tensorflow.models.keras_serialization import ModelSetting, add_setting, remove_setting
from polyamp_tensorflow.models.layers import is_built, is_layer
from polyamp_tensorflow.precision.cast_mode import cast_variables, check_castable, has_cast_variables
from polyamp_tensorflow.precision.policy_module import POLICY_REGIONS, PolicyModule, cast_output, root_model
from polyamp_tensorflow.precision.tensorflow_only.keras_policies import keras_policy, policy_map
from polyamp_tensorflow.precision.tensorflow_only.layer_dtypes import (
    LayerDtype,
    choose_layer_dtypes,
    resolve_layer_policy,
)
from polyamp_tensorflow.precision.tensorflow_only.op_rules import check_op_rules, refuse_op_rules
from polyamp_tensorflow.precision.tensorflow_only.policy_application import (
    PolicyApplication,
    drop_cached_functions,
    suspend_policies,
)
from polyamp_tensorflow.precision.tensorflow_only.saved_layer_dtypes import layer_dtypes_from_rows, layer_dtypes_to_rows

APPLIED_BY_COMPILE: Final = "_polyamp_applied_by_compile"
"""Attribute of a model: the policy that `compile` applied, which the next `compile` removes."""


def require_tensorflow() -> None:
    """Raise if Keras runs on another backend than TensorFlow.

    Raises:
        UnsupportedError: names the current backend and how to change it.
    """
    if keras.config.backend() != "tensorflow":
        raise UnsupportedError(
            "polyamp trains Keras models on TensorFlow. Received: Keras on its "
            f"{keras.config.backend()!r} backend. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


def dtype_policy(policy: Policy | str) -> Any:
    """Return the `keras.DTypePolicy` of a policy; with overrides, a `keras.dtype_policies.DTypePolicyMap`.

    Pass it to `keras.config.set_dtype_policy` or to a layer's `dtype=`. Keras's policies know no sensitive layers and
    no heads; use `apply_policy` for these. A map matches `layer.path`.

    Args:
        policy: a policy or its spelling; parameters in float32 and `compute` float16, bfloat16 or float32, or both in
            one dtype.

    Raises:
        UnsupportedError: Keras has no policy with these dtypes, or the policy has `op_rules`.

    Example:
        >>> import polyamp
        >>> from polyamp_tensorflow.precision.autocast import dtype_policy
        >>> dtype_policy(polyamp.Policy("mixed_bfloat16")).name
        'mixed_bfloat16'
        >>> mapped = dtype_policy(polyamp.Policy("mixed_bfloat16", overrides={"encoder/norm*": "float32"}))
        >>> mapped["encoder/norm1"].compute_dtype, mapped["encoder/dense"].compute_dtype
        ('float32', 'bfloat16')
    """
    policy = Policy.of(policy)
    refuse_op_rules(policy, "a keras.DTypePolicy; use apply_policy(model, policy)")
    return policy_map(policy) if policy.overrides else keras_policy(policy.param, policy.compute)


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


class AppliedPolicy:
    """A policy applied to a model by `apply_policy`, until `restore` or the end of a `with` block.

    Attributes:
        model: the model.
        policy: the policy.
    """

    def __init__(
        self,
        model: Any,
        plan: ResolvedPolicy,
        *,
        heads: bool = True,
        choices: Sequence[LayerDtype] | None = None,
        by_compile: bool = False,
    ) -> None:
        self.model = model
        self.policy: Policy = plan.policy
        close_stale_blocks()
        self._application = PolicyApplication(model, plan, heads=heads, choices=choices)
        self._saved = SavedPolicy(model, self.policy, self._application.choices, by_compile=by_compile)
        try:
            self._application.put()
            drop_cached_functions(model)
            add_setting(model, self._saved)
            if by_compile:
                vars(model)[APPLIED_BY_COMPILE] = self
        except BaseException:  # an interrupt too
            self.restore()
            raise

    @property
    def choices(self) -> Mapping[str, tuple[str | None, str]]:
        """Path -> (compute dtype, reason) of every layer, and of the operations of functional models that are cast.

        The dtype is None where the layer keeps its own policy. The reasons are those of `layer_dtypes.LayerDtype`.
        """
        found = {choice.path: (choice.dtype, choice.why) for choice in self._application.choices}
        return MappingProxyType(found)

    def restore(self) -> None:
        """Remove the policy from every layer. Policies that were applied since stay; a second call does nothing."""
        remove_setting(self.model, self._saved)
        try:
            self._application.restore()
        except BaseException:  # an interrupt: finish first
            self._application.restore()
            raise
        finally:
            drop_cached_functions(self.model)

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"AppliedPolicy({self.model.name!r}, {self.policy})"


@keras.saving.register_keras_serializable(package="polyamp_tensorflow")
class SavedPolicy(ModelSetting):
    """Setting in a model's `.keras` file: the applied policy and the dtype of each layer."""

    needs_compile: ClassVar[bool] = False

    def __init__(self, model: Any, policy: Policy, choices: Any, *, by_compile: bool) -> None:
        self._model = model
        self._policy = policy
        self._choices = choices
        self._by_compile = by_compile

    def get_config(self) -> dict[str, Any]:
        """Return the setting as plain values."""
        rows = self._choices if self._model is None else layer_dtypes_to_rows(self._model, self._choices)
        return {"policy": self._policy.to_dict(), "choices": rows, "by_compile": self._by_compile}

    def suspend(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which the layers' configurations have the dtypes from before polyamp."""
        return super().suspend() if self._model is None else suspend_policies(self._model)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedPolicy:
        """Create the saved setting, to be applied by `install`."""
        policy = Policy(**config["policy"])
        return cls(None, policy, config["choices"], by_compile=config["by_compile"])

    def install(self, model: Any) -> None:
        """Apply the policy to the loaded model.

        Raises:
            ModelError: the model lacks a layer that the file lists.
        """
        choices = layer_dtypes_from_rows(model, self._choices)
        AppliedPolicy(model, ResolvedPolicy(self._policy, {}), choices=choices, by_compile=self._by_compile)


def apply_policy(model: Any, policy: Policy | str, *, heads: bool = True) -> AppliedPolicy:
    """Apply a policy to a built Keras model, permanently or for a `with` block.

    Every layer gets its compute dtype:

    - sensitive layers (S4) and heads: float32;
    - overridden layers (S5): the dtype of the override;
    - layers that `op_rules` name: the dtype of the rule;
    - quantized layers and those with an explicit `dtype=`: unchanged.

    `fit`, `evaluate` and `predict` are retraced. Variables do not change. The policy adds no loss scaling for float16;
    that belongs to the optimizer.

    Args:
        model: a built `keras.Model` or layer.
        policy: a policy or its spelling; sets the compute dtypes and the output dtype. `float32_matmul` is process-wide
            and is not set.
        heads: keep layers that output logits in float32 too; those that output probabilities always are.

    Returns:
        The policy as a context manager, with `restore()` and `choices`.

    Raises:
        UnsupportedError: not a Keras layer, dtypes for which Keras has no policy, or rules that reach no layer.
        ModelError: the model is not built.
        PolicyError: an override or a rule matches no layer, or sets a softmax head to 16 bits.

    Example:
        >>> import keras, polyamp, polyamp_tensorflow
        >>> layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="out")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> with polyamp_tensorflow.apply_policy(model, polyamp.Policy("mixed_bfloat16")) as applied:
        ...     inside = [layer.compute_dtype for layer in model.layers]
        >>> inside, applied.choices["out"], [layer.compute_dtype for layer in model.layers]
        (['bfloat16', 'float32'], ('float32', 'head'), ['float32', 'float32'])
    """
    require_tensorflow()
    if not is_layer(model):
        raise UnsupportedError(f"apply_policy takes a keras.Model or layer. Received: {type(model).__qualname__}.")
    plan = resolve_policy(model, Policy.of(policy))
    if not is_built(model):
        raise ModelError(
            f"apply_policy takes a built model, whose layers all exist. Received: {model.name!r}, which is not built. "
            "Call it once on a batch, give it a keras.Input, or build it."
        )
    return AppliedPolicy(model, plan, heads=heads)


def resolve_policy(model: Any, policy: Policy) -> ResolvedPolicy:
    """Resolve a policy for a model, and raise before the first step if the model cannot follow it (S20).

    Overrides are matched once the model is built; until then the plan has none.

    Raises:
        UnsupportedError: dtypes without a Keras policy; overrides, `op_rules` or mode="autocast" on a model that is not
            a Keras layer; `op_rules` for what a layer computes inside.
        PolicyError: an override or a rule matches no layer, or sets a softmax head to 16 bits.
    """
    require_tensorflow()
    check_op_rules(policy)
    for compute in (policy.compute, *policy.overrides.values()):
        keras_policy(policy.param, compute)
    if not is_layer(model):
        refuse_op_rules(policy, type(model).__qualname__)
        plan = policy.plan()
        check_castable(model, plan)
        return plan
    plan = resolve_layer_policy(model, policy) if is_built(model) else policy.replace(overrides={}).plan()
    choose_layer_dtypes(model, plan)
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
        with matmul_precision(plan.float32_matmul), apply_layer_policies(target, plan):
            if not is_layer(target):
                args, kwargs = cast((args, kwargs), plan.compute, float64=plan.float64)
            return cast_output(run(*args, **kwargs), plan.output, float64=plan.float64)

    return call


def _wrap_function(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Wrap a function so that its calls of a step's model run under the policy (S3)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        token = POLICY_REGIONS.set((*POLICY_REGIONS.get(), functools.partial(_policy_region, policy)))
        try:
            return function(*args, **kwargs)
        finally:
            POLICY_REGIONS.reset(token)

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
    with matmul_precision(plan.float32_matmul), apply_layer_policies(model, plan):
        yield plan


def _build_layer(layer: Any, args: Any, kwargs: Any) -> None:
    """Create a layer's variables and child layers by tracing a call that never runs. Compute dtypes are chosen after
    all of them exist."""
    tf.function(lambda: layer(*args, **kwargs), autograph=False).get_concrete_function()


_TF32: Final[ProcessSetting[bool]] = ProcessSetting(
    "float32_matmul (whether TF32 is allowed)",
    tf.config.experimental.tensor_float_32_execution_enabled,
    tf.config.experimental.enable_tensor_float_32_execution,
)


def matmul_precision(setting: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that sets TensorFlow's TF32 switch, which is process-wide and read at kernel start."""
    if setting is None:
        return contextlib.nullcontext()
    return _TF32.temporary_value(setting != "highest")
