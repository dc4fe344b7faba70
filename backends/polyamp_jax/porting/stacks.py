"""Arrays that hold those of several equal layers: `nn.scan` and `nn.vmap` stack them along a first axis.

With a batch, `linen` sees the shapes that a layer itself has, and lists one layer for each index, whose arrays are
named "path[index]". The converter puts such slices together again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polyamp.porting.layouts.lazy import Lazy
from polyamp_jax.porting.flax_table import class_of, refusal
from polyamp_jax.porting.leaves import lazy
from polyamp_jax.porting.linen_tree import Array, Path, Seen


def unstacked(arrays: Sequence[Array], seen: Seen) -> list[Array]:
    """The arrays of a model, those that are stacked in slices; `seen` then has the layers of each index too.

    Raises:
        PortError: they are stacked along another axis than the first.
    """
    lengths: dict[Path, int] = {}
    for array in arrays:
        shape, inner = tuple(array.leaf.shape), seen.shapes.get(array.path[:-1], {}).get(array.path[-1])
        if inner is None or inner == shape:
            continue
        if shape[1:] != inner:
            raise refusal(
                "/".join(array.path[:-1]),
                f"flax.linen: {array.name!r} is {list(shape)} where the layer has {list(inner)}. Stacks of layers "
                "(nn.scan, nn.vmap) are moved if they are along the first axis",
            )
        lengths[array.path] = shape[0]
    if not lengths:
        return list(arrays)
    paths = [array.path for array in arrays]
    found, gone = [], set[Path]()
    for array in arrays:
        if array.path not in lengths:
            found.append(array)
            continue
        cut = len(_home(array.path, paths, lengths, seen))
        for number in range(lengths[array.path]):
            path = (*array.path[:cut], str(number), *array.path[cut:])
            gone |= _show(seen, array.path, cut, number)
            whole = lazy(array.name, array.leaf)
            part = Lazy(whole.shape[1:], whole.dtype, _reader(whole, number))
            found.append(array._replace(name=f"{array.name}[{number}]", path=path, leaf=part, stack=cut))
    for path in gone:
        del seen.modules[path]
    return found


def gathered(leaves: Mapping[str, Lazy], there: Mapping[str, Any]) -> dict[str, Lazy]:
    """Values by the names of whole arrays: slices of one are put together, over what it has where one is missing."""
    found, parts = {}, dict[str, dict[int, Lazy]]()
    for name, values in leaves.items():
        whole = None if name in there else slice_of(name)
        if whole is None or whole[0] not in there:
            found[name] = values
        else:
            parts.setdefault(whole[0], {})[whole[1]] = values
    for name, slices in parts.items():
        like = lazy(name, there[name])
        found[name] = Lazy(like.shape, like.dtype, _joiner(like, slices))
    return found


def slice_of(name: str) -> tuple[str, int] | None:
    """The whole array's name and the index in it, of a slice's name.

    >>> slice_of("blocks/Dense_0/kernel[3]")
    ('blocks/Dense_0/kernel', 3)
    """
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return None if match is None else (match.group(1), int(match.group(2)))


def _home(path: Path, paths: Sequence[Path], lengths: Mapping[Path, int], seen: Seen) -> Path:
    """The module that is stacked: the outermost of which all arrays are, less those that hold it and nothing else."""
    length = lengths[path]
    for cut in range(len(path)):
        below = [other for other in paths if other[:cut] == path[:cut]]
        if any(lengths.get(other) != length for other in below):
            continue
        while len({other[cut] for other in below}) == 1 and cut < len(path) - 2:
            child = seen.modules.get(path[: cut + 1])
            if child is not None and class_of(child) is not None:
                break
            cut += 1
        return path[:cut]
    return path[:-1]


def _show(seen: Seen, path: Path, cut: int, number: int) -> set[Path]:
    """Note the modules around an array under their paths with the index too; returns their paths without."""
    moved = set()
    for end in range(cut, len(path)):
        old, new = path[:end], (*path[:cut], str(number), *path[cut:end])
        if old in seen.modules:
            seen.modules.setdefault(new, seen.modules[old])
            moved |= {old} if end > cut or class_of(seen.modules[old]) is not None else set()
        if old in seen.reverse:
            seen.reverse.setdefault(new, seen.reverse[old])
    return moved


def _reader(whole: Lazy, number: int) -> Callable[[], np.ndarray[Any, Any]]:
    return lambda: whole.read()[number]


def _joiner(like: Lazy, slices: Mapping[int, Lazy]) -> Callable[[], np.ndarray[Any, Any]]:
    def read() -> np.ndarray[Any, Any]:
        whole = np.empty(like.shape, like.dtype) if len(slices) == like.shape[0] else np.array(like.read())
        for number, values in slices.items():
            whole[number] = values.read()
        return whole

    return read
