"""The parameter groups of a recipe, resolved against a model once: which parameter has which hyperparameters (S27).

Backends make `Members` at `init`, by `members`, and read them: none of them matches a glob. Without groups, and with a
framework's own optimizer, there is one member that holds for all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.arrays import ArrayNamespace
from polyamp.errors import RecipeError
from polyamp.recipe.groups import RATES, Group
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.rules import aliases, overrides
from polyamp.rules.kinds import Leaf, of_kind
from polyamp.schedules import Times


class Member(NamedTuple):
    """One set of hyperparameters.

    Attributes:
        spec: all of them, as a spec without groups; a framework's own optimizer as it is. Its learning rate is the
            recipe's or the group's own, without the scale.
        scale: what the rate is multiplied by (`learning_rate_scale`).
        own_rate: whether the rate is the group's own, so that it does not follow the recipe's.
    """

    spec: Any
    scale: float = 1.0
    own_rate: bool = False

    @property
    def learning_rate(self) -> Any:
        """A number or a schedule, the scale included."""
        rate = self.spec.learning_rate
        if self.scale == 1.0:
            return rate
        return Times(rate, self.scale) if callable(rate) else rate * self.scale

    @property
    def whole(self) -> Any:
        """The spec with the scale in its learning rate; a framework's own optimizer as it is."""
        return self.spec if self.scale == 1.0 else self.spec.replace(learning_rate=self.learning_rate)

    def rate(self, count: Any, xp: ArrayNamespace) -> Any:
        """The rate of the update that follows `count` applied ones, as a scalar of `count`'s framework (S13)."""
        rate = self.learning_rate
        return rate(count, xp) if callable(rate) else xp.asarray(rate, count * 1.0)


class Members:
    """Which parameter has which hyperparameters. Frozen and hashable.

    Args:
        distinct: the sets of hyperparameters that occur, in the order in which the parameters need them.
        numbers: path -> index in `distinct`, in the parameters' order.

    Attributes:
        distinct, numbers: as given.
        order: the indices alone.
    """

    __slots__ = ("_key", "distinct", "numbers", "order")

    distinct: tuple[Member, ...]
    numbers: Mapping[str, int]
    order: tuple[int, ...]

    def __init__(self, distinct: Sequence[Member], numbers: Mapping[str, int]) -> None:
        self.distinct = tuple(distinct)
        self.numbers = dict(numbers)
        self.order = tuple(self.numbers.values())
        self._key = (self.distinct, tuple(self.numbers.items()))

    @property
    def alike(self) -> bool:
        """Whether all parameters have the same hyperparameters."""
        return len(self.distinct) == 1

    @property
    def plain(self) -> bool:
        """Whether they are just the recipe's optimizer, as without groups."""
        return self.alike and self.distinct[0].scale == 1.0

    def of(self, path: str) -> Member:
        """The hyperparameters of one parameter."""
        return self.distinct[self.numbers[path]]

    def each(self) -> list[Member]:
        """Those of every parameter, in the parameters' order."""
        return [self.distinct[number] for number in self.order]

    def __eq__(self, other: object) -> bool:
        return self is other or self._key == other._key if isinstance(other, Members) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.distinct, self.order))

    def __reduce__(self) -> tuple[Any, ...]:
        return Members, (self.distinct, self.numbers)

    def __repr__(self) -> str:
        lines = [f"Members of {len(self.numbers)} parameters:"]
        for number, member in enumerate(self.distinct):
            paths = [path for path, own in self.numbers.items() if own == number]
            scale = "" if member.scale == 1.0 else f", learning rate times {member.scale:g}"
            shown = ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
            lines.append(f"  {member.spec!r}{scale}: {shown}")
        return "\n".join(lines)


def members(
    recipe: Recipe,
    paths: Iterable[str],
    leaves: Callable[[], Sequence[Leaf]],
    *,
    backend: str,
    modules: Callable[[], Iterable[str]] = tuple,
) -> Members:
    """The members of a recipe's optimizer for a model.

    Args:
        recipe: the recipe.
        paths: of every trainable parameter, in the order of the state.
        leaves: tells more of the same parameters, in the same order; called where there are groups.
        backend: whose spelling the paths have, for aliases.
        modules: tells the path of every module of the model: an alias may be that of one without trained parameters.

    Raises:
        RecipeError: a glob matches no parameter, with the nearest paths; or a kind that nothing tells.
        PolicyError: an alias that does not fit the model.

    Example:
        >>> import polyamp
        >>> optimizer = polyamp.sgd(0.1, weight_decay=0.5, groups=[polyamp.Group("**/bias", weight_decay=0.0)])
        >>> leaves = [Leaf("a/kernel", 2), Leaf("a/bias", 1)]
        >>> recipe = polyamp.Recipe(optimizer=optimizer)
        >>> found = members(recipe, ["a/kernel", "a/bias"], lambda: leaves, backend="jax")
        >>> found.of("a/bias").spec.weight_decay, found.of("a/kernel").spec.weight_decay
        (0.0, 0.5)
    """
    spec: Any = recipe.optimizer
    if not is_spec(spec) or not spec.groups:
        return Members([Member(spec)], dict.fromkeys(paths, 0))
    told = leaves()
    paths, names = [leaf.path for leaf in told], _names(recipe, told, backend, modules)
    base = spec.replace(groups=())
    every = [name for own in names.values() for name in own]
    chosen: dict[str, dict[str, tuple[Any, str, Any]]] = {path: {} for path in paths}
    for number, group in enumerate(spec.groups):
        _check_match(group, number, every)
        for path, rank in _selected(group, told, names).items():
            for name, value in group.settings.items():
                one = "learning_rate" if name in RATES else name  # the rate is one hyperparameter, said in two ways
                found = (*rank, number)
                if one not in chosen[path] or chosen[path][one][0] <= found:
                    chosen[path][one] = (found, name, value)
    distinct: dict[Member, int] = {}
    numbers = {path: distinct.setdefault(_member(base, chosen[path]), len(distinct)) for path in paths}
    return Members(list(distinct), numbers)


def _member(base: Any, chosen: Mapping[str, tuple[Any, str, Any]]) -> Member:
    settings = {name: value for _, name, value in chosen.values()}
    scale = float(settings.pop("learning_rate_scale", 1.0))
    return Member(base.replace(**settings) if settings else base, scale, "learning_rate" in settings)


def _names(
    recipe: Recipe, leaves: Sequence[Leaf], backend: str, modules: Callable[[], Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Every path and alias of each parameter, by its path."""
    places = [leaf.called or (leaf.path,) for leaf in leaves]
    names = aliases.named(recipe.policy.aliases, backend, places, modules)
    return {leaf.path: own for leaf, own in zip(leaves, names, strict=True)}


def _check_match(group: Group, number: int, names: Sequence[str]) -> None:
    overrides.check_all_match(
        group.globs, names, argument=f"groups[{number}]", what="trainable parameter", error=RecipeError
    )


def _selected(group: Group, leaves: Sequence[Leaf], names: Mapping[str, Sequence[str]]) -> dict[str, tuple[bool, int]]:
    """Path -> how precisely the group selects it: whether by kind, and the length of the longest glob."""
    lengths = dict.fromkeys(names, 0)
    if group.globs:
        matching = {
            path: [len(glob) for glob in group.globs if any(overrides.covers(glob, name) for name in own)]
            for path, own in names.items()
        }
        lengths = {path: max(found) for path, found in matching.items() if found}
    if not group.kinds:
        return {path: (False, length) for path, length in lengths.items()}
    held = set().union(*(of_kind(kind, leaves, lengths) for kind in group.kinds))
    return {path: (True, length) for path, length in lengths.items() if path in held}
