"""A `Policy` on Keras layers: as a `keras.DTypePolicy`, on a built model for a while, and around any callable.

Keras's finest grain is the layer, so both modes (S3) set every layer's compute dtype; variables stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.checks import FLOATING
from polyamp.errors import UnsupportedError
from polyamp.policy import Policy
from polyamp_tensorflow.arrays import cast
from polyamp_tensorflow.models import is_layer, modules

_CACHED_FUNCTIONS: Final = ("train_function", "test_function", "predict_function")


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


def native_policy(policy: Policy) -> Any:
    """The `keras.DTypePolicy` of a policy.

    Raises:
        UnsupportedError: Keras has no policy with these dtypes.
    """
    return _dtype_policy(policy.param, policy.compute)


def _dtype_policy(param: str, compute: str) -> Any:
    if param == compute:
        return keras.DTypePolicy(param)
    if param == "float32" and compute in ("float16", "bfloat16"):
        return keras.DTypePolicy(f"mixed_{compute}")
    raise UnsupportedError(
        "Keras can store parameters in float32 and compute in float16 or bfloat16, or do both in one dtype. "
        f"Received: param={param!r}, compute={compute!r}."
    )


@contextlib.contextmanager
def layer_policies(model: Any, policy: Policy) -> Iterator[None]:
    """Every layer of a model under the policy; afterwards each has again the policy it had.

    Layers that are quantized or do not compute in floating point keep their own. Variables keep their dtype.
    """
    found = modules(model)
    overrides = policy.resolve_overrides(module.path for module in found if module.path) if found else {}
    previous = []
    try:
        for layer, path, _ in found:
            if getattr(layer.dtype_policy, "quantization_mode", None) or layer.compute_dtype not in FLOATING:
                continue
            previous.append((layer, layer.dtype_policy))
            compute = policy.param if _only_contains(layer) else overrides.get(path, policy.compute)
            _set_policy(layer, _dtype_policy(policy.param, compute))
        yield
    finally:
        for layer, own in previous:
            _set_policy(layer, own)


@contextlib.contextmanager
def apply_policy(model: Any, policy: Policy) -> Iterator[None]:
    """A built Keras model under a policy for the time of a `with` block, `fit`, `evaluate` and `predict` included.

    Args:
        model: a built `keras.Model` or layer; its variables stay as they are.
        policy: what its layers compute in.

    Raises:
        UnsupportedError: not a Keras layer, or dtypes that Keras has no policy for.
        PolicyError: an override matches no layer.

    Example:
        >>> import keras, polyamp, polyamp_tensorflow
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with polyamp_tensorflow.apply_policy(model, polyamp.Policy("mixed_bfloat16")):
        ...     inside = model.layers[0].compute_dtype
        >>> inside, model.layers[0].compute_dtype
        ('bfloat16', 'float32')
    """
    check_policy(model, policy)
    if not is_layer(model):
        raise UnsupportedError(f"apply_policy takes a keras.Model or layer. Received: {type(model).__qualname__}.")
    with layer_policies(model, policy):
        _drop_cached_functions(model)
        try:
            yield
        finally:
            _drop_cached_functions(model)


def check_policy(model: Any, policy: Policy) -> None:
    """Refuse a policy that this model cannot follow, before the first step (S20).

    Raises:
        UnsupportedError: dtypes without a Keras policy; a mixed policy on what has no Keras layers.
        PolicyError: an override matches no layer.
    """
    require_tensorflow()
    for compute in (policy.compute, *policy.overrides.values()):
        _dtype_policy(policy.param, compute)
    if is_layer(model):
        policy.resolve_overrides(module.path for module in modules(model) if module.path)
    elif policy.compute != policy.param or policy.overrides:
        raise UnsupportedError(
            f"a mixed policy needs Keras layers, whose dtypes it can set. Received: {type(model).__qualname__} with "
            f"{policy}. Pass a keras.Model or layer, or use Policy({policy.param!r})."
        )


def autocast(target: Any, policy: Policy) -> Callable[..., Any]:
    """A Keras layer or model, or a function, as a callable that runs under the policy.

    A layer's sublayers follow the policy. A function has none, so it runs in "cast" mode: its floating arguments are
    cast to `compute`. In both cases floating results are cast to `output`.

    Raises:
        UnsupportedError: mode="autocast" for a function; dtypes that Keras has no policy for.
    """
    require_tensorflow()
    if is_layer(target):
        check_policy(target, policy)
    elif policy.mode == "autocast" or policy.overrides:
        raise UnsupportedError(
            "on TensorFlow the layer is the finest grain of mode='autocast' and of overrides, so they need a "
            f"keras.Model or layer. Received: {getattr(target, '__qualname__', type(target).__qualname__)} with "
            f"{policy}. Use policy.replace(mode='cast') for a function."
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        with matmul_precision(policy), layer_policies(target, policy):
            if not is_layer(target):
                args, kwargs = cast((args, kwargs), policy.compute, float64=policy.casts_float64)
            return cast(target(*args, **kwargs), policy.output, float64=policy.casts_float64)

    return call


@contextlib.contextmanager
def matmul_precision(policy: Policy) -> Iterator[None]:
    """TensorFlow's switch for TF32, process-global and read when a kernel starts, set for the time of a call."""
    if policy.float32_matmul is None:
        yield
        return
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(policy.float32_matmul != "highest")
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _only_contains(layer: Any) -> bool:
    """True for a functional or sequential model: it computes nothing itself, and under a 16-bit policy it would round
    its inputs before a layer inside that an override keeps in float32 sees them."""
    container = isinstance(layer, keras.Sequential | keras.Function)
    return container and str(type(layer).call.__module__).startswith("keras.")


def _set_policy(layer: Any, policy: Any) -> None:
    # The public setter edits a DTypePolicyMap in place, so the layer's own could not be put back.
    layer._dtype_policy = policy


def _drop_cached_functions(model: Any) -> None:
    """Let Keras trace `fit`, `evaluate` and `predict` anew: a traced function keeps the dtypes it was traced with."""
    for name in _CACHED_FUNCTIONS:
        if hasattr(model, name):
            setattr(model, name, None)
