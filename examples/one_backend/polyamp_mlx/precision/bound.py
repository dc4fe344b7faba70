"""A model around other arrays and under a plan: what `loss_fn` calls. Modules are copied, never changed.

MLX keeps a module's arrays and children as its items, so a model around other arrays is a copy of the containers. A
module for which an override says something gets a class of its own, whose `__call__` enters that module's place (S5).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from polyamp.errors import ModelError, UnsupportedError
from polyamp.rules.kinds import Leaf, class_names
from polyamp.rules.plan import Place, Plan
from polyamp_mlx.arrays import cast_tree
from polyamp_mlx.precision.autocast import region, uncompiled


def module_paths(module: nn.Module) -> list[str]:
    """The path of every module, `/`-separated, "" for the model itself."""
    return [path.replace(".", "/") for path, _ in module.named_modules()]


def leaves_of(module: nn.Module, parameters: Mapping[str, mx.array]) -> list[Leaf]:
    """What parameter groups ask of the parameters (S27): how many axes, and the class of the module that owns each."""
    owners = {path.replace(".", "/"): class_names(part) for path, part in module.named_modules()}
    return [Leaf(path, array.ndim, owners.get(path.rpartition("/")[0])) for path, array in parameters.items()]


def arrays_of(module: nn.Module) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """By path: the trainable parameters, and the other arrays of the model.

    Raises:
        ModelError: an array has two paths.
    """
    every = {path.replace(".", "/"): value for path, value in tree_flatten(module.parameters())}
    first: dict[int, str] = {}
    for path, value in every.items():
        if first.setdefault(id(value), path) != path:
            raise ModelError(
                f"{first[id(value)]!r} and {path!r} are one array, and the mlx backend would train two. Share what the "
                "module computes instead, such as Embedding.as_linear."
            )
    trainable = {path.replace(".", "/") for path, _ in tree_flatten(module.trainable_parameters())}
    return (
        {path: value for path, value in every.items() if path in trainable},
        {path: value for path, value in every.items() if path not in trainable},
    )


def with_arrays(module: nn.Module, arrays: Mapping[str, mx.array], plan: Plan | None = None) -> nn.Module:
    """The same model around other arrays; under a plan, if one is given."""
    copied: nn.Module = _copied(module, "", arrays, plan, None if plan is None else plan.root)
    return copied


def _copied(node: Any, path: str, arrays: Mapping[str, mx.array], plan: Plan | None, around: Place | None) -> Any:
    def inside(key: Any, value: Any, place: Place | None) -> Any:
        return _copied(value, f"{path}/{key}" if path else str(key), arrays, plan, place)

    if isinstance(node, nn.Module):
        place = None if plan is None else plan.at(path)
        new = copy.copy(node)
        for key, value in node.items():
            dict.__setitem__(new, key, inside(key, value, place))
        if plan is not None and place is not None and (place != around or plan.cast):
            kind: Any = type(node)
            new.__class__ = _placed(kind)
            new.__dict__["polyamp_place"] = (place, plan.float64)
        return new
    if isinstance(node, Mapping):
        return {key: inside(key, value, around) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(inside(index, value, around) for index, value in enumerate(node))
    if not isinstance(node, mx.array):
        return node
    array = arrays.get(path, node)
    statistic = path.rpartition("/")[2].startswith("running_")  # as MLX names them; they are kept in float32
    return array if around is None or around.mixes or statistic else cast_tree(array, around.dtype, float64=True)


def check_casts_nothing(*plans: Plan) -> None:
    """Refuse a second policy around a model where one of the two has put something into it that cannot be taken out."""
    for plan in plans:
        if plan.cast or plan.overridden:
            raise UnsupportedError(
                "a second policy around a model in loss_fn needs two policies of mode='autocast' without overrides in "
                "the mlx backend: weights and modules are cast when the model is bound."
            )


@functools.cache
def _placed(cls: Any) -> Any:
    """A module class whose calls compute in the module's own place."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        place, float64 = self.__dict__["polyamp_place"]
        if not place.mixes:
            args, kwargs = cast_tree((args, kwargs), place.dtype, float64=float64)
        with region(place):
            return cls.__call__(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})


class Bound:
    """A model or function under its plan: S3's two modes at the boundary, S1's output dtype behind it."""

    def __init__(
        self, target: Callable[..., Any], plan: Plan, parameters: Mapping[str, mx.array] | None = None
    ) -> None:
        self.target = target
        self.plan = plan
        self.masters = parameters  # of a model: what gradients are taken by; `target` may hold casts of them (S29)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan
        if not plan.root.mixes:
            args, kwargs = cast_tree((args, kwargs), plan.compute, float64=plan.float64)
        with uncompiled(), region(plan.root):
            result = self.target(*args, **kwargs)
        return cast_tree(result, plan.output, float64=plan.float64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What `loss_fn` sets is set on the model."""
        if name in ("target", "plan", "masters") or not isinstance(self.target, nn.Module):
            object.__setattr__(self, name, value)
        else:
            setattr(self.target, name, value)
