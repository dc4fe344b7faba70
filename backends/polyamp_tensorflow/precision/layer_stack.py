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
from polyamp_tensorflow.compat import SCORES, WEIGHTED, held_policy, hold_policy
from polyamp_tensorflow.models.layers import is_layer, modules, only_contains
from polyamp_tensorflow.precision.dataflow import is_gather
from polyamp_tensorflow.precision.keras_policies import STACK, is_quantized, keras_policy, own_policy
from polyamp_tensorflow.precision.layer_choice import Choice, choose
from polyamp_tensorflow.precision.op_list import SENSITIVE_LAYERS
from polyamp_tensorflow.precision.regularizers import in_float32, without_float32
from polyamp_tensorflow.precision.stand_ins import (
    apply_scores,
    casting_inputs,
    giving_output,
    rounding,
    signature_of,
    summed_in_float32,
)

_CACHED_FUNCTIONS: Final = ("train_function", "test_function", "predict_function")
_REPLACED: Final = ("call", "add_loss", WEIGHTED, SCORES)
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
        # A sum of the user's own stays in the dtype of its operands; `fit` adds it to float32 ones.
        methods = {"add_loss": casting_inputs(_method(target, "add_loss"), "float32")}
        if gathers:
            methods["call"] = call
        if isinstance(target, SENSITIVE_LAYERS) and not target.autocast and dtype not in (None, *NARROW):
            # Keras leaves the input of its normalisations alone, and rounds their result to the input's dtype.
            methods["call"] = call = casting_inputs(call, str(dtype))
        if target is self._model and _rounds(plan):
            methods["call"] = giving_output(call, plan)
        elif choice.parent is not None and dtype is not None:
            outer = dtypes[id(choice.parent)] or own_policy(choice.parent).compute_dtype
            if outer != dtype or only_contains(target):
                methods["call"] = rounding(call, outer)
        elif isinstance(target, keras.layers.SpectralNormalization) and choice.why == "sensitive":
            methods["call"] = rounding(call, plan.compute)
        if isinstance(target, keras.layers.Attention) and dtype in NARROW and islands:
            own_scores = functools.partial(apply_scores, target)
            methods[WEIGHTED] = signature_of(_method(target, WEIGHTED), own_scores)
            if isinstance(target, keras.layers.AdditiveAttention) or target.score_mode == "concat":
                methods[SCORES] = casting_inputs(_method(target, SCORES), "float32")
        return _Setting(own, methods)


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
