"""Files in which JAX's users keep models: orbax checkpoints, and safetensors with flax's names. Called by `converter`.

Either holds nested names without classes, so that layers are told as those of linen are (`linen_tree`). Both are read
array by array. orbax is imported only here, by its public names.
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
from polyamp.files import missing, unwritable
from polyamp.porting.files import tensors
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy import Lazy
from polyamp_jax import compat
from polyamp_jax.porting.leaves import lazy
from polyamp_jax.porting.linen_tree import Array, Seen, Tree

Keys = tuple[Any, ...]
_FLAX: Final = {"format": "flax"}
STATISTICS: Final = "batch_stats"
"""The collection beside "params" that belongs to a model."""


class Item(NamedTuple):
    """One tree of an orbax checkpoint.

    Attributes:
        root: the folder that was named.
        folder: the folder of the tree, in `root` or `root` itself.
        leaves: keys of each array in the tree -> what is known of it before it is read.
        tree: the metadata, nested.
    """

    root: Path
    folder: Path
    leaves: Mapping[Keys, Any]
    tree: Any


def open_file(path: Path) -> Inventory:
    """See `polyamp.porting.layouts.converter.ReadsFiles.open_file`."""
    if not path.exists():
        raise missing(path)
    if path.is_dir():
        item = _item(path)
        return _inventory(
            {
                keys: Lazy(tuple(held.shape), held.dtype, functools.partial(_read, item, keys))
                for keys, held in item.leaves.items()
            },
            "an orbax checkpoint",
        )
    stored = tensors.read(path).arrays
    return _inventory({_split(name): array for name, array in stored.items()}, "a file with flax's names", list(stored))


def write_file(path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
    """See `polyamp.porting.layouts.converter.ReadsFiles.write_file`."""
    if not like.exists():
        raise missing(like)
    if like.is_dir():
        _write_checkpoint(path, leaves, _item(like))
        return
    file = tensors.read(like)
    names = {"/".join(map(str, _split(name))): name for name in file.arrays}
    _check(leaves, {name: file.arrays[own] for name, own in names.items()})
    written = {own: leaves.get(name, file.arrays[own]) for name, own in names.items()}
    kept = {key: value for key, value in file.metadata.items() if not key.startswith("polyamp")}
    tensors.write(path, written, kept)


def write_model(path: Path, model: Any, arrays: Mapping[str, Any]) -> None:
    """See `polyamp.porting.layouts.converter.ReadsFiles.write_model`: a folder of orbax, or safetensors with flax's
    names.

    Args:
        path: the folder, or a file that ends in .safetensors.
        model: the model; of linen and haiku its variables are written as they are.
        arrays: name -> array of another library's.
    """
    paired = isinstance(model, tuple) and len(model) > 1 and isinstance(model[1], Mapping)
    tree = dict(_leaves(model[1] if paired else _nested(arrays)))
    if path.suffix == ".safetensors":
        tensors.write(path, {"/".join(map(str, keys)): lazy(str(keys), leaf) for keys, leaf in tree.items()}, _FLAX)
    elif path.suffix or path.is_file():
        raise PortError(f"JAX's models are written to a folder, or to a file in .safetensors. Received: {path}.")
    else:
        _put(path, model[1] if paired else _nested(arrays), None)


def _nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = array
    return tree


def _inventory(arrays: Mapping[Keys, Lazy], framework: str, names: Sequence[str] = ()) -> Inventory:
    """The layers of nested arrays: of variables, of parameters alone, or of a training state that has them."""
    below, statistics = _homes(arrays)
    tree, left = Tree(Seen()), {}
    boxed = all(keys[-1] == "value" for keys in arrays)  # an nnx.State as it is
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
            fixed = home is statistics or (own[-1] in ("mean", "var") and _beside(arrays, keys, boxed))
            tree.add(Array(name, "params" if not fixed else STATISTICS, own, array, not fixed))
    return Inventory(list(tree.layers()), framework, False, left)


def _homes(arrays: Mapping[Keys, Any]) -> tuple[Keys, Keys | None]:
    """Keys of the tree of parameters, and of that of running statistics, in which the arrays of a model lie."""
    home: Keys = ()
    while any(keys[: len(home) + 1] == (*home, "params") for keys in arrays):
        home = (*home, "params")  # a TrainState's params may be the variables, with a collection of that name
    for around in (home[:-1], home[:-2]):
        statistics = (*around, STATISTICS)
        if home and any(keys[: len(statistics)] == statistics for keys in arrays):
            return home, statistics
    return home, None


def _beside(arrays: Mapping[Keys, Any], keys: Keys, boxed: bool) -> bool:
    """Whether a mean has a variance beside it, and the other way round."""
    tail = ("value",) if boxed else ()
    owner = keys[: -1 - len(tail)]
    return all((*owner, name, *tail) in arrays for name in ("mean", "var"))


def _split(name: str) -> Keys:
    """A flattened name as keys: transformers writes "params.layer.kernel", others "params/layer/kernel"."""
    return tuple(name.split("/" if "/" in name else "."))


def _check(leaves: Mapping[str, Lazy], there: Mapping[str, Any]) -> None:
    for name, values in leaves.items():
        if name not in there:
            raise PortError(f"the file has no array {name!r}.")
        if tuple(there[name].shape) != values.shape:
            raise PortError(f"{name!r} is {list(there[name].shape)} in the file. Received: {list(values.shape)}.")


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise BackendNotInstalledError("orbax checkpoints need orbax: pip install orbax-checkpoint.") from error
    return orbax


def _item(path: Path) -> Item:
    """The tree of a model in a folder: a checkpoint of orbax's checkpointers, one of its manager's steps, or all of a
    manager's, of which the latest counts.

    Raises:
        PortError: no such folder, or one with several trees.
    """
    folder = path
    steps = sorted((int(each.name), each) for each in path.iterdir() if each.is_dir() and each.name.isdigit())
    if steps and not (path / compat.ORBAX_TREE).exists():
        folder = steps[-1][1]
    if not (folder / compat.ORBAX_TREE).exists():
        items = sorted(each.name for each in folder.iterdir() if (each / compat.ORBAX_TREE).exists())
        if not items:
            raise PortError(f"{path} is no orbax checkpoint: no file {compat.ORBAX_TREE} in it, and no step of one.")
        if len(items) > 1 and "default" not in items:
            raise PortError(
                f"{path} has the items {', '.join(items)}; name the one with the model: {folder / items[0]}."
            )
        folder = folder / ("default" if "default" in items else items[0])
    orbax = _orbax()
    try:
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.metadata(folder.absolute())
        tree = found.item_metadata.tree
    except Exception as error:
        raise _damaged(path, error) from error
    leaves = {keys: held for keys, held in _leaves(tree) if getattr(held, "shape", None) is not None}
    if not leaves:
        raise PortError(f"{path} is an orbax checkpoint without arrays.")
    return Item(path, folder, leaves, tree)


def _leaves(tree: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, (*keys, key))
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from _leaves(item, (*keys, number))
    elif tree is not None:
        yield keys, tree


def _mapped(tree: Any, change: Callable[[Keys, Any], Any], keys: Keys = ()) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(item, change, (*keys, key)) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_mapped(item, change, (*keys, number)) for number, item in enumerate(tree)]
    return None if tree is None else change(keys, tree)


def _restored(item: Item, wanted: Callable[[Keys], bool]) -> dict[Keys, Any]:
    """Some leaves of a tree, as NumPy arrays and scalars; the others are not read."""
    orbax = _orbax()
    plan = _mapped(item.tree, lambda keys, held: 0 if wanted(keys) else orbax.PLACEHOLDER)
    how = _mapped(
        item.tree,
        lambda keys, held: orbax.RestoreArgs(restore_type=np.ndarray if keys in item.leaves else None),
    )
    try:
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            args = orbax.args.PyTreeRestore(item=plan, restore_args=how)
            found = checkpointer.restore(item.folder.absolute(), args=args)
    except Exception as error:
        raise _damaged(item.root, error) from error
    return {keys: value for keys, value in _leaves(found) if wanted(keys)}


def _read(item: Item, keys: Keys) -> np.ndarray[Any, Any]:
    return np.asarray(_restored(item, lambda other: other == keys)[keys])


def _damaged(path: Path, error: Exception) -> PortError:
    return PortError(
        f"{path} cannot be read as an orbax checkpoint ({type(error).__name__}: {error}). It may be damaged."
    )


def _only(left_out: Path, folder: str, inside: Sequence[str]) -> list[str]:
    return [each for each in inside if Path(folder, each) == left_out]


def _write_checkpoint(path: Path, leaves: Mapping[str, Lazy], item: Item) -> None:
    """A checkpoint like another: its folder is copied, the tree written anew, and the whole put in its place."""
    names = {"/".join(map(str, keys)): keys for keys in item.leaves}
    _check(leaves, {name: item.leaves[keys] for name, keys in names.items()})
    given = {names[name]: values for name, values in leaves.items()}
    kept = _restored(item, lambda keys: keys not in given)

    def value(keys: Keys, held: Any) -> Any:
        made = np.asarray(given[keys].read()) if keys in given else kept[keys]
        # what was a jax.Array is one again, and comes back as one
        return jnp.asarray(made) if getattr(held, "sharding", None) is not None else made

    _put(path, _mapped(item.tree, value), item)


def _put(path: Path, tree: Any, like: Item | None) -> None:
    """Save a tree of arrays as a checkpoint, beside what else `like` holds, and put it in its place as a whole."""
    orbax = _orbax()
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.absolute().parent))
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        new = aside / "new"
        inner = Path() if like is None else like.folder.relative_to(like.root)
        if like is not None and inner.parts:
            shutil.copytree(like.root, new, ignore=functools.partial(_only, like.folder))
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
