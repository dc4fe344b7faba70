"""Layers of a Keras model whose products run in 8 bits (S36), the reason of each other dense layer, and refusals.

Keras's finest grain is the layer: `Dense` and `EinsumDense`, also where other layers such as MultiHeadAttention are
built of them. What another layer's own code multiplies stays in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import keras

from polyamp.errors import UnsupportedError
from polyamp.recipe.float8 import accepts_sizes, head_paths
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_keras.precision.float8_products import parse_einsum

FLOAT8: Final = "float8"
"""Reason of a layer whose product runs in 8 bits."""
PRODUCT_REASONS: Final = (FLOAT8, "compute (")
"""Beginnings of the reasons of `product_reason`."""
_DENSE: Final = (keras.layers.Dense, keras.layers.EinsumDense)


def check_float8(policy: Policy) -> None:
    """Reject products in 8 bits that are not emulated: Keras has no others (S20, S36).

    Raises:
        UnsupportedError: the policy does not emulate them.
    """
    if policy.float8 is not None and not policy.float8.emulate:
        raise UnsupportedError(
            f"float8: Keras multiplies no 8-bit floats, on its {keras.config.backend()!r} backend or another. Use "
            "Policy('mixed_float8', float8=polyamp.Float8(emulate=True)) to compute the same 8-bit numbers' products "
            "in float32, or Policy('mixed_bfloat16')."
        )


def refuse_float8(policy: Policy, what: str) -> None:
    """Reject products in 8 bits for something that has no layers.

    Raises:
        UnsupportedError: the policy has them.
    """
    if policy.float8 is not None:
        raise UnsupportedError(
            f"float8 covers products of Keras's Dense and EinsumDense layers (S36). Received: {what}. Pass a "
            "keras.Model or layer, or use Policy('mixed_bfloat16')."
        )


def with_heads(plan: ResolvedPolicy, names: Mapping[str, tuple[str, ...]]) -> ResolvedPolicy:
    """Return a plan in which heads without an override are overridden by the compute dtype.

    Args:
        plan: the policy, resolved for a model.
        names: path of each layer -> all its paths.
    """
    heads = {path: plan.compute for path, own in names.items() if head_paths(own)}
    return ResolvedPolicy(plan.policy, heads | dict(plan.overridden))


def product_reason(layer: Any, path: str, plan: ResolvedPolicy, *, in_cell: bool) -> str | None:
    """Return why a dense layer that computes in the policy's compute dtype has its product in 8 bits or not.

    Args:
        layer: a layer.
        path: its path.
        plan: the policy, with heads.
        in_cell: whether it is in the cell of a recurrent layer.

    Returns:
        "float8", "compute (head)", "compute (recurrent cell)", "compute (own call)", "compute (no parameter)", "compute
        (batch axes)" or "compute (size)"; None for a layer that is not dense, and for an override with a dtype.
    """
    place = plan.at(path)
    if not isinstance(layer, _DENSE) or not layer.built:
        return None
    if place.float8 is None:
        return "compute (head)"
    if in_cell:
        return "compute (recurrent cell)"
    if type(layer).call not in (keras.layers.Dense.call, keras.layers.EinsumDense.call):
        return "compute (own call)"
    if layer.lora_enabled:  # the kernel is a sum of parameters
        return "compute (no parameter)"
    sizes = tuple(layer.kernel.shape)
    if isinstance(layer, keras.layers.EinsumDense):
        axes = parse_einsum(layer.equation)
        if axes is None:
            return "compute (batch axes)"
        known = dict(zip(axes.kernel, sizes, strict=True))
        sizes = tuple(math.prod(known[letter] for letter in letters) for letters in (axes.contracted, axes.free))
    return FLOAT8 if accepts_sizes(sizes, place.float8.scaling) else "compute (size)"
