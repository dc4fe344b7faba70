"""Splitting and joining of arrays that stack several equal layers along the first axis, as `nn.scan` and `nn.vmap` do.

With a batch, `linen` knows the shapes of a single layer and lists one layer for each index, with arrays named
"path[index]". The converter joins these slices again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.porting.jax_only.lazy_leaves import to_lazy
from polyamp_jax.porting.libraries.flax_layer_table import flax_class, refusal_error
from polyamp_jax.porting.libraries.linen_tree import LinenArray, LinenPath, LinenStructure


def unstack_arrays(arrays: Sequence[LinenArray], structure: LinenStructure) -> list[LinenArray]:
    """Return the arrays of a model with stacked arrays as slices. Adds the layers of each index to `structure`.

    Raises:
        PortError: arrays are stacked along another axis than the first.
    """
    lengths: dict[LinenPath, int] = {}
    for array in arrays:
        shape, inner = tuple(array.leaf.shape), structure.shapes.get(array.path[:-1], {}).get(array.path[-1])
        if inner is None or inner == shape:
            continue
        if shape[1:] != inner:
            raise refusal_error(
                "/".join(array.path[:-1]),
                f"flax.linen: {array.name!r} is {list(shape)} where the layer has {list(inner)}. Stacks of layers "
                "(nn.scan, nn.vmap) are moved if they are along the first axis",
            )
        lengths[array.path] = shape[0]
    if not lengths:
        return list(arrays)
    paths = [array.path for array in arrays]
    found, old_paths = [], set[LinenPath]()
    for array in arrays:
        if array.path not in lengths:
            found.append(array)
            continue
        cut = len(_stacked_module(array.path, paths, lengths, structure))
        for number in range(lengths[array.path]):
            path = (*array.path[:cut], str(number), *array.path[cut:])
            old_paths |= _note_index(structure, array.path, cut, number)
            whole = to_lazy(array.name, array.leaf)
            part = Lazy(whole.shape[1:], whole.dtype, _slice_reader(whole, number))
            found.append(array._replace(name=f"{array.name}[{number}]", path=path, leaf=part, stack=cut))
    for path in old_paths:
        del structure.modules[path]
    return found


def gather_slices(leaves: Mapping[str, Lazy], arrays: Mapping[str, Any]) -> dict[str, Lazy]:
    """Return values by the names of whole arrays. Slices of an array are joined; missing slices keep their values."""
    found, parts = {}, dict[str, dict[int, Lazy]]()
    for name, values in leaves.items():
        whole = None if name in arrays else parse_slice_name(name)
        if whole is None or whole[0] not in arrays:
            found[name] = values
        else:
            parts.setdefault(whole[0], {})[whole[1]] = values
    for name, slices in parts.items():
        like = to_lazy(name, arrays[name])
        found[name] = Lazy(like.shape, like.dtype, _slice_joiner(like, slices))
    return found


def parse_slice_name(name: str) -> tuple[str, int] | None:
    """Return the whole array's name and the index from a slice's name; None for another name.

    >>> parse_slice_name("blocks/Dense_0/kernel[3]")
    ('blocks/Dense_0/kernel', 3)
    """
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return None if match is None else (match.group(1), int(match.group(2)))


def _stacked_module(
    path: LinenPath, paths: Sequence[LinenPath], lengths: Mapping[LinenPath, int], structure: LinenStructure
) -> LinenPath:
    """Return the path of the stacked module: the outermost one whose arrays are all stacked.

    Modules that only wrap a single submodule are skipped.
    """
    length = lengths[path]
    for cut in range(len(path)):
        below = [other for other in paths if other[:cut] == path[:cut]]
        if any(lengths.get(other) != length for other in below):
            continue
        while len({other[cut] for other in below}) == 1 and cut < len(path) - 2:
            child = structure.modules.get(path[: cut + 1])
            if child is not None and flax_class(child) is not None:
                break
            cut += 1
        return path[:cut]
    return path[:-1]


def _note_index(structure: LinenStructure, path: LinenPath, cut: int, number: int) -> set[LinenPath]:
    """Also record the modules around an array under paths with the index. Returns their paths without it."""
    moved = set()
    for end in range(cut, len(path)):
        old, new = path[:end], (*path[:cut], str(number), *path[cut:end])
        if old in structure.modules:
            structure.modules.setdefault(new, structure.modules[old])
            moved |= {old} if end > cut or flax_class(structure.modules[old]) is not None else set()
        if old in structure.reverse:
            structure.reverse.setdefault(new, structure.reverse[old])
    return moved


def _slice_reader(whole: Lazy, number: int) -> Callable[[], np.ndarray[Any, Any]]:
    return lambda: whole.read()[number]


def _slice_joiner(like: Lazy, slices: Mapping[int, Lazy]) -> Callable[[], np.ndarray[Any, Any]]:
    def read() -> np.ndarray[Any, Any]:
        whole = np.empty(like.shape, like.dtype) if len(slices) == like.shape[0] else np.array(like.read())
        for number, values in slices.items():
            whole[number] = values.read()
        return whole

    return read
