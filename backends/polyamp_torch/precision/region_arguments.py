"""What the arguments of `autocast` come to: a policy's own form, and torch's. Called by `autocast` alone.

The first argument tells the two apart: torch's device types and the spellings of policies have no word in common.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Final, NamedTuple

import torch

from polyamp.errors import PolicyError, UnsupportedError, did_you_mean
from polyamp.recipe.dialects import WORDS
from polyamp.recipe.policy import Policy
from polyamp.rules.plan import Place, place_of
from polyamp_torch.arrays import DTYPES
from polyamp_torch.compat import no_autocast_on_cuda
from polyamp_torch.precision.islands import DEVICE_TYPES, device_types
from polyamp_torch.precision.regions import OPENED

_OF_TORCH: Final = {torch.float16: Policy("mixed_float16"), torch.bfloat16: Policy("mixed_bfloat16")}
"""What torch's form says by its dtype."""
_SLIPS: Final = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "metal": "mps", "half": "mixed_float16"}


class RegionError(UnsupportedError, PolicyError, TypeError):
    """The arguments of `autocast` make no region. A ValueError, TypeError and RuntimeError too, as torch's are."""


class Asked(NamedTuple):
    """A region as it was asked for.

    Attributes:
        policy: that it follows; in torch's form the policy of that dtype, or None.
        device_type: "cpu", "cuda", ...
        dtype: what matrix products run in while it is enabled.
        enabled: whether autocast is on in it.
        acting: whether S4's sensitive families are held in float32.
    """

    policy: Policy | None
    device_type: str
    dtype: torch.dtype
    enabled: bool
    acting: bool


def read(first: Any, second: Any, device_type: Any, dtype: Any, policy: Any, *, enabled: bool) -> Asked:
    """The region that `autocast(first, second, device_type=..., dtype=..., policy=...)` asks for.

    Raises:
        RegionError: neither a policy nor a device type, something given twice, or a policy on a device that is missing.
        UnsupportedError: a policy that needs a module.
    """
    if isinstance(first, Policy) or (isinstance(first, str) and not _is_device_type(first)):
        policy, first = _once("policy", first, policy), None
    elif isinstance(first, str):
        device_type = _once("device_type", first, device_type)
    elif first is not None:
        raise RegionError(
            "autocast takes a policy or, as torch.autocast, a device type (a string) in the first place. Received: "
            f"{first!r}.{_instead_of(first)}"
        )
    if isinstance(second, str):
        device_type = _once("device_type", second, device_type)
    elif second is not None:
        dtype = _once("dtype", second, dtype)
    if device_type is not None and not (isinstance(device_type, str) and _is_device_type(device_type)):
        known = ", ".join(DEVICE_TYPES)
        raise RegionError(f"device_type must be one of {known}. Received: device_type={device_type!r}.")
    if policy is None:
        return _as_torch("cuda" if device_type is None else device_type, dtype, enabled=bool(enabled))
    if dtype is not None:
        raise RegionError(f"a policy has its own dtype. Received: {policy!r} and dtype={dtype!r}. Drop one of them.")
    return _by_policy(policy if isinstance(policy, Policy) else _spelled(policy), device_type, enabled=bool(enabled))


def _by_policy(policy: Policy, device_type: str | None, *, enabled: bool) -> Asked:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type != "cpu" and device_type not in device_types():
        raise RegionError(
            f"device_type={device_type!r}: torch finds no such device here. It finds: {', '.join(device_types())}."
        )
    if not OPENED.bound and (len(policy.overrides) or policy.mode == "cast"):
        what = "overrides name module paths" if len(policy.overrides) else "mode='cast' casts a model's parameters"
        raise UnsupportedError(f"{what}, and a region knows no model. Use policy.autocast(model).")
    place = _place_of(policy)
    dtype = DTYPES[place.dtype] if place.mixes else torch.get_autocast_dtype(device_type)
    return Asked(policy, device_type, dtype, place.mixes and enabled, place.kept)


def _as_torch(device_type: str, dtype: Any, *, enabled: bool) -> Asked:
    """torch's form: where it warns and turns autocast off, so does this, at the line that asked for the region."""
    if dtype is None:
        dtype = torch.get_autocast_dtype(device_type)
    if not isinstance(dtype, torch.dtype):
        raise RegionError(f"dtype must be a torch.dtype, such as torch.float16. Received: {dtype!r}.")
    if enabled and not torch.compiler.is_compiling():
        off = None
        if device_type == "cuda" and no_autocast_on_cuda():
            off = "CUDA is not available. Disabling autocast. On the CPU write autocast('cpu')."
        elif device_type in ("cpu", "mps", "xpu") and dtype not in _OF_TORCH:
            off = (
                f"In {device_type.upper()} autocast, but the target dtype is not supported. Disabling autocast. It "
                f"computes in {' or '.join(map(str, _OF_TORCH))}. Received: {dtype}."
            )
        if off is not None:
            warnings.warn(off, stacklevel=4)
            enabled = False
    return Asked(_OF_TORCH.get(dtype), device_type, dtype, enabled, acting=True)


def _once(name: str, given: Any, named: Any) -> Any:
    if named is not None:
        raise RegionError(f"{name} is given twice. Received: {given!r} and {name}={named!r}.")
    return given


def _is_device_type(word: str) -> bool:
    """Whether torch has autocast for a device type of that name, on this machine or another."""
    if word in DEVICE_TYPES:
        return True
    try:
        return ":" not in word and bool(torch.amp.is_autocast_available(word))
    except RuntimeError:  # torch knows no such type
        return False


def _spelled(word: Any) -> Policy:
    """A policy by its spelling; what is unknown may have been meant for a device type."""
    try:
        return Policy(word)
    except PolicyError as error:
        if not isinstance(word, str) or "=" in word:
            raise
        words = [name for words in WORDS.values() for name in words]
        near = did_you_mean(word, [*DEVICE_TYPES, *words])
        raise RegionError(
            f"autocast takes a device type ({', '.join(DEVICE_TYPES)}) or a policy ({', '.join(dict.fromkeys(words))}) "
            f"in the first place. Received: {word!r}.{_instead_of(word) or near}"
        ) from error


def _instead_of(given: Any) -> str:
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
    slip = _SLIPS.get(given) if isinstance(given, str) else None
    return "" if slip is None else f" Did you mean {slip!r}?"


def _place_of(policy: Policy) -> Place:
    """What a policy says where no override holds. A compiler traces the rule, also of a policy that is made in what it
    compiles; elsewhere the answer is kept."""
    return place_of(policy, None) if torch.compiler.is_compiling() else _root(policy)


@functools.lru_cache(maxsize=64)
def _root(policy: Policy) -> Place:
    return place_of(policy, None)
