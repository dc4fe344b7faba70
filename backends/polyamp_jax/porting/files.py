"""JAX files as sources and targets: orbax checkpoints, and safetensors with flax's names.

Both store nested names without classes, so layers are recognised as in linen (`linen_tree`). Both are read array by
array. orbax is imported only here, through its public names.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from polyamp.errors import BackendNotInstalledError, PortError
from polyamp.files import missing_file_error, unwritable_file_error
from polyamp.porting.files import safetensors_file
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.models import library_compat
from polyamp_jax.models.parameter_writes import nest_values
from polyamp_jax.porting.jax_only.lazy_leaves import to_lazy
from polyamp_jax.porting.libraries.linen_tree import LinenArray, LinenStructure, LinenTree
from polyamp_jax.porting.libraries.porting_library import find_library

TreeKeys = tuple[Any, ...]
_FLAX_METADATA: Final = {"format": "flax"}
STATISTICS_COLLECTION: Final = "batch_stats"
"""The collection next to "params" that belongs to a model."""


class OrbaxItem(NamedTuple):
    """One tree of an orbax checkpoint.

    Attributes:
        root: the folder that the user named.
        folder: the folder of the tree, in `root` or `root` itself.
        leaves: keys of each array in the tree -> its metadata.
        tree: the nested metadata.
    """

    root: Path
    folder: Path
    leaves: Mapping[TreeKeys, Any]
    tree: Any


def open_file(path: Path) -> Inventory:
    """Return the layers of a file; see `polyamp.porting.layouts.converter.FileConverter.open_file`."""
    if not path.exists():
        raise missing_file_error(path)
    if path.is_dir():
        item = _find_item(path)
        return _inventory(
            {
                keys: Lazy(tuple(held.shape), held.dtype, functools.partial(_read_leaf, item, keys))
                for keys, held in item.leaves.items()
            },
            "an orbax checkpoint",
        )
    stored = safetensors_file.read(path).arrays
    return _inventory(
        {_split_name(name): array for name, array in stored.items()}, "a file with flax's names", list(stored)
    )


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """Write a file; see `polyamp.porting.layouts.converter.FileConverter.write_file`."""
    if not like.exists():
        raise missing_file_error(like)
    if like.is_dir():
        _write_checkpoint(path, leaves, _find_item(like))
        return
    file = safetensors_file.read(like)
    names = {"/".join(map(str, _split_name(name))): name for name in file.arrays}
    _check_leaves(leaves, {name: file.arrays[own] for name, own in names.items()})
    written = {own: leaves.get(name, file.arrays[own]) for name, own in names.items()}
    kept = {key: value for key, value in file.metadata.items() if not key.startswith("polyamp")}
    safetensors_file.write(path, written, kept)


def write_model(path: Path, model: Any) -> None:
    """Write an orbax folder or safetensors; see `polyamp.porting.layouts.converter.FileConverter.write_model`.

    Variables of linen and haiku are written as they are, models of other libraries by the names of their arrays.
    """
    paired = isinstance(model, tuple) and len(model) > 1 and isinstance(model[1], Mapping)
    arrays = {} if paired else find_library(model).arrays(model)
    tree = model[1] if paired else nest_values({tuple(name.split("/")): array for name, array in arrays.items()})
    leaves = dict(_walk_leaves(tree))
    if path.suffix == ".safetensors":
        safetensors_file.write(
            path, {"/".join(map(str, keys)): to_lazy(str(keys), leaf) for keys, leaf in leaves.items()}, _FLAX_METADATA
        )
    elif path.suffix or path.is_file():
        raise PortError(f"JAX's models are written to a folder, or to a file in .safetensors. Received: {path}.")
    else:
        _save_tree(path, tree, None)


def _inventory(arrays: Mapping[TreeKeys, Lazy], framework: str, names: Sequence[str] = ()) -> Inventory:
    """Return the layers of nested arrays: of variables, of parameters only, or of a training state with them."""
    below, statistics = _find_collections(arrays)
    tree, left = LinenTree(LinenStructure()), {}
    boxed = all(keys[-1] == "value" for keys in arrays)  # an nnx.State
    for keys, array in arrays.items():
        name = "/".join(map(str, keys))
        home = next((home for home in (below, statistics) if home is not None and keys[: len(home)] == home), None)
        own = tuple(map(str, keys[len(home or ()) : -1 if boxed else None]))
        if home is None:
            left[name] = "it is no part of the model's parameters and statistics"
        elif "rngs" in own:
            left[name] = "a random stream"
        elif not own:
            raise PortError(f"{framework} is one array, {name!r}, and no model.")
        else:
            fixed = home is statistics or (own[-1] in ("mean", "var") and _has_paired_statistic(arrays, keys, boxed))
            tree.add(LinenArray(name, "params" if not fixed else STATISTICS_COLLECTION, own, array, not fixed))
    return Inventory(list(tree.layers()), framework, False, left)


def _find_collections(arrays: Mapping[TreeKeys, Any]) -> tuple[TreeKeys, TreeKeys | None]:
    """Return the keys of the trees that contain a model's parameters and its running statistics."""
    home: TreeKeys = ()
    while any(keys[: len(home) + 1] == (*home, "params") for keys in arrays):
        home = (*home, "params")  # a TrainState's `params` may be variables with a "params" collection
    for around in (home[:-1], home[:-2]):
        statistics = (*around, STATISTICS_COLLECTION)
        if home and any(keys[: len(statistics)] == statistics for keys in arrays):
            return home, statistics
    return home, None


def _has_paired_statistic(arrays: Mapping[TreeKeys, Any], keys: TreeKeys, boxed: bool) -> bool:
    """Return whether both "mean" and "var" exist at this place."""
    tail = ("value",) if boxed else ()
    owner = keys[: -1 - len(tail)]
    return all((*owner, name, *tail) in arrays for name in ("mean", "var"))


def _split_name(name: str) -> TreeKeys:
    """Split a flattened name: transformers writes "params.layer.kernel", others "params/layer/kernel"."""
    return tuple(name.split("/" if "/" in name else "."))


def _check_leaves(leaves: Mapping[str, Lazy], there: Mapping[str, Any]) -> None:
    for name, values in leaves.items():
        if name not in there:
            raise PortError(f"the file has no array {name!r}.")
        if tuple(there[name].shape) != values.shape:
            raise PortError(f"{name!r} is {list(there[name].shape)} in the file. Received: {list(values.shape)}.")


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise BackendNotInstalledError("orbax checkpoints need orbax: pip install orbax-checkpoint.") from error
    return orbax


def _find_item(path: Path) -> OrbaxItem:
    """Return the tree of a model in a folder.

    The folder is a checkpoint of an orbax checkpointer, one step of a manager, or a manager's folder, of which the
    latest step is used.

    Raises:
        PortError: the folder is no checkpoint, or has several trees.
    """
    folder = path
    steps = sorted((int(each.name), each) for each in path.iterdir() if each.is_dir() and each.name.isdigit())
    if steps and not (path / library_compat.ORBAX_TREE).exists():
        folder = steps[-1][1]
    if not (folder / library_compat.ORBAX_TREE).exists():
        items = sorted(each.name for each in folder.iterdir() if (each / library_compat.ORBAX_TREE).exists())
        if not items:
            raise PortError(
                f"{path} is no orbax checkpoint: no file {library_compat.ORBAX_TREE} in it, and no step of one."
            )
        if len(items) > 1 and "default" not in items:
            raise PortError(
                f"{path} has the items {', '.join(items)}; name the one with the model: {folder / items[0]}."
            )
        folder = folder / ("default" if "default" in items else items[0])
    orbax = _import_orbax()
    try:
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.metadata(folder.absolute())
        tree = found.item_metadata.tree
    except Exception as error:
        raise _damaged_error(path, error) from error
    leaves = {keys: held for keys, held in _walk_leaves(tree) if getattr(held, "shape", None) is not None}
    if not leaves:
        raise PortError(f"{path} is an orbax checkpoint without arrays.")
    return OrbaxItem(path, folder, leaves, tree)


def _walk_leaves(tree: Any, keys: TreeKeys = ()) -> Iterator[tuple[TreeKeys, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _walk_leaves(item, (*keys, key))
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from _walk_leaves(item, (*keys, number))
    elif tree is not None:
        yield keys, tree


def _map_tree(tree: Any, change: Callable[[TreeKeys, Any], Any], keys: TreeKeys = ()) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_tree(item, change, (*keys, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map_tree(item, change, (*keys, number)) for number, item in enumerate(tree)]
    return None if tree is None else change(keys, tree)


def _restore_leaves(item: OrbaxItem, wanted: Callable[[TreeKeys], bool]) -> dict[TreeKeys, Any]:
    """Read the wanted leaves of a tree as NumPy arrays and scalars; the others are not read."""
    orbax = _import_orbax()
    plan = _map_tree(item.tree, lambda keys, held: 0 if wanted(keys) else orbax.PLACEHOLDER)
    how = _map_tree(
        item.tree,
        lambda keys, held: orbax.RestoreArgs(restore_type=np.ndarray if keys in item.leaves else None),
    )
    try:
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            args = orbax.args.PyTreeRestore(item=plan, restore_args=how)
            found = checkpointer.restore(item.folder.absolute(), args=args)
    except Exception as error:
        raise _damaged_error(item.root, error) from error
    return {keys: value for keys, value in _walk_leaves(found) if wanted(keys)}


def _read_leaf(item: OrbaxItem, keys: TreeKeys) -> np.ndarray[Any, Any]:
    return np.asarray(_restore_leaves(item, lambda other: other == keys)[keys])


def _damaged_error(path: Path, error: Exception) -> PortError:
    return PortError(
        f"{path} cannot be read as an orbax checkpoint ({type(error).__name__}: {error}). It may be damaged."
    )


def _ignore_folder(left_out: Path, folder: str, inside: Sequence[str]) -> list[str]:
    return [each for each in inside if Path(folder, each) == left_out]


def _write_checkpoint(path: Path, leaves: Mapping[str, Lazy], item: OrbaxItem) -> None:
    """Write a checkpoint like another: copy its folder, write the tree anew, and replace the target as a whole."""
    names = {"/".join(map(str, keys)): keys for keys in item.leaves}
    _check_leaves(leaves, {name: item.leaves[keys] for name, keys in names.items()})
    given = {names[name]: values for name, values in leaves.items()}
    kept = _restore_leaves(item, lambda keys: keys not in given)

    def value(keys: TreeKeys, held: Any) -> Any:
        made = np.asarray(given[keys].read()) if keys in given else kept[keys]
        # a stored jax.Array is stored as a jax.Array again, so that it is restored as one
        return jnp.asarray(made) if getattr(held, "sharding", None) is not None else made

    _save_tree(path, _map_tree(item.tree, value), item)


def _save_tree(path: Path, tree: Any, like: OrbaxItem | None) -> None:
    """Save a tree of arrays as a checkpoint with the other content of `like`, and replace the target as a whole."""
    orbax = _import_orbax()
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.absolute().parent))
    except OSError as error:
        raise unwritable_file_error(path, error) from error
    try:
        new = aside / "new"
        inner = Path() if like is None else like.folder.relative_to(like.root)
        if like is not None and inner.parts:
            shutil.copytree(like.root, new, ignore=functools.partial(_ignore_folder, like.folder))
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save((new / inner).absolute(), args=orbax.args.PyTreeSave(tree))
        if path.exists():
            path.rename(aside / "old")
        try:
            new.rename(path)
        except BaseException:
            if (aside / "old").exists():
                (aside / "old").rename(path)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
