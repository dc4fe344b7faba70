"""Applies a `Policy` to a built Keras model, permanently or for a block; and as a `keras.DTypePolicy`.

In Keras a compute dtype belongs to a layer, and in a functional model also to an operation. So both modes (S3) set the
compute dtype of each layer; variables do not change. `layer_dtypes` chooses the dtypes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import keras

from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy, module_precision
from polyamp_keras.compat import layer_classes
from polyamp_keras.interrupts import close_stale_blocks
from polyamp_keras.models.keras_serialization import ModelSetting, add_setting, remove_setting
from polyamp_keras.models.layers import is_built, is_layer, require_built
from polyamp_keras.precision.float8_layers import check_float8, refuse_float8
from polyamp_keras.precision.keras_policies import keras_policy, policy_map
from polyamp_keras.precision.layer_dtypes import LayerDtype, choose_layer_dtypes, resolve_layer_policy
from polyamp_keras.precision.op_rules import check_op_rules, refuse_op_rules
from polyamp_keras.precision.policy_application import PolicyApplication, drop_cached_functions, suspend_policies
from polyamp_keras.precision.saved_layer_dtypes import layer_dtypes_from_rows, layer_dtypes_to_rows

APPLIED_BY_COMPILE: Final = "_polyamp_applied_by_compile"
"""Attribute of a model: the policy that `compile` applied, which the next `compile` removes."""

_FOREIGN_LAYERS: Final = layer_classes("TorchModuleWrapper JaxLayer FlaxLayer")
"""Layers with a model of the framework itself inside."""


def dtype_policy(policy: Policy | str) -> Any:
    """Return the `keras.DTypePolicy` of a policy; with overrides, a `keras.dtype_policies.DTypePolicyMap`.

    Pass it to `keras.config.set_dtype_policy` or to a layer's `dtype=`. Keras's policies know no sensitive layers and
    no heads; use `apply_policy` for these. A map matches `layer.path`.

    Args:
        policy: a policy or its spelling; parameters in float32 and `compute` float16, bfloat16 or float32, or both in
            one dtype.

    Raises:
        UnsupportedError: Keras has no policy with these dtypes, or the policy has `op_rules` or products in 8 bits.

    Example:
        >>> import polyamp
        >>> from polyamp_keras import dtype_policy
        >>> dtype_policy(polyamp.Policy("mixed_bfloat16")).name
        'mixed_bfloat16'
        >>> mapped = dtype_policy(polyamp.Policy("mixed_bfloat16", overrides={"encoder/norm*": "float32"}))
        >>> mapped["encoder/norm1"].compute_dtype, mapped["encoder/dense"].compute_dtype
        ('float32', 'bfloat16')
    """
    policy = Policy.of(policy)
    refuse_op_rules(policy, "a keras.DTypePolicy; use apply_policy(model, policy)")
    refuse_float8(policy, "a keras.DTypePolicy, which has one dtype; use apply_policy(model, policy)")
    return policy_map(policy) if policy.overrides else keras_policy(policy.param, policy.compute)


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
        >>> import keras, polyamp, polyamp_keras
        >>> layers = [keras.layers.Dense(4, name="hidden"), keras.layers.Dense(2, name="out")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> with polyamp_keras.apply_policy(model, polyamp.Policy("mixed_bfloat16")) as applied:
        ...     inside = [layer.compute_dtype for layer in model.layers]
        >>> inside, applied.choices["out"], [layer.compute_dtype for layer in model.layers]
        (['bfloat16', 'float32'], ('float32', 'head'), ['float32', 'float32'])
    """
    if not is_layer(model):
        raise UnsupportedError(f"apply_policy takes a keras.Model or layer. Received: {type(model).__qualname__}.")
    plan = resolve_policy(model, Policy.of(policy))
    require_built(model, "apply_policy")
    return AppliedPolicy(model, plan, heads=heads)


def check_keras_dtypes(policy: Policy) -> None:
    """Raise for a policy with dtypes, rules or products that Keras cannot follow.

    Raises:
        UnsupportedError: dtypes without a Keras policy, `op_rules` for what a layer computes inside, or products in 8
            bits that are not emulated.
    """
    check_op_rules(policy)
    check_float8(policy)
    for compute in {module_precision(policy, named).dtype for named in (None, *policy.overrides.values())}:
        keras_policy(policy.param, compute)


def resolve_policy(model: Any, policy: Policy) -> ResolvedPolicy:
    """Resolve a policy for a Keras model or layer, and raise before the first step if it cannot follow it (S20).

    Overrides are matched once the model is built; until then the plan has none.

    Raises:
        UnsupportedError: dtypes without a Keras policy, `op_rules` for what a layer computes inside, or a layer with
            a model of the framework itself inside that would run in 16 bits.
        PolicyError: an override or a rule matches no layer, or sets a softmax head to 16 bits.
    """
    check_keras_dtypes(policy)
    plan = resolve_layer_policy(model, policy) if is_built(model) else policy.replace(overrides={}).plan()
    for choice in choose_layer_dtypes(model, plan):
        if isinstance(choice.target, _FOREIGN_LAYERS) and choice.dtype in HALF_DTYPES:
            raise UnsupportedError(
                f"layer {choice.path!r} is a {type(choice.target).__name__}: a policy of Keras's does not reach the "
                f"framework's own code in it. Received: {choice.dtype}. Keep it in float32: Policy(..., overrides="
                f"{{{choice.path!r}: 'float32'}})."
            )
    return plan
