"""Keras's dtype policies: by dtypes, of a layer, and as a map that represents a `Policy`."""

from __future__ import annotations

import re
from typing import Any, Final

import keras

from polyamp.errors import UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.overrides import glob_precedence
from polyamp.recipe.policy import Policy
from polyamp_keras.compat import quantized_policy

POLICY_STACK: Final = "_polyamp_policies"  # attribute of a layer with an applied policy


def keras_policy(param: str, compute: str) -> Any:
    """Return the `keras.DTypePolicy` with these dtypes.

    Raises:
        UnsupportedError: Keras has no such policy.
    """
    if param == compute:
        return keras.DTypePolicy(param)
    if param == "float32" and compute in HALF_DTYPES:
        return keras.DTypePolicy(f"mixed_{compute}")
    raise UnsupportedError(
        "Keras can store parameters in float32 and compute in float16 or bfloat16, or do both in one dtype. "
        f"Received: param={param!r}, compute={compute!r}."
    )


def own_policy(layer: Any) -> Any:
    """Return the Keras policy of a layer without those that polyamp applied (see `policy_application`).

    A layer that was quantized under a policy of polyamp stays quantized without it.
    """
    stack = vars(layer).get(POLICY_STACK)
    policy = stack[0].policy if stack else layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and layer.path:
        policy = policy[layer.path]
    if not is_quantized(layer) or isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy):
        return policy
    if policy.compute_dtype == "float16":  # Keras has no int8 policy with float16
        return layer.dtype_policy
    return quantized_policy(layer.dtype_policy, policy)


def is_quantized(layer: Any) -> bool:
    """Return whether a layer's kernel is integer or float8; its Keras policy then defines how to read it."""
    return isinstance(layer.dtype_policy, keras.dtype_policies.QuantizedDTypePolicy)


def policy_map(policy: Policy) -> Any:
    """Return a policy with overrides as a `keras.dtype_policies.DTypePolicyMap`.

    Keras looks a layer up by `layer.path` and raises if two patterns match, so each pattern excludes what a longer glob
    covers. The path starts with the model's name in a subclassed model but not in a functional one, so a pattern allows
    one segment before the glob. `apply_policy` uses exact paths.
    """
    ranked = sorted(policy.overrides, key=glob_precedence, reverse=True)
    patterns = {glob: rf"(?:[^/]*/)?{_glob_regex(glob)}(?:/.*)?" for glob in ranked}
    found = keras.dtype_policies.DTypePolicyMap(default_policy=keras_policy(policy.param, policy.compute))
    for rank, glob in enumerate(ranked):
        longer = "".join(f"(?!{patterns[other]}$)" for other in ranked[:rank])
        found[f"^(?:{longer}{patterns[glob]})$"] = keras_policy(policy.param, policy.overrides[glob])
    return found


def _glob_regex(glob: str) -> str:
    """Convert a glob of S5 to a regular expression."""
    words = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[[^]]+\])", glob)
    return "".join(
        part.replace("[!", "[^", 1) if part.startswith("[") else words.get(part, re.escape(part)) for part in parts
    )
