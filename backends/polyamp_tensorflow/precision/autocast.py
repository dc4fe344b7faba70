"""A `Policy` on Keras layers: as a `keras.DTypePolicy`, on a built model, and around any callable.

Keras's finest grain is the layer, and in a functional model also the operation, so both modes (S3) set what each layer
computes in; variables stay as they are. Which layer gets what stands in `layer_choice`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import keras
import tensorflow as tf

from polyamp import lookup
from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Plan
from polyamp.rules.process_setting import ProcessSetting
from polyamp_tensorflow.arrays import cast
from polyamp_tensorflow.interrupts import ending, repair
from polyamp_tensorflow.models.layers import is_built, is_layer
from polyamp_tensorflow.models.saved_settings import forget, keep
from polyamp_tensorflow.precision.bound import REGIONS, BoundModel, as_output, whole_of
from polyamp_tensorflow.precision.cast_mode import cast_variables, check_castable, is_cast
from polyamp_tensorflow.precision.keras_policies import keras_policy, policy_map
from polyamp_tensorflow.precision.layer_choice import Choice, choose, plan_of
from polyamp_tensorflow.precision.layer_stack import Application, drop_cached_functions, own_policies
from polyamp_tensorflow.precision.saved_choices import choices_of, rows_of

BY_COMPILE: Final = "_polyamp_applied_by_compile"
"""Attribute of a model: the policy that `compile` put on it, which the next `compile` takes off."""


def require_tensorflow() -> None:
    """Refuse to run Keras on another backend than TensorFlow.

    Raises:
        UnsupportedError: says which one is set and how to change it.
    """
    if keras.config.backend() != "tensorflow":
        raise UnsupportedError(
            "polyamp trains Keras models on TensorFlow. Received: Keras on its "
            f"{keras.config.backend()!r} backend. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


def dtype_policy(policy: Policy | str) -> Any:
    """The `keras.DTypePolicy` of a policy; with overrides a `keras.dtype_policies.DTypePolicyMap`.

    Either can be given to `keras.config.set_dtype_policy` or to a layer's `dtype=`. They say what Keras's own policies
    can say: no layer is sensitive and no head is found; `apply_policy` does that. A map matches `layer.path`.

    Args:
        policy: or its spelling; parameters in float32 and `compute` float16, bfloat16 or float32, or both in one dtype.

    Raises:
        UnsupportedError: Keras has no policy with these dtypes.

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
    return policy_map(policy) if policy.overrides else keras_policy(policy.param, policy.compute)


@contextlib.contextmanager
def layer_policies(model: Any, plan: Plan) -> Iterator[None]:
    """Every layer of a model under the policy; afterwards each has again the policy it had.

    Of a model that is no layer the variables are cast (see `cast_mode`); a function passes.
    """
    if not is_layer(model):
        with cast_variables(model, plan) if is_cast(model, plan) else contextlib.nullcontext():
            yield
        return
    application = Application(model, plan)
    with ending(application.restore):
        application.put()
        yield


class AppliedPolicy:
    """What `apply_policy` returns: the policy is on the model until `restore`, or until the end of a `with` block.

    Attributes:
        model: the model.
        policy: the policy.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        *,
        heads: bool = True,
        choices: Sequence[Choice] | None = None,
        by_compile: bool = False,
    ) -> None:
        self.model = model
        self.policy: Policy = plan.policy
        repair()
        self._application = Application(model, plan, heads=heads, choices=choices)
        self._saved = SavedPolicy(model, self.policy, self._application.choices, by_compile=by_compile)
        try:
            self._application.put()
            drop_cached_functions(model)
            keep(model, self._saved)
            if by_compile:
                vars(model)[BY_COMPILE] = self
        except BaseException:  # an interrupt too
            self.restore()
            raise

    @property
    def choices(self) -> Mapping[str, tuple[str | None, str]]:
        """Path -> (compute dtype, why) of every layer, and of the operations of functional models that are cast.

        The dtype is None where the layer's own policy stays. The reasons are those of `dtype_policies.Choice`.
        """
        found = {choice.path: (choice.dtype, choice.why) for choice in self._application.choices}
        return MappingProxyType(found)

    def restore(self) -> None:
        """Give every layer back what it had. What other policies have done since stays; a second call does nothing."""
        forget(self.model, self._saved)
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
class SavedPolicy:
    """A policy that is on a model, in the model's `.keras` file: the policy, and what each layer got."""

    needs_compile: ClassVar[bool] = False

    def __init__(self, model: Any, policy: Policy, choices: Any, *, by_compile: bool) -> None:
        self._model = model
        self._policy = policy
        self._choices = choices
        self._by_compile = by_compile

    def get_config(self) -> dict[str, Any]:
        """Plain values."""
        rows = self._choices if self._model is None else rows_of(self._model, self._choices)
        return {"policy": self._policy.to_dict(), "choices": rows, "by_compile": self._by_compile}

    def off(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the layers are described with the dtypes that they have without polyamp."""
        return contextlib.nullcontext() if self._model is None else own_policies(self._model)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SavedPolicy:
        """What the file says, for a model that `put_on` is given."""
        policy = Policy(**config["policy"])
        return cls(None, policy, config["choices"], by_compile=config["by_compile"])

    def put_on(self, model: Any) -> None:
        """Put the policy on the model of the file.

        Raises:
            ModelError: the model lacks a layer of the file.
        """
        choices = choices_of(model, self._choices)
        AppliedPolicy(model, Plan(self._policy, {}), choices=choices, by_compile=self._by_compile)


def apply_policy(model: Any, policy: Policy | str, *, heads: bool = True) -> AppliedPolicy:
    """Put a policy on a built Keras model: at once, for good or for the time of a `with` block.

    Every layer gets its compute dtype: sensitive layers float32 (S4), heads float32, overrides (S5) what they say;
    quantized layers and those whose constructor was given a dtype keep theirs. `fit`, `evaluate` and `predict` are
    traced anew. Variables stay as they are. Loss scaling for float16 is the optimizer's: a policy brings none.

    Args:
        model: a built `keras.Model` or layer.
        policy: or its spelling; what its layers compute in, and its output's dtype. `float32_matmul` is the process's
            and is not set.
        heads: keep the layers that give logits in float32 too; those that give probabilities always are.

    Returns:
        The policy as a context manager, with `restore()` and `choices`.

    Raises:
        UnsupportedError: not a Keras layer, dtypes that Keras has no policy for, or `op_rules`.
        ModelError: not built.
        PolicyError: an override matches no layer, or puts a softmax head in 16 bits.

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
    plan = planned(model, Policy.of(policy))
    if not is_built(model):
        raise ModelError(
            f"apply_policy takes a built model, whose layers all exist. Received: {model.name!r}, which is not built. "
            "Call it once on a batch, give it a keras.Input, or build it."
        )
    return AppliedPolicy(model, plan, heads=heads)


def planned(model: Any, policy: Policy) -> Plan:
    """The policy resolved for a model, refused where it cannot follow it, before the first step (S20).

    Whether the overrides match is seen once the model is built; until then the plan has none.

    Raises:
        UnsupportedError: dtypes without a Keras policy; `op_rules`; overrides or mode="autocast" on what is no Keras
            layer.
        PolicyError: an override matches no layer, or puts a softmax head in 16 bits.
    """
    require_tensorflow()
    lookup.registry().supporting(lookup.registry().get("tensorflow"), policy)
    for compute in (policy.compute, *policy.overrides.values()):
        keras_policy(policy.param, compute)
    if not is_layer(model):
        plan = policy.plan()
        check_castable(model, plan)
        return plan
    plan = plan_of(model, policy) if is_built(model) else policy.replace(overrides={}).plan()
    choose(model, plan)
    return plan


def autocast(target: Any, policy: Policy) -> Callable[..., Any]:
    """A Keras layer or model, another model, or a function, as a callable that runs under the policy.

    A layer's sublayers follow the policy; one that is not built is built by the first call. Anything else runs in
    "cast" mode: floating arguments are cast to `compute`, and so are the trainable variables of a `tf.Module`. In every
    case floating results are cast to `output`.

    Raises:
        UnsupportedError: mode="autocast" for a function; dtypes that Keras has no policy for.
    """
    require_tensorflow()
    if isinstance(target, BoundModel):  # of a step, whose policy is another one
        planned(whole_of(target), policy)
        return _inside(target, policy)
    plan = policy.plan()
    if is_layer(target):
        plan = planned(target, policy)
    elif policy.mode == "autocast" or policy.overrides:
        raise UnsupportedError(
            "on TensorFlow the layer is the finest grain of mode='autocast' and of overrides, so they need a "
            f"keras.Model or layer. Received: {getattr(target, '__qualname__', type(target).__qualname__)} with "
            f"{policy}. Use policy.replace(mode='cast') for a function."
        )
    elif hasattr(target, "trainable_variables"):
        check_castable(target, plan)
    known = is_built(target)
    run = target if is_layer(target) else _inside(target, policy)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan, known
        repair()
        if not known:
            if not is_built(target):
                _build(target, args, kwargs)
            plan, known = planned(target, policy), True
        with matmul_precision(plan.float32_matmul), layer_policies(target, plan):
            if not is_layer(target):
                args, kwargs = cast((args, kwargs), plan.compute, float64=plan.float64)
            return as_output(run(*args, **kwargs), plan.output, float64=plan.float64)

    return call


def _inside(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A function whose calls of a step's model run under the policy (S3)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        token = REGIONS.set((*REGIONS.get(), functools.partial(_region, policy)))
        try:
            return function(*args, **kwargs)
        finally:
            REGIONS.reset(token)

    return call


@contextlib.contextmanager
def _region(policy: Policy, model: Any, outer: Plan) -> Iterator[Plan]:
    """A block in which a step's model follows this policy, not the step's.

    Raises:
        UnsupportedError: its variables are cast already.
    """
    plan = planned(model, policy)
    if not is_layer(model) and is_cast(model, outer) and plan.compute != outer.compute:
        raise UnsupportedError(
            f"{type(model).__qualname__} is no Keras layer, and the step has casts to {outer.compute} in the places of "
            f"its variables: another policy inside of loss_fn has none of their digits. Received: {policy}. Make the "
            "step's policy float32, and open the 16-bit one in loss_fn around what it is for."
        )
    with matmul_precision(plan.float32_matmul), layer_policies(model, plan):
        yield plan


def _build(layer: Any, args: Any, kwargs: Any) -> None:
    """Create a layer's variables and sublayers by tracing a call that never runs: what each computes in is chosen when
    all of them are there."""
    tf.function(lambda: layer(*args, **kwargs), autograph=False).get_concrete_function()


_TF32: Final[ProcessSetting[bool]] = ProcessSetting(
    "float32_matmul (whether TF32 is allowed)",
    tf.config.experimental.tensor_float_32_execution_enabled,
    tf.config.experimental.enable_tensor_float_32_execution,
)


def matmul_precision(setting: str | None) -> contextlib.AbstractContextManager[None]:
    """TensorFlow's switch for TF32, process-global and read when a kernel starts, set for the time of a call."""
    if setting is None:
        return contextlib.nullcontext()
    return _TF32.held(setting != "highest")
