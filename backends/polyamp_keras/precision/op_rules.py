"""`Policy.op_rules` on Keras models: which layers and operations a name covers, and what is refused.

In Keras a dtype belongs to a layer, and in a functional model also to an operation. So a rule covers the layers and
the operations that are the named operation, and not what other layers compute inside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import keras

from polyamp.errors import PolicyError, UnsupportedError, did_you_mean
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.operation_names import check_rules_act, translate_name
from polyamp_keras.compat import is_keras_code, split_names
from polyamp_keras.precision.op_list import public_function_name

_SYNONYMS: Final = {
    "linear": "dense",
    "cat": "concatenate",
    "pow": "power",
    "mul": "multiply",
    "sub": "subtract",
    "div": "divide",
    "truedivide": "divide",
    **{f"{kind}norm": f"{kind}normalization" for kind in ("batch", "layer", "group", "rms")},
}
"""Names of torch and of Keras's classes of operations -> Keras's name, without underscores."""
_BASES: Final = split_names("layer operation wrapper model function functional sequential")
_FUNCTION_LAYERS: Final = (keras.layers.Activation, keras.layers.Lambda)
"""Layers that call one function."""
_ACTIVATIONS: Final = ("activation", "recurrent_activation")
"""Attributes of layers whose functions run inside the layer."""
_RULES: Final = ("compute", "float32")


def operation_key(name: str) -> str:
    """Return the form of a name in which spellings are compared.

    >>> operation_key("layer_norm"), operation_key("LayerNormalization"), operation_key("Conv2D")
    ('layernormalization', 'layernormalization', 'conv2d')
    """
    key = name.replace("_", "").lower()
    return _SYNONYMS.get(key, key)


def ruled_dtype(target: Any, plan: ResolvedPolicy) -> str | None:
    """Return the compute dtype that a rule gives to a layer or operation; None if no rule covers it."""
    if not plan.op_rules or not plan.mixes:
        return None
    rules = {operation_key(name): rule for name, rule in plan.op_rules.items()}
    rule = next((rules[key] for key in _keys(target) if key in rules), None)
    return plan.compute if rule == "compute" else rule


def check_op_rules(policy: Policy) -> None:
    """Reject rules that Keras cannot follow on any model (S20).

    Raises:
        PolicyError: a name that Keras does not have, or two names of one operation.
        UnsupportedError: another rule than "compute" and "float32", or a policy that has no op list.
    """
    names: dict[str, str] = {}
    for name, rule in policy.op_rules.items():
        known = known_operations()
        if operation_key(name) not in known:
            hint = translate_name(name, "tensorflow") or did_you_mean(name, known.values())
            raise PolicyError(
                f"op_rules: Keras has no layer or operation {name!r}.{hint} Names are those of keras.layers and "
                "keras.ops, such as 'softmax', 'layer_normalization' or 'dense'. Each framework has names of its own."
            )
        if rule not in _RULES:
            raise UnsupportedError(
                f"op_rules[{name!r}] must be one of {_RULES} in Keras, whose layers have one compute dtype. Received: "
                f"{rule!r}."
            )
        other = names.setdefault(operation_key(name), name)
        if other != name:
            raise PolicyError(f"op_rules: {other!r} and {name!r} are one operation in Keras. Keep one of them.")
    check_rules_act(policy.op_rules, policy.mode, policy.param, policy.compute)


def refuse_op_rules(policy: Policy, what: str) -> None:
    """Reject rules for something that has no layers.

    Raises:
        UnsupportedError: the policy has `op_rules`.
    """
    if policy.op_rules:
        raise UnsupportedError(
            f"op_rules need a keras.Model or layer: in TensorFlow the layer is the finest grain. Received: "
            f"op_rules={dict(policy.op_rules)} for {what}. Use policy.replace(op_rules={{}})."
        )


def check_rules_reach(plan: ResolvedPolicy, layers: Iterable[tuple[Any, str]], operations: Iterable[Any]) -> None:
    """Reject rules for what a built model computes nowhere, or inside of other layers.

    Args:
        plan: the resolved policy.
        layers: each layer of the model and its path.
        operations: the operations of its functional models.

    Raises:
        PolicyError: no layer and no operation of the model is the named one.
        UnsupportedError: a layer computes the operation inside.
    """
    if not plan.op_rules or not plan.mixes:
        return
    entries = list(layers)
    covered = {key for target, _ in entries for key in _keys(target)}
    covered |= {key for operation in operations for key in _keys(operation)}
    for name, rule in plan.op_rules.items():
        key = operation_key(name)
        for layer, path in entries:
            if key in _inner_keys(layer) and plan.at(path).named is None:
                dtype = plan.compute if rule == "compute" else rule
                raise UnsupportedError(
                    f"op_rules: the layer {path or layer.name!r} ({type(layer).__name__}) computes {name!r} inside, "
                    f"and a layer of Keras has one compute dtype. Use overrides={{{path!r}: {dtype!r}}} for the whole "
                    f"layer, or give {name!r} a layer of its own."
                )
        if key not in covered:
            raise PolicyError(
                f"op_rules: {name!r} is no layer of the model, and no operation of a functional model. What a layer "
                "computes in its own call cannot be reached: use overrides= for that layer."
                + did_you_mean(name, covered)
            )


def _keys(target: Any) -> Iterator[str]:
    """Yield the names of what a layer or operation is, the most specific first."""
    if isinstance(target, _FUNCTION_LAYERS):
        yield _function_key(target.activation if isinstance(target, keras.layers.Activation) else target.function)
    for cls in type(target).__mro__:
        key = operation_key(cls.__name__)
        if is_keras_code(cls) and key not in _BASES:
            yield key


def _function_key(function: Any) -> str:
    """Return the key of a function; Keras's "linear" is no dense layer but the activation that does nothing."""
    return "identity" if function is keras.activations.linear else operation_key(public_function_name(function))


def _inner_keys(layer: Any) -> Iterator[str]:
    """Yield the names of what a layer computes inside, by its activations and in Keras's attention."""
    if isinstance(layer, keras.layers.Attention):
        yield "softmax"
    if isinstance(layer, _FUNCTION_LAYERS):
        return
    own = set(_keys(layer))
    for name in _ACTIVATIONS:
        function = getattr(layer, name, None)
        if callable(function) and (key := _function_key(function)) not in own:
            yield key


@functools.cache
def known_operations() -> Mapping[str, str]:
    """Return the names of Keras's layers and operations by their key, in the spelling of error messages."""
    functions = [name for space in (keras.ops, keras.activations) for name in dir(space) if name[0].islower()]
    layers = [name for name in dir(keras.layers) if name[0].isupper()]
    found = {operation_key(name): name for name in (*_SYNONYMS, *layers, *functions)}
    return {key: name for key, name in found.items() if key not in _BASES}
