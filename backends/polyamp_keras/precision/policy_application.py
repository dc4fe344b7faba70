"""Application of a policy's dtypes to the layers of a model, and their removal.

A layer's compute dtype is set by its Keras `dtype_policy`. Replacements of the layer's methods implement the rest:

- casts of a layer's result inside a layer with its own `call`, where TensorFlow's operators refuse mixed dtypes;
- the softmax inside an attention layer;
- the product of a dense layer in 8 bits;
- operations of a functional model;
- the dtype of the model's output and of regularization losses.

Each layer has a stack of settings, with its original setting at the bottom. So policies can be applied and removed in
any order and in several threads; when all are removed, the layer has its original setting.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import keras

from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.compat import (
    ADJUST_RANK,
    APPLY_SCORES,
    CALCULATE_SCORES,
    CONVERT_INPUTS,
    functional_model,
    get_layer_policy,
    is_keras_code,
    set_layer_policy,
)
from polyamp_keras.models.layers import is_container, is_layer, list_layers
from polyamp_keras.precision.float8_layers import FLOAT8
from polyamp_keras.precision.float8_products import float8_call
from polyamp_keras.precision.float32_layer_losses import (
    check_scalar_results,
    float32_regularizer,
    original_regularizer,
    refuse_narrow_losses,
)
from polyamp_keras.precision.functional_graph import is_gather
from polyamp_keras.precision.integer_inputs import integer_input_policy, mark_integer_inputs, refuse_narrow_ids
from polyamp_keras.precision.keras_policies import POLICY_STACK, is_quantized, keras_policy, own_policy
from polyamp_keras.precision.layer_dtypes import LayerDtype, choose_layer_dtypes
from polyamp_keras.precision.layer_method_wrappers import (
    FLOAT8_CALL,
    apply_scores,
    cast_inputs,
    cast_result_to_output,
    copy_signature,
    is_call_for_loss,
    raise_mixed_dtype_errors,
    round_result,
    sum_gather_gradient_in_float32,
)
from polyamp_keras.precision.op_list import SENSITIVE_LAYERS

CACHED_FUNCTIONS: Final = ("train_function", "test_function", "predict_function")
"""Attributes of a model with the functions that Keras made for `fit`, `evaluate` and `predict`."""
_REPLACED_METHODS: Final = (
    "call",
    FLOAT8_CALL,
    "add_loss",
    APPLY_SCORES,
    CALCULATE_SCORES,
    CONVERT_INPUTS,
    ADJUST_RANK,
)
_STEP_METHODS: Final = ("train_step", "test_step", "compute_loss")
_REGULARIZER: Final = "activity_regularizer"
_LOCK: Final = threading.RLock()


class _LayerSetting(NamedTuple):
    """Setting of a layer or operation.

    Attributes:
        policy: its `keras.DTypePolicy`; None for the original one, and for an operation.
        methods: functions that replace the methods of the same name.
    """

    policy: Any
    methods: Mapping[str, Callable[..., Any]]


class PolicyApplication:
    """A policy applied to a model, from `put` until `restore`.

    Args:
        model: a Keras layer or model.
        plan: the policy, resolved for this model.
        heads: as in `choose_layer_dtypes`.
        choices: the dtype of each layer, from a file; None to choose them.

    Attributes:
        choices: the dtype of each layer and its reason.
    """

    def __init__(
        self, model: Any, plan: ResolvedPolicy, *, heads: bool = False, choices: Sequence[LayerDtype] | None = None
    ) -> None:
        self._model = model
        with _LOCK:
            self.choices = choose_layer_dtypes(model, plan, heads=heads) if choices is None else list(choices)
            dtypes = {id(choice.target): choice.dtype for choice in self.choices}
            self._settings = [(choice.target, self._setting(choice, plan, dtypes)) for choice in self.choices]
            known = {id(target) for target, _ in self._settings}
            functions = [functional_model(choice.target) for choice in self.choices if plan.narrow]
            self._settings += [
                (function, _LayerSetting(None, mark_integer_inputs(function)))  # inside a sequential model
                for function in functions
                if function is not None and id(function) not in known
            ]

    def again(self) -> PolicyApplication:
        """Return the same policy for the same model, to be put anew, also while this one is applied."""
        twin = copy.copy(self)
        twin._settings = [(target, _LayerSetting(*setting)) for target, setting in self._settings]
        return twin

    def put(self) -> None:
        """Apply the policy. If this is interrupted, `restore` removes the applied part."""
        with _LOCK:
            for target, setting in self._settings:
                own = _LayerSetting(get_layer_policy(target) if is_layer(target) else None, _own_attributes(target))
                vars(target).setdefault(POLICY_STACK, [own]).append(setting)
                _activate_setting(target, setting)
                _change_regularizer(target, float32_regularizer)

    def restore(self) -> None:
        """Remove the policy; others that were applied before or since stay. A second call does nothing; after an
        interrupt, call it again."""
        with _LOCK:
            for target, setting in self._settings:
                stack = vars(target).get(POLICY_STACK)
                if stack is None:  # an earlier call was interrupted after this target
                    continue
                stack[:] = [other for other in stack if other is not setting]
                _activate_setting(target, stack[-1])
                if len(stack) == 1:
                    _change_regularizer(target, original_regularizer)
                    del vars(target)[POLICY_STACK]
            self._restore_new_layers()
            self._settings = []

    def _restore_new_layers(self) -> None:
        """Reset child layers that were created under the policy: they got the applied policy, not the original."""
        given = {id(setting.policy): target for target, setting in self._settings if setting.policy is not None}
        for module in list_layers(self._model):
            source = given.get(id(get_layer_policy(module.layer)))
            if source is not None and source is not module.layer:
                set_layer_policy(module.layer, get_layer_policy(source))
            if POLICY_STACK not in vars(module.layer):
                _change_regularizer(module.layer, original_regularizer)

    def _setting(self, choice: LayerDtype, plan: ResolvedPolicy, dtypes: Mapping[int, str | None]) -> _LayerSetting:
        target, dtype = choice.target, choice.dtype
        call = _original_method(target, "call")
        islands = plan.kept and plan.mixes
        gathers = islands and is_gather(target)
        if gathers:
            call = sum_gather_gradient_in_float32(call)
        if not is_layer(target):
            return _LayerSetting(None, {"call": call if dtype is None else cast_inputs(call, dtype)})
        own = None if dtype is None else keras_policy(plan.param, dtype)
        if own is not None and own.compute_dtype in HALF_DTYPES:
            own = integer_input_policy(own, target)
        # Explicitly requested 16 bits also apply to losses.
        refuses = islands and choice.why not in ("override", "given", "op_rules")
        methods = {"add_loss": _float32_add_loss(choice, refuses=refuses)}
        if gathers:
            methods["call"] = call
        if choice.why == FLOAT8:
            methods[FLOAT8_CALL] = made = float8_call(target, plan.policy.float8)
            if inspect.ismethod(call):  # else it is a stand-in with `late_call`
                methods["call"] = call = made
        if plan.narrow:
            checked = refuse_narrow_ids(call, target, choice.path)
            if checked is not None:
                methods["call"] = call = checked
            if not is_keras_code(type(target)) or isinstance(target, keras.layers.Lambda):
                methods["call"] = call = raise_mixed_dtype_errors(call, target, choice.path)
            if functional_model(target) is target:
                methods |= mark_integer_inputs(target)
        if isinstance(target, SENSITIVE_LAYERS) and not target.autocast and dtype not in (None, *HALF_DTYPES):
            # Keras does not cast the input of its normalisations, and rounds their result to the input's dtype.
            methods["call"] = call = cast_inputs(call, str(dtype))
        methods |= self._results(choice, plan, dtypes, call, refuses=refuses, changed="call" in methods)
        if isinstance(target, keras.layers.Attention) and dtype in HALF_DTYPES and islands:
            own_scores = functools.partial(apply_scores, target)
            methods[APPLY_SCORES] = copy_signature(_original_method(target, APPLY_SCORES), own_scores)
            if isinstance(target, keras.layers.AdditiveAttention) or target.score_mode == "concat":
                methods[CALCULATE_SCORES] = cast_inputs(_original_method(target, CALCULATE_SCORES), "float32")
        return _LayerSetting(own, methods)

    def _results(
        self,
        choice: LayerDtype,
        plan: ResolvedPolicy,
        dtypes: Mapping[int, str | None],
        call: Callable[..., Any],
        *,
        refuses: bool,
        changed: bool,
    ) -> dict[str, Callable[..., Any]]:
        """Return the replacement of `call` that returns its results in the dtype that its caller expects."""
        target, dtype = choice.target, choice.dtype
        checks = refuses and not is_container(target)
        check = functools.partial(check_scalar_results, target, choice.path) if checks else None
        if target is self._model and _is_rounding(plan):
            return {"call": cast_result_to_output(call, plan, check)}
        if choice.parent is not None and dtype is not None:
            outer = dtypes[id(choice.parent)] or own_policy(choice.parent).compute_dtype
            if outer != dtype or is_container(target):
                call, changed = round_result(call, outer), True
        elif isinstance(target, keras.layers.SpectralNormalization) and choice.why == "sensitive":
            call, changed = round_result(call, plan.compute), True
        if not _is_rounding(plan) or not (changed or dtype != plan.output):
            return {"call": call} if changed else {}
        applies = functools.partial(is_call_for_loss, target, in_fit=_has_own_train_step(self._model))
        return {"call": cast_result_to_output(call, plan, check, applies)}


class PolicyTemplate:
    """A policy that is applied to a model again and again, as around every step that is not compiled.

    Its settings are computed once, and anew after the program has replaced a method of a layer.

    Args:
        model: a Keras layer or model.
        plan: the policy, resolved for this model.
    """

    def __init__(self, model: Any, plan: ResolvedPolicy) -> None:
        self._model = model
        self._plan = plan
        self._made: PolicyApplication | None = None
        self._methods: list[dict[str, Callable[..., Any]]] = []

    def application(self) -> PolicyApplication:
        """Return an application that is not put yet."""
        with _LOCK:
            if self._made is None or self._methods != self._original_methods(self._made):
                self._made = PolicyApplication(self._model, self._plan)
                self._methods = self._original_methods(self._made)
            return self._made.again()

    def _original_methods(self, made: PolicyApplication) -> list[dict[str, Callable[..., Any]]]:
        return [_original_attributes(choice.target) for choice in made.choices]


@contextlib.contextmanager
def suspend_policies(model: Any) -> Iterator[None]:
    """Context manager in which each layer has its original Keras policy, for its configuration."""
    with _LOCK:
        stacked = [module.layer for module in list_layers(model) if POLICY_STACK in vars(module.layer)]
        try:
            for layer in stacked:
                set_layer_policy(layer, own_policy(layer))
            yield
        finally:
            for layer in stacked:
                _activate_setting(layer, vars(layer)[POLICY_STACK][-1])


@contextlib.contextmanager
def without_policies(model: Any) -> Iterator[None]:
    """Context manager in which a model has none of the policies that were applied to its layers and operations."""
    stacks: list[tuple[Any, list[_LayerSetting]]] = []
    try:
        with _LOCK:
            for target in _stacked_targets(model):
                stacks.append((target, vars(target)[POLICY_STACK]))
                _activate_setting(target, stacks[-1][1][0])
                _change_regularizer(target, original_regularizer)
                del vars(target)[POLICY_STACK]
        drop_cached_functions(model)
        yield
    finally:
        with _LOCK:
            for target, stack in stacks:
                vars(target)[POLICY_STACK] = stack
                _activate_setting(target, stack[-1])
                _change_regularizer(target, float32_regularizer)
        drop_cached_functions(model)


def _stacked_targets(model: Any) -> list[Any]:
    """Return the layers of a model, and the operations of its functional models, that have an applied policy."""
    layers = [module.layer for module in list_layers(model)]
    functions = [function for function in map(functional_model, layers) if function is not None]
    operations = [operation for function in functions for operation in (function, *function.operations)]
    targets = {id(target): target for target in (*layers, *operations)}
    return [target for target in targets.values() if POLICY_STACK in vars(target)]


def drop_cached_functions(model: Any) -> None:
    """Make Keras retrace `fit`, `evaluate` and `predict`: a traced function keeps the dtypes from its tracing."""
    for module in list_layers(model):
        for name in CACHED_FUNCTIONS:
            if hasattr(module.layer, name):
                setattr(module.layer, name, None)


def _float32_add_loss(choice: LayerDtype, *, refuses: bool) -> Callable[..., Any]:
    """Return the replacement of a layer's `add_loss`: Keras stacks its losses with float32 losses."""
    add_loss = _original_method(choice.target, "add_loss")
    if refuses:
        return refuse_narrow_losses(add_loss, choice.target, choice.path)
    return cast_inputs(add_loss, "float32")


def _has_own_train_step(model: Any) -> bool:
    """Return whether a model's class overrides a step of `fit` or `evaluate`, where it may call its layers."""
    return any(not is_keras_code(getattr(type(model), name, keras.Layer)) for name in _STEP_METHODS)


def _is_rounding(plan: ResolvedPolicy) -> bool:
    return bool(plan.narrow) or plan.output in HALF_DTYPES


def _own_attributes(target: Any) -> dict[str, Callable[..., Any]]:
    return {name: vars(target)[name] for name in _REPLACED_METHODS if name in vars(target)}


def _original_attributes(target: Any) -> dict[str, Callable[..., Any]]:
    stack = vars(target).get(POLICY_STACK)
    return _own_attributes(target) if stack is None else dict(stack[0].methods)


def _original_method(target: Any, name: str) -> Callable[..., Any]:
    """Return the target's original method, whether or not it is replaced now."""
    own = _original_attributes(target)
    method: Callable[..., Any] = own.get(name) or getattr(type(target), name).__get__(target, type(target))
    return method


def _activate_setting(target: Any, setting: _LayerSetting) -> None:
    """Activate a setting, without Keras's setters, which edit a DTypePolicyMap in place and track values."""
    if is_layer(target):
        policy = setting.policy if setting.policy is not None else vars(target)[POLICY_STACK][0].policy
        set_layer_policy(target, own_policy(target) if is_quantized(target) else policy)
    for name in _REPLACED_METHODS:
        vars(target).pop(name, None)
    vars(target).update({**vars(target)[POLICY_STACK][0].methods, **setting.methods})


def _change_regularizer(target: Any, change: Callable[[Any], Any]) -> None:
    """Change the target's current activity regularizer, which users may have set meanwhile."""
    if is_layer(target) and _REGULARIZER in vars(target):
        vars(target)[_REGULARIZER] = change(vars(target)[_REGULARIZER])
