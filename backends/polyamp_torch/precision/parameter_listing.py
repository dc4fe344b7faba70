"""The parameters of a module by the tree of its modules, and what a class's own `parameters` lists instead (S29)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from polyamp.errors import ModelError
from polyamp.trees import map_tree


def tree_parameters(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter as `nn.Module.named_parameters` gives them, whatever the class defines in its place."""
    return nn.Module.named_parameters(module, recurse=recurse)


def is_own(module: nn.Module, name: str) -> bool:
    """Whether the class, or the module itself, defines this method of `nn.Module`'s anew."""
    return getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module)


def with_each(function: Callable[[torch.Tensor], Any], listed: Any) -> Any:
    """A listing of parameters with `function` of each tensor: containers are built anew, iterators are run through."""
    if isinstance(listed, torch.Tensor):
        return function(listed)
    if isinstance(listed, nn.ParameterDict):
        return {name: with_each(function, value) for name, value in listed.items()}
    if isinstance(listed, list | tuple | Mapping):
        return map_tree(lambda leaf: leaf if leaf is listed else with_each(function, leaf), listed)
    if isinstance(listed, str | bytes) or not isinstance(listed, Iterable) or isinstance(listed, nn.Module):
        return [with_each(function, value) for value in listed] if isinstance(listed, nn.ParameterList) else listed
    mapped = [with_each(function, value) for value in listed]
    if isinstance(listed, Iterator):
        return iter(mapped)
    return set(mapped) if isinstance(listed, set | frozenset) else mapped


def check_listing(module: nn.Module, trained: Mapping[str, torch.Tensor]) -> None:
    """Refuse a class whose own `parameters`, which an optimizer by hand would be given, lists other tensors than are
    trained. What lists no tensors at all, or wants arguments, is something else by the same name.

    Args:
        module: the model.
        trained: its trainable parameters by path, of the tree.

    Raises:
        ModelError: names the first that one has and the other has not.
    """
    name = next((name for name in ("parameters", "named_parameters") if is_own(module, name)), None)
    if name is None:
        return
    method = getattr(module, name)
    try:
        inspect.signature(method).bind()
    except TypeError:
        return
    found: dict[int, torch.Tensor] = {}
    with_each(lambda p: found.setdefault(id(p), p), method())
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
