"""What dtype each layer of a Keras model gets under a `Policy`, and why.

`choose` goes through the rules of docs/guides/tensorflow_policy.md from the top; the first that applies decides. It
changes nothing: `layer_stack` puts the choices on the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import keras
import tensorflow as tf

from polyamp.errors import PolicyError
from polyamp.recipe.policy import Policy
from polyamp.rules import aliases, overrides
from polyamp.rules.plan import NARROW, Plan
from polyamp.rules.refusals import FLOATING
from polyamp_tensorflow.compat import EagerTensor, given_arguments, is_kerass
from polyamp_tensorflow.models.layers import Module, modules, names_of, only_contains
from polyamp_tensorflow.precision.dataflow import feeding_logarithms, is_gather, is_inner_product, multiplies
from polyamp_tensorflow.precision.heads import heads_of
from polyamp_tensorflow.precision.keras_policies import own_policy
from polyamp_tensorflow.precision.op_list import is_product, is_sensitive, is_sensitive_operation, may_be_binary_head
from polyamp_tensorflow.precision.own_losses import adds_losses

_TENSORS: Final = (EagerTensor, tf.Variable)


class Choice(NamedTuple):
    """What a layer, or an operation of a functional model, gets.

    Attributes:
        target: the layer or operation.
        path: where it lies; "" for the model itself.
        dtype: what it computes in; None where its own policy stays.
        why: "compute", "override", "given" (to its constructor), "quantized", "not floating", "float64" (S2), "head",
            "sensitive", "loss" (its code adds one), "constants", "contains" (a functional or sequential model), "inner"
            (a wrapper follows what it wraps), "product" or "gather" (of an operation).
        parent: the layer that calls it, where that is not a functional or sequential model; else None.
    """

    target: Any
    path: str
    dtype: str | None
    why: str
    parent: Any = None


def plan_of(model: Any, policy: Policy) -> Plan:
    """The policy resolved for a Keras layer or model: its layers, and the operations of functional models.

    A layer that lies in several places has the dtype of the longest glob that covers it in any of them (S5). Keras's
    automatic names count per process; the name counted within the model, as checkpoints have it, is matched too.

    Raises:
        PolicyError: an override matches nothing; the message lists the nearest paths.
    """
    if not policy.overrides:
        return policy.plan()
    found = modules(model)
    names = names_of(found)
    places = [names[module.path] for module in found]
    places += [(path,) for module in found for _, path in operations_of(module)]
    called = aliases.named(policy.aliases, "tensorflow", [[path for path in place if path] for place in places])
    overrides.check_all_match(policy.overrides, (name for own in called for name in own))
    named = {place[0]: overrides.dtype_at(policy.overrides, *own) for place, own in zip(places, called, strict=True)}
    return Plan(policy, {path: dtype for path, dtype in named.items() if dtype is not None})


def choose(model: Any, plan: Plan, *, heads: bool = False) -> list[Choice]:
    """A choice for every layer of a model, and for those operations of functional models that need one.

    Args:
        model: a Keras layer or model.
        plan: the policy, resolved for this model.
        heads: layers that give logits compute in float32, unless `autocast.output` is narrower.

    Raises:
        PolicyError: an override puts a head that gives probabilities in 16 bits.
        UnsupportedError: dtypes that Keras has no policy for.
    """
    found = modules(model)
    giving_output = heads_of(found)
    feeding = _feeding(found) if plan.kept and plan.mixes else None
    choices: dict[int, Choice] = {}
    clear: set[int] = set()  # what only contains layers, whose way to the output can be followed
    for module in found:
        layer = module.layer
        if only_contains(layer) and (module.parent is None or id(module.parent) in clear):
            clear.add(id(layer))
        given_heads = giving_output if heads else {}
        dtype, why = _layer_dtype(module, plan, given_heads, feeding, choices.get(id(module.parent)))
        gate = feeding is not None and may_be_binary_head(layer) and id(module.parent) not in clear
        if why == "compute" and gate:
            dtype, why = "float32", "sensitive"
        called_by = None if module.parent is None or only_contains(module.parent) else module.parent
        choice = Choice(layer, module.path, dtype, why, called_by)
        sure = giving_output.get(id(layer)) == "probabilities" and why not in ("quantized", "not floating", "float64")
        choices[id(layer)] = _probabilities(choice, plan) if sure else choice
    for module in reversed(found):
        _follow(module.layer, choices)
    operations = [choice for module in found for choice in _operation_choices(module, plan, giving_output, feeding)]
    return [*choices.values(), *operations]


def _feeding(found: list[Module]) -> set[int]:
    """ids of what feeds a logarithm or `1 - x` in the functional models. Elsewhere None stands for a plan that holds no
    family of S4 in float32."""
    return {one for module in found if only_contains(module.layer) for one in feeding_logarithms(module.layer)}


def _layer_dtype(
    module: Module, plan: Plan, heads: dict[int, Any], feeding: set[int] | None, above: Choice | None
) -> tuple[str | None, str]:
    layer, own = module.layer, own_policy(module.layer)
    if getattr(own, "quantization_mode", None):
        return None, "quantized"
    if own.compute_dtype not in FLOATING:
        return None, "not floating"
    if own.compute_dtype == "float64" and not plan.float64:
        return None, "float64"
    if only_contains(layer):
        given = (above is not None and above.why == "given") or _is_given(layer, plan)
        return (None, "given") if given else (plan.param, "contains")
    named = plan.at(module.path).named
    if named is not None:
        return named, "override"
    if (above is not None and above.why == "given") or _is_given(layer, plan):
        return None, "given"
    if plan.compute not in NARROW or plan.param != "float32":
        return plan.compute, "compute"
    if heads.get(id(layer)) == "logits" and plan.output not in NARROW:
        return "float32", "head"
    if feeding is not None and (is_sensitive(layer) or id(layer) in feeding or is_inner_product(layer)):
        return "float32", "sensitive"
    if feeding is not None and adds_losses(layer):
        return "float32", "loss"
    if _holds_constants(layer):
        return "float32", "constants"
    return plan.compute, "compute"


def _is_given(layer: Any, plan: Plan) -> bool:
    """True if the user gave the layer's constructor a dtype that this policy can leave alone.

    Keras keeps the arguments of a constructor for `get_config` if all are plain. Layers from `load_model` and
    `clone_model` have been given every argument, `trainable` among them, so theirs says nothing. A 16-bit dtype yields
    to a policy that brings no loss scaling for it, or that asks for full precision.
    """
    arguments = given_arguments(layer)
    if arguments is None or arguments.get("dtype") is None or "trainable" in arguments:
        return False
    dtype = own_policy(layer).compute_dtype
    if dtype == "float16":
        return "float16" in plan.narrow and plan.param != "float16"
    return dtype != "bfloat16" or plan.compute in NARROW


def _holds_constants(layer: Any) -> bool:
    """True for a layer of the user's that keeps float32 tensors: TensorFlow refuses to combine them with 16 bits."""
    if isinstance(layer, keras.layers.TFSMLayer):
        return True
    if isinstance(layer, keras.layers.Lambda):
        own = [cell.cell_contents for cell in getattr(layer.function, "__closure__", None) or ()]
    elif is_kerass(type(layer)):
        return False
    else:
        own = [value for name, value in vars(layer).items() if name not in _attributes_of_layers()]
    return any(isinstance(leaf, _TENSORS) and leaf.dtype == tf.float32 for leaf in _flat(own))


@functools.cache
def _attributes_of_layers() -> frozenset[str]:
    """Names that Keras itself sets. Asked for late: the first layer of a process settles Keras's global policy."""
    return frozenset(vars(keras.layers.Layer(name="none")))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flat(item)
    else:
        yield value


def _follow(layer: Any, choices: dict[int, Choice]) -> None:
    """A wrapper such as TimeDistributed only passes on what its layer gives: it takes that layer's dtype."""
    own = choices[id(layer)]
    if isinstance(layer, keras.layers.Wrapper) and own.why in ("compute", "head"):
        inner = choices[id(layer.layer)]
        dtype = inner.dtype or own_policy(layer.layer).compute_dtype
        if dtype in FLOATING and inner.why != "quantized":
            choices[id(layer)] = own._replace(dtype=dtype, why=own.why if dtype == own.dtype else "inner")


def _probabilities(choice: Choice, plan: Plan) -> Choice:
    """Probabilities come in float32, in every mode: Keras's cross-entropy clips them, and in 16 bits loses the logits.

    Raises:
        PolicyError: an override asks for 16 bits.
    """
    dtype = choice.dtype or own_policy(choice.target).compute_dtype
    if plan.param in NARROW or dtype not in NARROW:
        return choice
    if choice.why == "override":
        raise PolicyError(
            f"overrides: {choice.path!r} gives probabilities, and cross-entropy of 16-bit probabilities is wrong (a "
            f"loss of 30 is reported as 16.1). Received: {dtype}. Leave it in float32, or let it give logits "
            "(activation=None, from_logits=True in the loss)."
        )
    return choice._replace(dtype="float32", why="head")


def operations_of(module: Module) -> list[tuple[Any, str]]:
    """(operation, path) of what a functional model calls beside its layers."""
    if not isinstance(module.layer, keras.Function) or not only_contains(module.layer):
        return []
    prefix = f"{module.path}/" if module.path else ""
    return [
        (operation, prefix + operation.name)
        for operation in module.layer.operations
        if not isinstance(operation, keras.Layer)
    ]


def _operation_choices(module: Module, plan: Plan, heads: dict[int, str], feeding: set[int] | None) -> Iterator[Choice]:
    for operation, path in operations_of(module):
        named = plan.at(path).named
        if named is not None:
            choice = Choice(operation, path, named, "override")
            yield _probabilities(choice, plan) if heads.get(id(operation)) == "probabilities" else choice
        elif heads.get(id(operation)) == "probabilities" and plan.param == "float32":
            yield Choice(operation, path, "float32", "head")
        elif feeding is not None and (
            is_sensitive_operation(operation) or id(operation) in feeding or is_inner_product(operation)
        ):
            yield Choice(operation, path, "float32", "sensitive")
        elif is_product(operation) and plan.compute in NARROW and not multiplies(operation):
            yield Choice(operation, path, plan.compute, "product")
        elif feeding is not None and is_gather(operation):
            yield Choice(operation, path, None, "gather")
