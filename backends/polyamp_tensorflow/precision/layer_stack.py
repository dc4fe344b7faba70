"""Putting a policy's choices on the layers of a model, and taking them off again.

A layer's compute dtype is its Keras `dtype_policy`. What that cannot say stands in for one of the layer's own methods:
casting what a layer returns (inside a layer with its own `call`, where TensorFlow's operators refuse mixed dtypes), the
softmax in the middle of an attention layer, an operation of a functional model, the dtype of the model's output, and
that of regularization losses.

Each layer carries a stack of settings, its own at the bottom, so that policies that are applied and taken off in any
order, in several threads as well, leave it with those that remain, and in the end with its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import keras

from polyamp.rules.plan import NARROW, Plan
from polyamp_tensorflow.compat import (
    ADJUST_RANK,
    CONVERT_INPUTS,
    SCORES,
    WEIGHTED,
    functional_of,
    held_policy,
    hold_policy,
    is_kerass,
)
from polyamp_tensorflow.models.layers import is_layer, modules, only_contains
from polyamp_tensorflow.precision.dataflow import is_gather
from polyamp_tensorflow.precision.integers import marking, refusing, taking_integers
from polyamp_tensorflow.precision.keras_policies import STACK, is_quantized, keras_policy, own_policy
from polyamp_tensorflow.precision.layer_choice import Choice, choose
from polyamp_tensorflow.precision.mixed_dtypes import naming_mixed_dtypes
from polyamp_tensorflow.precision.op_list import SENSITIVE_LAYERS
from polyamp_tensorflow.precision.own_losses import check_scalars, refusing_narrow
from polyamp_tensorflow.precision.regularizers import in_float32, without_float32
from polyamp_tensorflow.precision.stand_ins import (
    apply_scores,
    casting_inputs,
    giving_output,
    giving_output_to_losses,
    rounding,
    signature_of,
    summed_in_float32,
)

_CACHED_FUNCTIONS: Final = ("train_function", "test_function", "predict_function")
_REPLACED: Final = ("call", "add_loss", WEIGHTED, SCORES, CONVERT_INPUTS, ADJUST_RANK)
_STEPS: Final = ("train_step", "test_step", "compute_loss")
_REGULARIZER: Final = "activity_regularizer"
_LOCK: Final = threading.RLock()


class _Setting(NamedTuple):
    """What a layer is set to.

    Attributes:
        policy: its `keras.DTypePolicy`; None for its own, and for an operation.
        methods: functions that stand in for methods of the same name.
    """

    policy: Any
    methods: Mapping[str, Callable[..., Any]]


class Application:
    """A policy on a model, from `put` until `restore`.

    Args:
        model: a Keras layer or model.
        plan: the policy, resolved for this model.
        heads: as in `choose`.
        choices: what a file says that each layer gets; None to choose.

    Attributes:
        choices: what each layer gets and why.
    """

    def __init__(self, model: Any, plan: Plan, *, heads: bool = False, choices: Sequence[Choice] | None = None) -> None:
        self._model = model
        with _LOCK:
            self.choices = choose(model, plan, heads=heads) if choices is None else list(choices)
            dtypes = {id(choice.target): choice.dtype for choice in self.choices}
            self._settings = [(choice.target, self._setting(choice, plan, dtypes)) for choice in self.choices]
            known = {id(target) for target, _ in self._settings}
            functions = [functional_of(choice.target) for choice in self.choices if plan.narrow]
            self._settings += [
                (function, _Setting(None, marking(function)))  # inside a sequential model
                for function in functions
                if function is not None and id(function) not in known
            ]

    def put(self) -> None:
        """Put it on; if that is interrupted, `restore` takes off what is on."""
        with _LOCK:
            for target, setting in self._settings:
                own = _Setting(held_policy(target) if is_layer(target) else None, _own(target))
                vars(target).setdefault(STACK, [own]).append(setting)
                _show(target, setting)
                _regularize(target, in_float32)

    def restore(self) -> None:
        """Take the policy off; what was applied before or since stays. A second call does nothing; one that is
        interrupted can be repeated."""
        with _LOCK:
            for target, setting in self._settings:
                stack = vars(target).get(STACK)
                if stack is None:  # a call before this one was interrupted after this target
                    continue
                stack[:] = [other for other in stack if other is not setting]
                _show(target, stack[-1])
                if len(stack) == 1:
                    _regularize(target, without_float32)
                    del vars(target)[STACK]
            self._restore_new_layers()
            self._settings = []

    def _restore_new_layers(self) -> None:
        """A layer that is built under a policy hands what it has to the sublayers it creates: give them its own."""
        given = {id(setting.policy): target for target, setting in self._settings if setting.policy is not None}
        for module in modules(self._model):
            source = given.get(id(held_policy(module.layer)))
            if source is not None and source is not module.layer:
                hold_policy(module.layer, held_policy(source))
            if STACK not in vars(module.layer):
                _regularize(module.layer, without_float32)

    def _setting(self, choice: Choice, plan: Plan, dtypes: Mapping[int, str | None]) -> _Setting:
        target, dtype = choice.target, choice.dtype
        call = _method(target, "call")
        islands = plan.kept and plan.mixes
        gathers = islands and is_gather(target)
        if gathers:
            call = summed_in_float32(call)
        if not is_layer(target):
            return _Setting(None, {"call": call if dtype is None else casting_inputs(call, dtype)})
        own = None if dtype is None else keras_policy(plan.param, dtype)
        if own is not None and own.compute_dtype in NARROW:
            own = taking_integers(own, target)
        # 16 bits that were asked for by name are a loss's too.
        refuses = islands and choice.why not in ("override", "given")
        methods = {"add_loss": _add_loss(choice, refuses=refuses)}
        if gathers:
            methods["call"] = call
        if plan.narrow:
            checked = refusing(call, target, choice.path)
            if checked is not None:
                methods["call"] = call = checked
            if not is_kerass(type(target)) or isinstance(target, keras.layers.Lambda):
                methods["call"] = call = naming_mixed_dtypes(call, target, choice.path)
            if functional_of(target) is target:
                methods |= marking(target)
        if isinstance(target, SENSITIVE_LAYERS) and not target.autocast and dtype not in (None, *NARROW):
            # Keras leaves the input of its normalisations alone, and rounds their result to the input's dtype.
            methods["call"] = call = casting_inputs(call, str(dtype))
        methods |= self._results(choice, plan, dtypes, call, refuses=refuses, changed="call" in methods)
        if isinstance(target, keras.layers.Attention) and dtype in NARROW and islands:
            own_scores = functools.partial(apply_scores, target)
            methods[WEIGHTED] = signature_of(_method(target, WEIGHTED), own_scores)
            if isinstance(target, keras.layers.AdditiveAttention) or target.score_mode == "concat":
                methods[SCORES] = casting_inputs(_method(target, SCORES), "float32")
        return _Setting(own, methods)

    def _results(
        self,
        choice: Choice,
        plan: Plan,
        dtypes: Mapping[int, str | None],
        call: Callable[..., Any],
        *,
        refuses: bool,
        changed: bool,
    ) -> dict[str, Callable[..., Any]]:
        """What stands in for `call` so that it gives its results in the dtype that its caller expects."""
        target, dtype = choice.target, choice.dtype
        check: Callable[[Any], None] = functools.partial(check_scalars, target, choice.path)
        if not refuses or only_contains(target):
            check = _passes
        if target is self._model and _rounds(plan):
            return {"call": giving_output(call, plan, check)}
        if choice.parent is not None and dtype is not None:
            outer = dtypes[id(choice.parent)] or own_policy(choice.parent).compute_dtype
            if outer != dtype or only_contains(target):
                call, changed = rounding(call, outer), True
        elif isinstance(target, keras.layers.SpectralNormalization) and choice.why == "sensitive":
            call, changed = rounding(call, plan.compute), True
        if not _rounds(plan) or not (changed or dtype != plan.output):
            return {"call": call} if changed else {}
        return {"call": giving_output_to_losses(call, target, plan, check, always=_has_own_steps(self._model))}


@contextlib.contextmanager
def own_policies(model: Any) -> Iterator[None]:
    """A block in which each layer has its own Keras policy, as its configuration is to say it."""
    with _LOCK:
        stacked = [module.layer for module in modules(model) if STACK in vars(module.layer)]
        try:
            for layer in stacked:
                hold_policy(layer, own_policy(layer))
            yield
        finally:
            for layer in stacked:
                _show(layer, vars(layer)[STACK][-1])


def drop_cached_functions(model: Any) -> None:
    """Let Keras trace `fit`, `evaluate` and `predict` anew: a traced function keeps the dtypes it was traced with."""
    for module in modules(model):
        for name in _CACHED_FUNCTIONS:
            if hasattr(module.layer, name):
                setattr(module.layer, name, None)


def _add_loss(choice: Choice, *, refuses: bool) -> Callable[..., Any]:
    """What stands in for a layer's `add_loss`: Keras stacks what it is given with float32 losses."""
    add_loss = _method(choice.target, "add_loss")
    if refuses:
        return refusing_narrow(add_loss, choice.target, choice.path)
    return casting_inputs(add_loss, "float32")


def _passes(results: Any) -> None:
    """No check of a layer's results."""


def _has_own_steps(model: Any) -> bool:
    """True for a model whose class says itself what `fit` or `evaluate` does with a batch: it calls layers there."""
    return any(not is_kerass(getattr(type(model), name, keras.Layer)) for name in _STEPS)


def _rounds(plan: Plan) -> bool:
    return bool(plan.narrow) or plan.output in NARROW


def _own(target: Any) -> dict[str, Callable[..., Any]]:
    return {name: vars(target)[name] for name in _REPLACED if name in vars(target)}


def _method(target: Any, name: str) -> Callable[..., Any]:
    """The target's own method, whatever stands in for it now."""
    own = vars(target)[STACK][0].methods if STACK in vars(target) else _own(target)
    method: Callable[..., Any] = own.get(name) or getattr(type(target), name).__get__(target, type(target))
    return method


def _show(target: Any, setting: _Setting) -> None:
    """Make a setting the one in force. Past Keras's setters: they edit a DTypePolicyMap in place, and track values."""
    if is_layer(target):
        policy = setting.policy if setting.policy is not None else vars(target)[STACK][0].policy
        hold_policy(target, own_policy(target) if is_quantized(target) else policy)
    for name in _REPLACED:
        vars(target).pop(name, None)
    vars(target).update({**vars(target)[STACK][0].methods, **setting.methods})


def _regularize(target: Any, change: Callable[[Any], Any]) -> None:
    """Change the target's activity regularizer, whichever it is by now: users may set it."""
    if is_layer(target) and _REGULARIZER in vars(target):
        vars(target)[_REGULARIZER] = change(vars(target)[_REGULARIZER])
