"""`PolicyModule`: model with other arrays under a resolved policy, as `loss_fn` receives it. Modules are copied.

MLX keeps a module's arrays and children as its items, so a model with other arrays is a copy of the containers. A
module with an override gets a separate class, whose `__call__` enters that module's precision (S5).
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
from polyamp.recipe.resolved_policy import ModulePrecision, ResolvedPolicy
from polyamp.rules.parameter_kinds import ParameterLeaf, class_names
from polyamp_mlx.arrays import cast_tree
from polyamp_mlx.precision.autocast import disable_compilation, precision_region


def module_paths(module: nn.Module) -> list[str]:
    """Return the path of every module, `/`-separated, "" for the model itself."""
    return [path.replace(".", "/") for path, _ in module.named_modules()]


def parameter_leaves(module: nn.Module, parameters: Mapping[str, mx.array]) -> list[ParameterLeaf]:
    """Return the parameters' data for parameter groups (S27): number of axes, and class of the owning module."""
    owners = {path.replace(".", "/"): class_names(part) for path, part in module.named_modules()}
    return [
        ParameterLeaf(path, array.ndim, owners.get(path.rpartition("/")[0]), outputs_first=True)
        for path, array in parameters.items()
    ]


def module_arrays(module: nn.Module) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the trainable parameters and the other arrays of the model, both by path.

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


def replace_arrays(module: nn.Module, arrays: Mapping[str, mx.array], plan: ResolvedPolicy | None = None) -> nn.Module:
    """Return the same model with other arrays; under a resolved policy if `plan` is given."""
    copied: nn.Module = _copy_node(module, "", arrays, plan, None if plan is None else plan.root)
    return copied


def _copy_node(
    node: Any, path: str, arrays: Mapping[str, mx.array], plan: ResolvedPolicy | None, around: ModulePrecision | None
) -> Any:
    def inside(key: Any, value: Any, place: ModulePrecision | None) -> Any:
        return _copy_node(value, f"{path}/{key}" if path else str(key), arrays, plan, place)

    if isinstance(node, nn.Module):
        place = None if plan is None else plan.at(path)
        new = copy.copy(node)
        for key, value in node.items():
            dict.__setitem__(new, key, inside(key, value, place))
        if plan is not None and place is not None and (place != around or plan.cast):
            kind: Any = type(node)
            new.__class__ = _module_class_in_precision(kind)
            new.__dict__["polyamp_place"] = (place, plan.float64)
        return new
    if isinstance(node, Mapping):
        return {key: inside(key, value, around) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(inside(index, value, around) for index, value in enumerate(node))
    if not isinstance(node, mx.array):
        return node
    array = arrays.get(path, node)
    statistic = path.rpartition("/")[2].startswith("running_")  # by MLX's naming; they stay in float32
    return array if around is None or around.mixes or statistic else cast_tree(array, around.dtype, float64=True)


def check_no_casts(*plans: ResolvedPolicy) -> None:
    """Raise if a second policy cannot apply because one of the two has changed the model irreversibly."""
    for plan in plans:
        if plan.cast or plan.overridden:
            raise UnsupportedError(
                "a second policy around a model in loss_fn needs two policies of mode='autocast' without overrides in "
                "the mlx backend: weights and modules are cast when the model is bound."
            )


@functools.cache
def _module_class_in_precision(cls: Any) -> Any:
    """Return a module class whose calls compute in the module's own precision."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        place, float64 = self.__dict__["polyamp_place"]
        if not place.mixes:
            args, kwargs = cast_tree((args, kwargs), place.dtype, float64=float64)
        with precision_region(place):
            return cls.__call__(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})


class PolicyModule:
    """Model or function under its resolved policy: S3's two modes for inputs, S1's output dtype for outputs."""

    def __init__(
        self, target: Callable[..., Any], plan: ResolvedPolicy, parameters: Mapping[str, mx.array] | None = None
    ) -> None:
        self.target = target
        self.plan = plan
        self.masters = parameters  # of a model: gradients are taken by these; `target` may have casts of them (S29)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan
        if not plan.root.mixes:
            args, kwargs = cast_tree((args, kwargs), plan.compute, float64=plan.float64)
        with disable_compilation(), precision_region(plan.root):
            result = self.target(*args, **kwargs)
        return cast_tree(result, plan.output, float64=plan.float64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes on the model."""
        if name in ("target", "plan", "masters") or not isinstance(self.target, nn.Module):
            object.__setattr__(self, name, value)
        else:
            setattr(self.target, name, value)
