"""S27: kinds of parameters, so that one mask such as "no decay on biases and norms" works for all frameworks.

The class of the owning module decides if a backend knows it. Otherwise the names of the parameter and its siblings do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from polyamp.errors import RecipeError

_NOT_NORMS: Final = ("SpectralNorm", "WeightNorm")
"""Classes with "Norm" in their names that wrap a layer with its own weight."""
_BIASES: Final = ("b", "bias", "biases", "offset", "shift")
_SCALES: Final = ("scale", "gamma")
_WEIGHTS: Final = ("w", "weight", "weights", "kernel", "kernels")
_KERNEL_LAYERS: Final = ("Linear", "Dense", "Conv", "Einsum")
"""Words in the names of classes with kernels, whatever the module is called: "patch_embed" may be one."""
_NORMS: Final = ("ln", "bn", "gn")


class ParameterLeaf(NamedTuple):
    """Trainable parameter, as described by a backend.

    Attributes:
        path: its name in the state and in checkpoints: module path and leaf name, `/`-separated.
        dimensions: number of axes.
        classes: names of the owning module's class and its bases; None if the framework keeps no modules (a plain
            function, variables of linen and haiku).
        called: every path that globs match, if that is not `path` alone: a shared parameter has several, and a
            framework may spell paths in two ways.
        outputs_first: whether a kernel's first axis is that of its outputs, as in torch, and not its last.
    """

    path: str
    dimensions: int
    classes: tuple[str, ...] | None = None
    called: tuple[str, ...] = ()
    outputs_first: bool = False


def class_names(owner: object) -> tuple[str, ...]:
    """Return `ParameterLeaf.classes` for an owning module.

    >>> class_names(True)
    ('bool', 'int', 'object')
    """
    return tuple(kind.__name__ for kind in type(owner).__mro__)


def find_embeddings(leaves: Sequence[ParameterLeaf]) -> dict[str, bool | None]:
    """Return by path whether each of a model's parameters is the table of an embedding; None if that cannot be told.

    >>> find_embeddings([ParameterLeaf(path, 2) for path in ("head/kernel", "table/embedding", "x")])
    {'head/kernel': False, 'table/embedding': True, 'x': None}
    """
    beside = _names_by_module(leaves)
    found: dict[str, bool | None] = {}
    for leaf in leaves:
        try:
            found[leaf.path] = _has_kind("embedding", leaf, beside)
        except RecipeError:
            found[leaf.path] = None
    return found


def paths_of_kind(kind: str, leaves: Sequence[ParameterLeaf], candidates: Iterable[str]) -> set[str]:
    """Return the paths among `candidates` whose parameters are of a kind.

    Args:
        kind: one of `polyamp.recipe.groups.KINDS`. "bias": added to the output of a layer or norm. "norm": all
            parameters of a normalization. "embedding": the table of an embedding. "vector": fewer than two axes.
        leaves: every parameter of the model.
        candidates: the paths to test.

    Raises:
        RecipeError: the kind cannot be determined; names the parameter and asks for globs.

    >>> leaves = [
    ...     ParameterLeaf("ln/scale", 1),
    ...     ParameterLeaf("ln/bias", 1),
    ...     ParameterLeaf("head/kernel", 2),
    ...     ParameterLeaf("head/bias", 1),
    ... ]
    >>> sorted(paths_of_kind("norm", leaves, [leaf.path for leaf in leaves]))
    ['ln/bias', 'ln/scale']
    """
    asked, beside = set(candidates), _names_by_module(leaves)
    return {leaf.path for leaf in leaves if leaf.path in asked and _has_kind(kind, leaf, beside)}


def _names_by_module(leaves: Sequence[ParameterLeaf]) -> dict[str, list[str]]:
    beside: dict[str, list[str]] = {}
    for leaf in leaves:
        module, _, name = leaf.path.rpartition("/")
        beside.setdefault(module, []).append(name.lower())
    return beside


def _has_kind(kind: str, leaf: ParameterLeaf, beside: Mapping[str, Sequence[str]]) -> bool:
    if kind == "vector":
        return leaf.dimensions < 2
    module, _, name = leaf.path.rpartition("/")
    name = name.lower()
    norm = _norm_by_name(module, name, beside[module]) if leaf.classes is None else _norm_by_class(leaf.classes)
    if norm is None:
        raise RecipeError(
            f"groups: which kind of parameter {leaf.path!r} is (asked for: {kind!r}) cannot be told from its name, and "
            "its framework keeps no module class. Select by globs, such as polyamp.Group('**/b*', weight_decay=0.0)."
        )
    if kind == "norm":
        return norm
    if kind == "bias":
        thin = leaf.classes is None or leaf.dimensions < 2 or len(name) > 1  # "B" with two axes is a factor
        return (_is_bias(name) and thin) or (norm and name == "beta")
    classes = leaf.classes or ()
    by_class = any("Embed" in own for own in classes)
    by_module = "embed" in module.rpartition("/")[2].lower() and not any(
        word in own for own in classes for word in _KERNEL_LAYERS
    )
    return not norm and not _is_bias(name) and ("embed" in name or by_class or by_module)


def _norm_by_class(classes: Sequence[str]) -> bool:
    return any(_is_norm(name) and not any(other in name for other in _NOT_NORMS) for name in classes)


def _is_norm(name: str) -> bool:
    """Whether "Norm" or "Normalization" is a word of a class name.

    >>> _is_norm("LayerNorm2d"), _is_norm("BatchNormalization"), _is_norm("NormalizedLinear")
    (True, True, False)
    """
    return any(not rest[:1].islower() or rest.startswith(("alization", "alisation")) for rest in name.split("Norm")[1:])


def _norm_by_name(module: str, name: str, siblings: Sequence[str]) -> bool | None:
    """Whether the owning module is a normalization, judged by both names; None if they do not decide."""
    own = module.rpartition("/")[2].lower()
    if "kernel" in siblings:
        return False
    if "norm" in own or any(_name_without_number(part) in _NORMS for part in own.split("_")):
        return True
    if any(sibling in _SCALES for sibling in siblings) and not any(map(_is_weight, siblings)):
        return True
    return False if _is_weight(name) or _is_bias(name) or "embed" in name or "embed" in own else None


def _is_weight(name: str) -> bool:
    return any(_name_without_number(part) in _WEIGHTS for part in name.split("_"))


def _is_bias(name: str) -> bool:
    parts = name.split("_")
    return _name_without_number(parts[0]) in _BIASES or "bias" in parts


def _name_without_number(name: str) -> str:
    """Return a name without its trailing number: "w1" is "w"."""
    return name.rstrip("0123456789")
