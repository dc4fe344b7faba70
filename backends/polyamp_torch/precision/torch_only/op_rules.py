"""Names and rules of `Policy.op_rules` in torch: which functions a name covers, and which names are refused.

A name is that of a public function of torch: `softmax` is `torch.softmax`, `torch.nn.functional.softmax` and
`Tensor.softmax`, and `matmul` is the operator `@`, too. `op_rules_mode` applies the rules.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import get_overridable_functions

from polyamp.errors import PolicyError, did_you_mean
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.rules.operation_names import check_rules_act, translate_name
from polyamp_torch.compat import assume_constant_result
from polyamp_torch.precision.op_list import BACKWARD_FUNCTIONS, FUNCTIONS_WITHOUT_DISPATCH, TorchFunction
from polyamp_torch.precision.torch_only.compat import returned_values

RuleChanges = tuple[tuple[str, str], ...]
"""`op_rules` as a hashable value: sorted pairs of name and rule."""
FunctionRules = dict[TorchFunction, tuple[str, str]]
"""Function -> name and rule. A plain dict: torch.compile reads no other mapping with functions as keys."""

ENTER: Final = "enter"
"""Internal rule of a Python function that calls functions with rules: its body runs under the rules."""
NORMS_WITH_STATISTICS: Final = frozenset({"batch_norm", "instance_norm"})
"""Functions that write to their running statistics. Only their input is cast: a cast of a statistic would be lost."""
_WRITING_ARGUMENTS: Final = ("inplace", "max_norm")
"""Arguments with which a function writes to its operands."""
_SPACES: Final = (functional, torch, torch.Tensor, torch.special, torch.linalg, torch.fft)
_OPERATORS: Final = {
    "matmul": "__matmul__ __rmatmul__",
    "add": "__add__ __radd__",
    "sub": "__sub__ __rsub__",
    "mul": "__mul__ __rmul__",
    "div": "__truediv__ __rtruediv__ __div__ __rdiv__",
    "pow": "__pow__ __rpow__",
}
"""Name -> the methods of Python's operators, in the spellings that torch shows to modes."""


@assume_constant_result
def rule_changes(plan: ResolvedPolicy) -> RuleChanges:
    """Return the `op_rules` of a resolved policy as a hashable value, which is a constant of a traced function."""
    return tuple(sorted(plan.op_rules.items())) if plan.op_rules else ()


def region_changes(policy: Policy | None) -> RuleChanges:
    """Return the checked `op_rules` of a region's policy, which a traced function may have created.

    Raises:
        PolicyError, UnsupportedError: as in `check_op_rules`.
    """
    if policy is None or not len(policy.op_rules):
        return ()
    changes = tuple([(name, policy.op_rules[name]) for name in policy.op_rules])
    _check_changes(changes, str(policy.mode), policy.param, policy.compute)
    return _sorted_changes(changes)


@assume_constant_result
def _sorted_changes(changes: RuleChanges) -> RuleChanges:
    return tuple(sorted(changes))


@functools.lru_cache(maxsize=256)
def rules_by_function(changes: RuleChanges) -> FunctionRules:
    """Return the rule of each function that the names cover, and of the Python functions that call such functions."""
    if not changes:
        return {}
    entered = {f: (f.__name__, ENTER) for f in FUNCTIONS_WITHOUT_DISPATCH if f not in BACKWARD_FUNCTIONS}
    return entered | {function: (name, rule) for name, rule in changes for function in functions_named(name)}


@assume_constant_result
def find_change(function: TorchFunction, changes: RuleChanges) -> tuple[str, str] | None:
    """Return name and rule of a function or None, as a constant of a traced function."""
    return rules_by_function(changes).get(function)


_MET: Final[dict[RuleChanges, set[str]]] = {}
"""Rules -> the names among them whose functions were called under them in this process."""


@assume_constant_result
def note_met(changes: RuleChanges, name: str) -> None:
    """Record that a function with a rule was called; in a traced function when it is traced."""
    _MET.setdefault(changes, set()).add(name)


def unmet_rules(changes: RuleChanges) -> list[str]:
    """Return the names whose functions were not called under these rules since `forget_met`."""
    return [name for name, _ in changes if name not in _MET.get(changes, ())]


def forget_met(changes: RuleChanges) -> None:
    """Begin anew to record which functions are called under these rules."""
    _MET.pop(changes, None)


def unmet_text(names: list[str], where: str) -> str:
    """Return what is said of rules without effect."""
    listed = " or ".join(map(repr, names))
    return (
        f"op_rules: {where} called no function {listed} under autocast, so a rule for it has no effect. A module may "
        "call a function of another name (attention 'scaled_dot_product_attention'), or one that torch calls inside. "
        "polyamp.explain lists the operations that run."
    )


def functions_named(name: str) -> list[TorchFunction]:
    """Return the functions of torch that a name covers: functions, methods and operators.

    >>> [f is g for f, g in zip(functions_named("linear"), [torch.nn.functional.linear])]
    [True]
    """
    found = [getattr(space, name, None) for space in _SPACES]
    found += [getattr(torch.Tensor, method, None) for method in _OPERATORS.get(name, "").split()]
    return list(dict.fromkeys(function for function in found if callable(function)))


@assume_constant_result
def _find_writing_positions(function: TorchFunction) -> tuple[int, ...]:
    """Return `_writing_positions`, as a constant of a traced function."""
    return _writing_positions(function)


@functools.lru_cache(maxsize=1024)
def _writing_positions(function: TorchFunction) -> tuple[int, ...]:
    """Return the positions of the arguments with which a call of the function writes to its operands."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C++, which has another function for it
        return ()
    return tuple(names.index(name) for name in _WRITING_ARGUMENTS if name in names)


def leaves_alone(function: TorchFunction, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether no rule applies to a call: it names its own dtype, or writes to its operands or to `out=`."""
    if any(kwargs.get(name) for name in _WRITING_ARGUMENTS) or kwargs.get("out") is not None:
        return True
    if kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args):
        return True
    return any(position < len(args) and args[position] for position in _find_writing_positions(function))


def check_op_rules(policy: Policy) -> None:
    """Reject `op_rules` that torch cannot follow, before the first step (S20).

    Raises:
        PolicyError: a name that is no function of torch, or one that computes nothing.
        UnsupportedError: a policy that computes in 16 bits without autocast, and so without an op list.
    """
    region_changes(policy)


@assume_constant_result
def _check_changes(changes: RuleChanges, mode: str, param: str, compute: str) -> None:
    for name, _ in changes:
        _check_name(name)
    check_rules_act(dict(changes), mode, param, compute)


def _check_name(name: str) -> None:
    known = _known_names()
    if name in known:
        return
    if name[:-1] in known and name.endswith("_"):
        raise PolicyError(
            f"op_rules: {name!r} works in place, where a tensor's dtype cannot change. The rule of {name[:-1]!r} "
            "covers the calls that return a new tensor."
        )
    if functions_named(name) and not name.startswith("_"):
        raise PolicyError(
            f"op_rules: {name!r} of torch computes no new tensor, so that it has no dtype to compute in. Drop it."
        )
    hint = translate_name(name, "torch") or did_you_mean(name.strip("_"), known)
    raise PolicyError(
        f"op_rules: torch has no function {name!r}.{hint} Names are those of functions of torch and "
        "torch.nn.functional, such as 'softmax', 'layer_norm' or 'linear'. Each framework has names of its own."
    )


@functools.cache
def _known_names() -> frozenset[str]:
    """Return the names of the functions that modes see and that compute new tensors."""
    seen = {function for functions in get_overridable_functions().values() for function in functions}
    names = {name for space in _SPACES for name in dir(space) if not name.startswith("_") and not name.endswith("_")}
    return frozenset(
        name
        for name in names
        if any(callable(function) and function in seen for function in functions_named(name))
        if hasattr(functional, name) or _computes(name)
    )


def _computes(name: str) -> bool:
    """Return whether an operation of torch returns tensors, and in no form a view of an operand."""
    for prefix in ("", "special_", "linalg_", "fft_"):
        returned = returned_values(prefix + name)
        if returned:
            return all(each.alias_info is None for each in returned)
    return False
