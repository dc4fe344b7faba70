"""Keras's own dtype policies: the one with given dtypes, the one that a layer has, and a `Policy` as a map of them.

Called by what chooses and sets the layers' dtypes, and for `polyamp_tensorflow.dtype_policy`.
"""

from __future__ import annotations

import re
from typing import Any, Final

import keras

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules.overrides import precedence
from polyamp.rules.plan import NARROW
from polyamp_tensorflow.compat import quantized_like

STACK: Final = "_polyamp_policies"  # attribute of a layer that a policy is applied to


def keras_policy(param: str, compute: str) -> Any:
    """The `keras.DTypePolicy` with these dtypes.

    Raises:
        UnsupportedError: Keras has none.
    """
    if param == compute:
        return keras.DTypePolicy(param)
    if param == "float32" and compute in NARROW:
        return keras.DTypePolicy(f"mixed_{compute}")
    raise UnsupportedError(
        "Keras can store parameters in float32 and compute in float16 or bfloat16, or do both in one dtype. "
        f"Received: param={param!r}, compute={compute!r}."
    )


def own_policy(layer: Any) -> Any:
    """The Keras policy that a layer has without those of polyamp (see `layer_stack`).

    A layer that was quantized while one of those was on it is quantized without them too.
    """
    stack = vars(layer).get(STACK)
    policy = stack[0].policy if stack else layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and layer.path:
        policy = policy[layer.path]
    if not is_quantized(layer) or isinstance(policy, keras.dtype_policies.QuantizedDTypePolicy):
        return policy
    if policy.compute_dtype == "float16":  # Keras has no int8 with it
        return layer.dtype_policy
    return quantized_like(layer.dtype_policy, policy)


def is_quantized(layer: Any) -> bool:
    """True for a layer whose kernel holds integers or float8: its Keras policy tells how to read it."""
    return isinstance(layer.dtype_policy, keras.dtype_policies.QuantizedDTypePolicy)


def policy_map(policy: Policy) -> Any:
    """The policy with its overrides as a `keras.dtype_policies.DTypePolicyMap`.

    Keras looks a layer up by `layer.path` and refuses a path that two patterns match, so each pattern excludes what a
    longer glob covers. In a subclassed model that path begins with the model's name, in a functional one it does not:
    a pattern allows one segment before the glob. `apply_policy` knows a layer's place exactly.
    """
    ranked = sorted(policy.overrides, key=precedence, reverse=True)
    patterns = {glob: rf"(?:[^/]*/)?{_regex(glob)}(?:/.*)?" for glob in ranked}
    found = keras.dtype_policies.DTypePolicyMap(default_policy=keras_policy(policy.param, policy.compute))
    for place, glob in enumerate(ranked):
        longer = "".join(f"(?!{patterns[other]}$)" for other in ranked[:place])
        found[f"^(?:{longer}{patterns[glob]})$"] = keras_policy(policy.param, policy.overrides[glob])
    return found


def _regex(glob: str) -> str:
    """A glob of S5 as a regular expression."""
    words = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*$|\*\*|\*|\?|\[[^]]+\])", glob)
    return "".join(
        part.replace("[!", "[^", 1) if part.startswith("[") else words.get(part, re.escape(part)) for part in parts
    )
