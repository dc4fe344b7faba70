"""Paths of a model's modules and parameters without the prefixes of wrappers around modules (S5).

`torch.compile`, data parallelism and checkpointing wrap a module in another one, whose attribute name for it becomes
part of every path below. Wrappers are recognised by type, so a user's submodule named `module` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_torch.compat import WRAPPER_CLASSES
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters

_DDP_CLASS = DistributedDataParallel


def path_function(module: nn.Module) -> Callable[[str], str]:
    """Return a function that maps torch's names of parameters and buffers to their `/`-separated paths.

    Paths omit DistributedDataParallel wrappers, so that recipes and checkpoints are the same on one process and on
    several.

    Example:
        >>> path_function(nn.Sequential(nn.Linear(2, 2)))("0.weight")
        '0/weight'
    """
    wrapped = [name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, _DDP_CLASS)]
    if not wrapped:
        return _slash_separated
    prefixes = {
        f"{name}.module.".lstrip("."): f"{name}.".lstrip(".") for name in sorted(wrapped, key=len, reverse=True)
    }

    def path(name: str) -> str:
        for prefix, short in prefixes.items():
            if name.startswith(prefix):
                name = short + name.removeprefix(prefix)
        return _slash_separated(name)

    return path


def _slash_separated(name: str) -> str:
    return name.replace(".", "/")


def parameter_leaves(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> list[ParameterLeaf]:
    """Return the data that parameter groups match (S27): every path of each parameter, with and without wrappers'
    prefixes, and the class of the module that owns it.

    Args:
        module: the model.
        parameters: the trainable parameters by path, `/`-separated, in order.
    """
    inner = {path: short for short, path in unwrapped_paths(module).items()}
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
        ParameterLeaf(
            path,
            p.dim(),
            classes[id(p)],
            tuple(dict.fromkeys((path, *called[id(p)]))),
            outputs_first="Conv1D" not in classes[id(p)],  # transformers' GPT-2: x @ weight
        )
        for path, p in parameters.items()
    ]


def unwrapped_paths(module: nn.Module) -> dict[str, str]:
    """Map the path of each submodule without wrappers to its path in `module`, both `/`-separated.

    A shared submodule appears under each of its names. The path of a wrapped submodule is that of the innermost module.

    Example:
        >>> import torch
        >>> unwrapped_paths(nn.Sequential(nn.DataParallel(nn.Sequential(nn.ReLU()))))
        {'0': '0/module', '0/0': '0/module/0'}
    """
    short = short_paths(module)
    return {short[name]: name.replace(".", "/") for name in short if short[name]}


def short_paths(module: nn.Module) -> dict[str, str]:
    """Map torch's name of each submodule, and "" of the model, to its `/`-separated path without wrappers.

    A wrapper and the module in it have the same path.

    Example:
        >>> short_paths(nn.Sequential(nn.DataParallel(nn.ReLU())))
        {'': '', '0': '0', '0.module': '0'}
    """
    wrappers = tuple(_loaded_wrappers())
    parts = {"": module}
    inner = {"": ""}
    for name, part in module.named_modules(remove_duplicate=False):
        if not name:
            continue
        around, _, own = name.rpartition(".")
        parts[name] = part
        wrapped = any(own == attribute and isinstance(parts[around], kind) for kind, attribute in wrappers)
        inner[name] = inner[around] if wrapped else f"{inner[around]}/{own}".lstrip("/")
    return inner


def _loaded_wrappers() -> Iterator[tuple[type[Any], str]]:
    """Yield the wrapper classes whose modules are loaded; the other classes have no instances."""
    for place, name, attribute in WRAPPER_CLASSES:
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None:
            yield kind, attribute
