"""Choice of the dtype of each layer of a Keras model under a `Policy`, with its reason.

`choose_layer_dtypes` applies the first matching rule of docs/reference/keras_layer_dtypes.md. It does not change the
model: `policy_application` applies the choices to the layers. The layers and operations that output probabilities are
in float32 in every mode, those that output logits only with `apply_policy(heads=True)`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import keras

from polyamp.errors import PolicyError
from polyamp.float_formats import FLOAT_DTYPES, HALF_DTYPES
from polyamp.recipe import overrides, path_aliases
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.compat import constructor_arguments, inbound_nodes, is_keras_code, keras_history
from polyamp_keras.engine import ENGINE
from polyamp_keras.models.layers import LayerEntry, is_container, layer_path_aliases, list_layers, recurrent_cells
from polyamp_keras.precision.float8_layers import product_reason, with_heads
from polyamp_keras.precision.float32_layer_losses import has_add_loss_call
from polyamp_keras.precision.functional_graph import is_gather, is_inner_product, is_multiplication, logarithm_sources
from polyamp_keras.precision.keras_policies import own_policy
from polyamp_keras.precision.op_list import (
    has_probability_output,
    is_dense,
    is_possible_binary_head,
    is_product,
    is_sensitive,
    is_sensitive_operation,
)
from polyamp_keras.precision.op_rules import check_rules_reach, ruled_dtype

_HEAD_NAMES: Final = frozenset({"head", "logits", "predictions", "probabilities", "classifier"})


class LayerDtype(NamedTuple):
    """Dtype of a layer, or of an operation of a functional model.

    Attributes:
        target: the layer or operation.
        path: its path; "" for the model itself.
        dtype: the compute dtype; None if it keeps its own policy.
        why: the reason: "compute", "override", "given" (to its constructor), "quantized", "not floating", "float64"
            (S2), "op_rules", "head", "sensitive", "loss" (its code adds one), "constants", "contains" (a functional or
            sequential model), "inner" (a wrapper follows its layer), "product" or "gather" (of an operation); under a
            policy with products in 8 bits those of `float8_layers.product_reason`.
        parent: the layer that calls it, unless that is a functional or sequential model; else None.
    """

    target: Any
    path: str
    dtype: str | None
    why: str
    parent: Any = None


def resolve_layer_policy(model: Any, policy: Policy) -> ResolvedPolicy:
    """Resolve a policy for a Keras layer or model: for its layers, and for the operations of functional models.

    A shared layer has the dtype of the longest glob that covers any of its paths (S5). Keras numbers automatic names
    per process; the name numbered within the model, as in checkpoints, is matched too.

    Raises:
        PolicyError: an override matches nothing; the message lists the nearest paths. Or `op_rules` names nothing that
            the model computes.
        UnsupportedError: `op_rules` names what a layer computes inside.
    """
    if not policy.overrides and not policy.op_rules:
        return policy.plan()
    found = list_layers(model)
    plan = _resolve_overrides(found, policy)
    operations = [operation for module in found for operation, _ in functional_operations(module)]
    check_rules_reach(plan, [(module.layer, module.path) for module in found], operations)
    return plan


def _resolve_overrides(found: list[LayerEntry], policy: Policy) -> ResolvedPolicy:
    if not policy.overrides:
        return policy.plan()
    names = layer_path_aliases(found)
    paths = [names[module.path] for module in found]
    paths += [(path,) for module in found for _, path in functional_operations(module)]
    called = path_aliases.expand_aliases(
        policy.aliases, keras.config.backend(), [[path for path in own if path] for own in paths]
    )
    overrides.check_all_match(policy.overrides, (name for own in called for name in own))
    named = {path[0]: overrides.dtype_at(policy.overrides, *own) for path, own in zip(paths, called, strict=True)}
    return ResolvedPolicy(policy, {path: dtype for path, dtype in named.items() if dtype is not None})


def choose_layer_dtypes(model: Any, plan: ResolvedPolicy, *, heads: bool = False) -> list[LayerDtype]:
    """Choose the dtype of every layer of a model, and of those operations of functional models that need one.

    Args:
        model: a Keras layer or model.
        plan: the policy, resolved for this model.
        heads: whether layers that output logits compute in float32, unless `autocast.output` is narrower.

    Raises:
        PolicyError: an override sets a head that outputs probabilities to 16 bits.
        UnsupportedError: dtypes for which Keras has no policy.
    """
    found = list_layers(model)
    giving_output = _find_output_heads(found)
    feeding = _logarithm_sources(found) if plan.kept and plan.mixes else None
    choices: dict[int, LayerDtype] = {}
    clear: set[int] = set()  # containers, in which the path to the output can be followed
    for module in found:
        layer = module.layer
        if is_container(layer) and (module.parent is None or id(module.parent) in clear):
            clear.add(id(layer))
        given_heads = giving_output if heads else {}
        dtype, why = _layer_dtype(module, plan, given_heads, feeding, choices.get(id(module.parent)))
        gate = feeding is not None and is_possible_binary_head(layer) and id(module.parent) not in clear
        if why == "compute" and gate:
            dtype, why = "float32", "sensitive"
        called_by = None if module.parent is None or is_container(module.parent) else module.parent
        choice = LayerDtype(layer, module.path, dtype, why, called_by)
        sure = giving_output.get(id(layer)) == "probabilities" and why not in ("quantized", "not floating", "float64")
        choices[id(layer)] = _widen_probabilities(choice, plan) if sure else choice
    for module in reversed(found):
        _follow_wrapped_layer(module.layer, choices)
    operations = [choice for module in found for choice in _operation_dtypes(module, plan, giving_output, feeding)]
    return [*_float8_reasons(found, choices, plan), *operations]


def _float8_reasons(found: list[LayerEntry], choices: dict[int, LayerDtype], plan: ResolvedPolicy) -> list[LayerDtype]:
    """Return the layers' choices with the reasons of products in 8 bits (S36)."""
    if plan.policy.float8 is None:
        return list(choices.values())
    plan = with_heads(plan, layer_path_aliases(found))
    cells = {id(part.layer) for each in found for part in recurrent_cells(each.layer)}
    chosen = []
    for choice in choices.values():
        is_open = choice.why == "compute" or (choice.why == "override" and plan.at(choice.path).float8 is not None)
        in_cell = id(choice.target) in cells
        reason = product_reason(choice.target, choice.path, plan, in_cell=in_cell) if is_open else None
        chosen.append(choice if reason is None else choice._replace(why=reason))
    return chosen


def _logarithm_sources(found: list[LayerEntry]) -> set[int]:
    """Return the ids of what feeds a logarithm or `1 - x` in the functional models. Callers use None for a plan that
    keeps no family of S4 in float32."""
    return {one for module in found if is_container(module.layer) for one in logarithm_sources(module.layer)}


def _layer_dtype(
    module: LayerEntry, plan: ResolvedPolicy, heads: dict[int, Any], feeding: set[int] | None, above: LayerDtype | None
) -> tuple[str | None, str]:
    layer, own = module.layer, own_policy(module.layer)
    if getattr(own, "quantization_mode", None):
        return None, "quantized"
    if own.compute_dtype not in FLOAT_DTYPES:
        return None, "not floating"
    if own.compute_dtype == "float64" and not plan.float64:
        return None, "float64"
    if is_container(layer):
        given = (above is not None and above.why == "given") or _has_explicit_dtype(layer, plan)
        return (None, "given") if given else (plan.param, "contains")
    named = plan.at(module.path).named
    if named is not None:
        return plan.at(module.path).dtype, "override"
    if (above is not None and above.why == "given") or _has_explicit_dtype(layer, plan):
        return None, "given"
    ruled = ruled_dtype(layer, plan) or (above.dtype if above is not None and above.why == "op_rules" else None)
    if ruled is not None:
        return ruled, "op_rules"
    if plan.compute not in HALF_DTYPES or plan.param != "float32":
        return plan.compute, "compute"
    if heads.get(id(layer)) == "logits" and plan.output not in HALF_DTYPES:
        return "float32", "head"
    if feeding is not None and (is_sensitive(layer) or id(layer) in feeding or is_inner_product(layer)):
        return "float32", "sensitive"
    if feeding is not None and has_add_loss_call(layer):
        return "float32", "loss"
    if _holds_constants(layer):
        return "float32", "constants"
    return plan.compute, "compute"


def _has_explicit_dtype(layer: Any, plan: ResolvedPolicy) -> bool:
    """Return whether the layer's constructor got an explicit `dtype=` that this policy keeps.

    Keras stores the arguments of a constructor for `get_config` if all are plain. `load_model` and `clone_model` pass
    every argument, `trainable` included, so their `dtype=` is not explicit. An explicit 16-bit dtype is not kept if the
    policy has no loss scaling for it, or requires full precision.
    """
    arguments = constructor_arguments(layer)
    if arguments is None or arguments.get("dtype") is None or "trainable" in arguments:
        return False
    dtype = own_policy(layer).compute_dtype
    if dtype == "float16":
        return "float16" in plan.narrow and plan.param != "float16"
    return dtype != "bfloat16" or plan.compute in HALF_DTYPES


def _holds_constants(layer: Any) -> bool:
    """Return whether a user's layer stores float32 tensors, which TensorFlow does not combine with 16 bits."""
    if isinstance(layer, keras.layers.TFSMLayer):
        return True
    if isinstance(layer, keras.layers.Lambda):
        own = [cell.cell_contents for cell in getattr(layer.function, "__closure__", None) or ()]
    elif is_keras_code(type(layer)):
        return False
    else:
        own = [value for name, value in vars(layer).items() if name not in _keras_layer_attributes()]
    return any(ENGINE.is_float32_constant(leaf) for leaf in flatten_value(own))


@functools.cache
def _keras_layer_attributes() -> frozenset[str]:
    """Return the attributes that Keras itself sets. Lazy: the first layer of a process fixes Keras's global policy."""
    return frozenset(vars(keras.layers.Layer(name="none")))


def flatten_value(value: Any) -> Iterator[Any]:
    """Yield what a value contains in nested dicts, lists and tuples; any other value itself."""
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from flatten_value(item)
    else:
        yield value


def _follow_wrapped_layer(layer: Any, choices: dict[int, LayerDtype]) -> None:
    """Give a wrapper such as TimeDistributed the dtype of its layer, whose result it passes on."""
    own = choices[id(layer)]
    if isinstance(layer, keras.layers.Wrapper) and own.why in ("compute", "head"):
        inner = choices[id(layer.layer)]
        dtype = inner.dtype or own_policy(layer.layer).compute_dtype
        if dtype in FLOAT_DTYPES and inner.why != "quantized":
            choices[id(layer)] = own._replace(dtype=dtype, why=own.why if dtype == own.dtype else "inner")


def _widen_probabilities(choice: LayerDtype, plan: ResolvedPolicy) -> LayerDtype:
    """Set probabilities to float32, in every mode: Keras's cross-entropy clips them, which in 16 bits loses the logits.

    Raises:
        PolicyError: an override or a rule requests 16 bits.
    """
    dtype = choice.dtype or own_policy(choice.target).compute_dtype
    if plan.param in HALF_DTYPES or dtype not in HALF_DTYPES:
        return choice
    if choice.why in ("override", "op_rules"):
        field = "overrides" if choice.why == "override" else "op_rules"
        raise PolicyError(
            f"{field}: {choice.path!r} gives probabilities, and cross-entropy of 16-bit probabilities is wrong (a "
            f"loss of 30 is reported as 16.1). Received: {dtype}. Leave it in float32, or let it give logits "
            "(activation=None, from_logits=True in the loss)."
        )
    return choice._replace(dtype="float32", why="head")


def functional_operations(module: LayerEntry) -> list[tuple[Any, str]]:
    """Return (operation, path) of the operations that a functional model calls in addition to its layers."""
    if not isinstance(module.layer, keras.Function) or not is_container(module.layer):
        return []
    prefix = f"{module.path}/" if module.path else ""
    return [
        (operation, prefix + operation.name)
        for operation in module.layer.operations
        if not isinstance(operation, keras.Layer)
    ]


def _operation_dtypes(
    module: LayerEntry, plan: ResolvedPolicy, heads: dict[int, str], feeding: set[int] | None
) -> Iterator[LayerDtype]:
    for operation, path in functional_operations(module):
        named = plan.at(path).named
        if named is not None:
            choice = LayerDtype(operation, path, plan.at(path).dtype, "override")
            yield _widen_probabilities(choice, plan) if heads.get(id(operation)) == "probabilities" else choice
        elif (ruled := ruled_dtype(operation, plan)) is not None:
            choice = LayerDtype(operation, path, ruled, "op_rules")
            yield _widen_probabilities(choice, plan) if heads.get(id(operation)) == "probabilities" else choice
        elif heads.get(id(operation)) == "probabilities" and plan.param == "float32":
            yield LayerDtype(operation, path, "float32", "head")
        elif feeding is not None and (
            is_sensitive_operation(operation) or id(operation) in feeding or is_inner_product(operation)
        ):
            yield LayerDtype(operation, path, "float32", "sensitive")
        elif is_product(operation) and plan.compute in HALF_DTYPES and not is_multiplication(operation):
            yield LayerDtype(operation, path, plan.compute, "product")
        elif feeding is not None and is_gather(operation):
            yield LayerDtype(operation, path, None, "gather")


def _find_output_heads(found: list[LayerEntry]) -> dict[int, str]:
    """Map the id of each layer or operation that produces a model's output to "probabilities" or "logits".

    Those of a functional or sequential model are found by following its outputs back, others by their name.
    """
    ending: list[Any] = []
    for module in found:
        named = bool(module.path) and _last_word(module.layer.name) in _HEAD_NAMES
        if is_container(module.layer) and (named or not module.path):
            ending += _output_sources(module.layer)
        elif (named and is_dense(module.layer)) or (
            (named or len(found) == 1) and has_probability_output(module.layer)
        ):
            ending.append(module.layer)
    ending += [layer.layer for layer in ending if isinstance(layer, keras.layers.Wrapper)]
    return {id(last): "probabilities" if has_probability_output(last) else "logits" for last in ending}


def _last_word(name: str) -> str:
    """ "lm_head_1" -> "head" """
    return name.rstrip("0123456789_").rpartition("_")[2]


def _output_sources(container: Any) -> list[Any]:
    """Return the operations before a functional model's outputs, back to the last layer with weights if it is dense."""
    ending = []
    for tensor in keras.tree.flatten(getattr(container, "outputs", None) or []):  # an unbuilt model has none
        walked = list(_upstream_operations(tensor))
        keep = not walked or not getattr(walked[-1], "weights", None) or is_dense(walked[-1])
        ending += walked if keep else walked[:-1]
    return ending


def _upstream_operations(tensor: Any) -> Iterator[Any]:
    operation, node_index, output_index = keras_history(tensor)
    if isinstance(operation, keras.layers.InputLayer):
        return
    if is_container(operation):
        yield from _upstream_operations(keras.tree.flatten(operation.outputs)[output_index])
        return
    yield operation
    inputs = inbound_nodes(operation)[node_index].input_tensors
    if not getattr(operation, "weights", None) and len(inputs) == 1:
        yield from _upstream_operations(inputs[0])
