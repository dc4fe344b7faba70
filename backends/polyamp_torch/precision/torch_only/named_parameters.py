"""Parameters of a module by its module tree, and the listings of classes that override `parameters` (S29)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyamp.errors import ModelError
from polyamp.trees import map_tree


def tree_parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the names and parameters of `nn.Module.named_parameters`, even if the class overrides it."""
    return nn.Module.named_parameters(module, recurse=recurse)


def is_overridden(module: nn.Module, name: str) -> bool:
    """Return whether the class, or the module itself, overrides this method of `nn.Module`."""
    return getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module)


def map_listed_parameters(function: Callable[[torch.Tensor], Any], listed: Any) -> Any:
    """Apply `function` to each tensor of a listing of parameters. Containers are rebuilt, iterators are consumed."""
    if isinstance(listed, torch.Tensor):
        return function(listed)
    if isinstance(listed, nn.ParameterDict):
        return {name: map_listed_parameters(function, value) for name, value in listed.items()}
    if isinstance(listed, list | tuple | Mapping):
        return map_tree(lambda leaf: leaf if leaf is listed else map_listed_parameters(function, leaf), listed)
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable) or isinstance(listed, nn.Module):
        return (
            [map_listed_parameters(function, value) for value in listed]
            if isinstance(listed, nn.ParameterList)
            else listed
        )
    mapped = [map_listed_parameters(function, value) for value in listed]
    if isinstance(listed, Iterator):
        return iter(mapped)
    return set(mapped) if isinstance(listed, set | frozenset) else mapped


def check_parameter_listing(module: nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
    """Reject a class whose own `parameters`, which a user passes to an optimizer, lists other tensors than are trained.
    A method that lists no tensors, or requires arguments, is ignored: it only shares the name.

    Args:
        module: the model.
        trained: its trainable parameters by path, from the module tree.

    Raises:
        ModelError: names the first tensor that only one of the two contains.
    """
    name = next((name for name in ("parameters", "named_parameters") if is_overridden(module, name)), None)
    if name is None:
        return
    method = getattr(module, name)
    try:
        inspect.signature(method).bind()
    except TypeError:
        return
    found: dict[int, torch.Tensor] = {}
    map_listed_parameters(lambda p: found.setdefault(id(p), p), method())
    called = f"{type(module).__name__}.{name}()"
    hidden = next((path for path, p in trained.items() if id(p) not in found), None)
    if found and hidden is not None:
        raise ModelError(
            f"parameter {hidden!r} requires a gradient, and {called}, which the model defines itself, does not list "
            "it: torch.optim over model.parameters() would not train it, and polyamp trains what the modules hold. "
            "Freeze it with requires_grad_(False), or list it too."
        )
    held = {id(p) for p in trained.values()}
    for p in found.values():
        if p.requires_grad and p.is_leaf and id(p) not in held:
            raise ModelError(
                f"{called} lists a tensor of shape {tuple(p.shape)} that no module of the model holds as a parameter: "
                "polyamp, which trains what the modules hold, would not train it. Make it an nn.Parameter that is an "
                "attribute of a module, or of an nn.ParameterList."
            )
