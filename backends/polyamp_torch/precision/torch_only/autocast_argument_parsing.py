"""Parsing of the arguments of `autocast`, in the form with a policy and in torch's form.

The first argument distinguishes the forms: torch's device types and the spellings of policies have no word in common.
"""

from __future__ import annotations

import warnings
from typing import Any, Final, NamedTuple

import torch

from polyamp.errors import PolicyError, UnsupportedError, did_you_mean
from polyamp.recipe.policy import Policy
from polyamp.recipe.policy_names import DIALECTS
from polyamp.recipe.resolved_policy import module_precision
from polyamp_torch.arrays import DTYPES
from polyamp_torch.compat import is_cuda_autocast_unavailable
from polyamp_torch.precision.torch_only.float32_islands import DEVICE_TYPES, device_types
from polyamp_torch.precision.torch_only.open_blocks import OPEN_BLOCKS

_POLICY_BY_DTYPE: Final = {torch.float16: Policy("mixed_float16"), torch.bfloat16: Policy("mixed_bfloat16")}
"""The policy of each dtype in torch's form."""
_SUGGESTIONS: Final = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "metal": "mps", "half": "mixed_float16"}


class RegionError(UnsupportedError, PolicyError, TypeError):
    """Invalid arguments of `autocast`. Also a ValueError, a TypeError and a RuntimeError, as in torch."""


class RegionArguments(NamedTuple):
    """Parsed arguments of a region.

    Attributes:
        policy: the region's policy; in torch's form the policy of that dtype, or None.
        device_type: "cpu", "cuda", ...
        dtype: the dtype of matrix products while it is enabled.
        enabled: whether autocast is on in it.
        acting: whether S4's sensitive families run in float32.
    """

    policy: Policy | None
    device_type: str
    dtype: torch.dtype
    enabled: bool
    acting: bool


def parse_region_arguments(
    first: Any, second: Any, device_type: Any, dtype: Any, policy: Any, *, enabled: bool
) -> RegionArguments:
    """Parse the arguments of `autocast(first, second, device_type=..., dtype=..., policy=...)`.

    Raises:
        RegionError: neither a policy nor a device type, an argument given twice, or a policy on a missing device.
        UnsupportedError: a policy that needs a module.
    """
    if isinstance(first, Policy) or (isinstance(first, str) and not _is_device_type(first)):
        policy, first = _single_value("policy", first, policy), None
    elif isinstance(first, str):
        device_type = _single_value("device_type", first, device_type)
    elif first is not None:
        raise RegionError(
            "autocast takes a policy or, as torch.autocast, a device type (a string) in the first place. Received: "
            f"{first!r}.{_argument_hint(first)}"
        )
    if isinstance(second, str):
        device_type = _single_value("device_type", second, device_type)
    elif second is not None:
        dtype = _single_value("dtype", second, dtype)
    if device_type is not None and not (isinstance(device_type, str) and _is_device_type(device_type)):
        known = ", ".join(DEVICE_TYPES)
        raise RegionError(f"device_type must be one of {known}. Received: device_type={device_type!r}.")
    if policy is None:
        return _torch_arguments("cuda" if device_type is None else device_type, dtype, enabled=bool(enabled))
    if dtype is not None:
        raise RegionError(f"a policy has its own dtype. Received: {policy!r} and dtype={dtype!r}. Drop one of them.")
    return _policy_arguments(
        policy if isinstance(policy, Policy) else _policy_from_spelling(policy), device_type, enabled=bool(enabled)
    )


def _policy_arguments(policy: Policy, device_type: str | None, *, enabled: bool) -> RegionArguments:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type != "cpu" and device_type not in device_types():
        raise RegionError(
            f"device_type={device_type!r}: torch finds no such device here. It finds: {', '.join(device_types())}."
        )
    if policy.float8 is not None:
        raise UnsupportedError(
            "float8 keeps heads in 16 bits, and a region knows no model. Use policy.autocast(model)."
        )
    if not OPEN_BLOCKS.bound and (len(policy.overrides) or policy.mode == "cast"):
        what = "overrides name module paths" if len(policy.overrides) else "mode='cast' casts a model's parameters"
        raise UnsupportedError(f"{what}, and a region knows no model. Use policy.autocast(model).")
    place = module_precision(policy, None)
    dtype = DTYPES[place.dtype] if place.mixes else torch.get_autocast_dtype(device_type)
    return RegionArguments(policy, device_type, dtype, place.mixes and enabled, place.kept)


def _torch_arguments(device_type: str, dtype: Any, *, enabled: bool) -> RegionArguments:
    """Parse torch's form. Where torch warns and turns autocast off, do the same, at the line that opens the region."""
    if dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    if not isinstance(dtype, torch.dtype):
        raise RegionError(f"dtype must be a torch.dtype, such as torch.float16. Received: {dtype!r}.")
    if enabled and not torch.compiler.is_compiling():
        off = None
        if device_type == "cuda" and is_cuda_autocast_unavailable():
            off = "CUDA is not available. Disabling autocast. On the CPU write autocast('cpu')."
        elif device_type in ("cpu", "mps", "xpu") and dtype not in _POLICY_BY_DTYPE:
            off = (
                f"In {device_type.upper()} autocast, but the target dtype is not supported. Disabling autocast. It "
                f"computes in {' or '.join(map(str, _POLICY_BY_DTYPE))}. Received: {dtype}."
            )
        if off is not None:
            warnings.warn(off, stacklevel=4)
            enabled = False
    return RegionArguments(_POLICY_BY_DTYPE.get(dtype), device_type, dtype, enabled, acting=True)


def _single_value(name: str, given: Any, named: Any) -> Any:
    if named is not None:
        raise RegionError(f"{name} is given twice. Received: {given!r} and {name}={named!r}.")
    return given


def _is_device_type(word: str) -> bool:
    """Return whether torch has autocast for a device type of that name, on this machine or another."""
    if word in DEVICE_TYPES:
        return True
    try:
        return ":" not in word and bool(torch.amp.is_autocast_available(word))
    except RuntimeError:  # torch has no such type
        return False


def _policy_from_spelling(word: Any) -> Policy:
    """Return a policy by its spelling; the error for an unknown one suggests device types too."""
    try:
        return Policy(word)
    except PolicyError as error:
        if not isinstance(word, str) or "=" in word:
            raise
        words = [name for words in DIALECTS.values() for name in words]
        near = did_you_mean(word, [*DEVICE_TYPES, *words])
        raise RegionError(
            f"autocast takes a device type ({', '.join(DEVICE_TYPES)}) or a policy ({', '.join(dict.fromkeys(words))}) "
            f"in the first place. Received: {word!r}.{_argument_hint(word) or near}"
        ) from error


def _argument_hint(given: Any) -> str:
    if isinstance(given, torch.device):
        return f" Write {given.type!r}."
    if isinstance(given, torch.dtype):
        return f" The dtype comes second: autocast('cuda', {given})."
    if isinstance(given, bool):
        return f" Write autocast('cuda', enabled={given})."
    if isinstance(given, str) and ":" in given and given.partition(":")[0] in DEVICE_TYPES:
        return f" A type has no number: {given.partition(':')[0]!r}."
    if isinstance(given, torch.nn.Module):
        return " For a module use policy.autocast(module)."
    if callable(given):
        return " As a decorator it is @autocast('cuda'), or @autocast(policy)."
    slip = _SUGGESTIONS.get(given) if isinstance(given, str) else None
    return "" if slip is None else f" Did you mean {slip!r}?"
