"""Module paths as a policy's overrides see them (S5): those of the model, without the prefixes of wrappers around it.

`torch.compile`, data parallelism and checkpointing wrap a module in another one, whose name for it stands in every path
behind it. They are known by their type, so that a submodule of the user's own that is called `module` keeps its name.
Called by `bound` and `backend`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp.rules.kinds import Leaf, class_names
from polyamp.rules.plan import NARROW, Plan
from polyamp_torch.compat import WRAPPERS
from polyamp_torch.precision.parameter_listing import tree_parameters

_REPLICATED = DistributedDataParallel
_FLOATING = torch.Tensor.is_floating_point


def plan_for(module: nn.Module, policy: Policy) -> Plan:
    """A policy resolved against a module's paths.

    The root has no path here: no glob makes an override of it.

    Raises:
        PolicyError: an override matches no module.
        UnsupportedError: a module would compute in a dtype to which autocast does not cast its parameters.
    """
    inner = inner_paths(module) if policy.overrides else {}
    plan = policy.plan(inner, backend="torch")
    for path, dtype in {"": plan.compute, **plan.overridden}.items():
        part = module.get_submodule(inner[path].replace("/", ".")) if path else module
        if not _is_computable(plan, dtype) and any(map(_FLOATING, part.parameters())):
            change = "mode='cast'" + (f", or drop overrides of {dtype}" if path else "")
            raise UnsupportedError(
                f"{f'the module {path!r}' if path else 'the model'} would have to compute in {dtype} over parameters "
                f"of {plan.param}. torch.autocast casts float32 to 16 bits, and nothing else. Use "
                f"{change if dtype != 'float64' else 'param=' + repr(dtype)}. Received: {policy}."
            )
    return plan


def _is_computable(plan: Plan, dtype: str) -> bool:
    if dtype == plan.param or dtype == "float64":
        return dtype == plan.param
    return plan.cast or (plan.param == "float32" and dtype in NARROW)


def path_of(module: nn.Module) -> Callable[[str], str]:
    """What makes of torch's names of parameters and buffers their paths, `/`-separated.

    What DistributedDataParallel wraps has the paths that it has without it, so that recipes and checkpoints are the
    same on one process and on several.

    Example:
        >>> path_of(nn.Sequential(nn.Linear(2, 2)))("0.weight")
        '0/weight'
    """
    wrapped = [name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, _REPLICATED)]
    if not wrapped:
        return _slashed
    prefixes = {
        f"{name}.module.".lstrip("."): f"{name}.".lstrip(".") for name in sorted(wrapped, key=len, reverse=True)
    }

    def path(name: str) -> str:
        for prefix, short in prefixes.items():
            if name.startswith(prefix):
                name = short + name.removeprefix(prefix)
        return _slashed(name)

    return path


def _slashed(name: str) -> str:
    return name.replace(".", "/")


def leaves_of(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> list[Leaf]:
    """What parameter groups ask of the parameters (S27): every path of each, the wrappers' prefixes left out and not,
    and the class of the module that owns it.

    Args:
        module: the model.
        parameters: the trainable ones by path, `/`-separated, in order.
    """
    inner = {path: short for short, path in inner_paths(module).items()}
    called: dict[int, dict[str, None]] = {}
    classes: dict[int, tuple[str, ...]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        path = name.replace(".", "/")
        kind, _, reparametrized = path.partition("/parametrizations/")
        for own, p in tree_parameters(part, recurse=False):
            leaf = reparametrized or own  # torch.nn.utils.parametrize: conv/parametrizations/weight/original0
            known = [path, inner.get(path, path), *([kind] if reparametrized else [])]
            paths = (f"{place}/{leaf if place == kind else own}".lstrip("/") for place in known)
            called.setdefault(id(p), {}).update(dict.fromkeys(paths))
            owner = class_names(module.get_submodule(kind.replace("/", ".")) if reparametrized else part)
            classes[id(p)] = (*classes.get(id(p), ()), *owner)
    return [
        Leaf(path, p.dim(), classes[id(p)], tuple(dict.fromkeys((path, *called[id(p)]))))
        for path, p in parameters.items()
    ]


def inner_paths(module: nn.Module) -> dict[str, str]:
    """Path of each submodule without wrappers -> its path in `module`, both `/`-separated.

    A shared submodule is there under each of its names. Where a submodule is wrapped, its path names the innermost.

    Example:
        >>> import torch
        >>> inner_paths(nn.Sequential(nn.DataParallel(nn.Sequential(nn.ReLU()))))
        {'0': '0/module', '0/0': '0/module/0'}
    """
    wrappers = tuple(_known())
    parts = {"": module}
    inner = {"": ""}
    found = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if not name:
            continue
        around, _, own = name.rpartition(".")
        parts[name] = part
        wrapped = any(own == attribute and isinstance(parts[around], kind) for kind, attribute in wrappers)
        inner[name] = inner[around] if wrapped else f"{inner[around]}/{own}".lstrip("/")
        if inner[name]:
            found[inner[name]] = name.replace(".", "/")
    return found


def _known() -> Iterator[tuple[type[Any], str]]:
    """The wrappers whose modules are loaded; of another class there can be no instance."""
    for place, name, attribute in WRAPPERS:
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None:
            yield kind, attribute
