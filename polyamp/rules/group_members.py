"""Parameter groups of a recipe, resolved once against a model: the hyperparameters of every parameter (S27).

Backends call `resolve_group_members` at `init` and only read the result: they match no globs. Without groups, and with
a framework's own optimizer, one member applies to all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from polyamp.array_namespace import ArrayNamespace
from polyamp.errors import RecipeError, join_first
from polyamp.recipe import overrides, path_aliases
from polyamp.recipe.clip_limits import ClipLimits
from polyamp.recipe.groups import CLIP_FIELDS, RATE_FIELDS, Group
from polyamp.recipe.optimizer_spec import ParameterFacts
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.records import Record
from polyamp.rules.clip import ClipSet, GradientClip, clip_sets, gradient_clip
from polyamp.rules.parameter_kinds import ParameterLeaf, find_embeddings, paths_of_kind
from polyamp.schedules import ScaledSchedule

_HYPERPARAMETERS: Final = dict.fromkeys(RATE_FIELDS, "learning_rate") | dict.fromkeys(CLIP_FIELDS, "clip")
"""Two names of one hyperparameter -> what they set."""


class GroupClip(NamedTuple):
    """Limits that a group sets.

    Attributes:
        group: index of the group in the recipe's optimizer: its parameters are clipped together.
        norm, value: its `clip_norm` and `clip_value`.
    """

    group: int
    norm: float | None
    value: float | None


class GroupHyperparameters(NamedTuple):
    """One set of hyperparameters.

    Attributes:
        spec: all hyperparameters, as a spec without groups; a framework's own optimizer unchanged. Its learning rate is
            that of the recipe or the group, without the scale.
        scale: factor of the learning rate (`learning_rate_scale`).
        own_rate: whether the group sets the rate, so that it does not follow the recipe's.
        start: number of applied updates before the first update of the parameters (`trainable_after`).
        clip: the group's limits in place of the recipe's, or None.
    """

    spec: Any
    scale: float = 1.0
    own_rate: bool = False
    start: int = 0
    clip: GroupClip | None = None

    @property
    def learning_rate(self) -> Any:
        """The learning rate including the scale, a number or a schedule."""
        rate = self.spec.learning_rate
        if self.scale == 1.0:
            return rate
        return ScaledSchedule(rate, self.scale) if callable(rate) else rate * self.scale

    @property
    def whole(self) -> Any:
        """The spec with the scale in its learning rate; a framework's own optimizer unchanged."""
        return self.spec if self.scale == 1.0 else self.spec.replace(learning_rate=self.learning_rate)

    def clip_limits(self, limits: ClipLimits) -> tuple[int | None, ClipLimits]:
        """Return which group clips the parameters together, None for the recipe, and the limits, given the recipe's."""
        if self.clip is None:
            return None, limits
        group, norm, value = self.clip
        return group, ClipLimits(norm, value, 0.0 if norm is None else limits.eps)

    def rate(self, count: Any, xp: ArrayNamespace) -> Any:
        """Return the rate of the update after `count` applied ones, as a scalar of `count`'s framework (S13)."""
        rate = self.learning_rate
        return rate(count, xp) if callable(rate) else xp.asarray(rate, count * 1.0)


class GroupMembers(Record):
    """Hyperparameters of every parameter. Frozen and hashable.

    Args:
        distinct: the distinct sets of hyperparameters, in the order of first use.
        numbers: path -> index in `distinct`, in the parameters' order.

    Attributes:
        distinct, numbers: as given.
        order: the indices without the paths.
        starts: path -> number of applied updates before the parameter's first update, where it is not 0.
    """

    distinct: Sequence[GroupHyperparameters]
    numbers: Mapping[str, int]
    order: ClassVar[tuple[int, ...]]  # per instance, no field
    starts: ClassVar[Mapping[str, int]]  # per instance, no field

    def __post_init__(self) -> None:
        self._set_field("distinct", tuple(self.distinct))
        self._set_field("numbers", dict(self.numbers))
        self._set_field("order", tuple(self.numbers.values()))
        starts = {path: self.distinct[number].start for path, number in self.numbers.items()}
        self._set_field("starts", {path: start for path, start in starts.items() if start})

    def _key(self) -> tuple[Any, ...]:
        return self.distinct, tuple(self.numbers.items())

    @property
    def is_uniform(self) -> bool:
        """Whether all parameters have the same hyperparameters."""
        return len(self.distinct) == 1

    @property
    def is_ungrouped(self) -> bool:
        """Whether the only set is the recipe's optimizer, as without groups."""
        return self.is_uniform and self.distinct[0].scale == 1.0

    def of(self, path: str) -> GroupHyperparameters:
        """Return the hyperparameters of one parameter."""
        return self.distinct[self.numbers[path]]

    def each(self) -> list[GroupHyperparameters]:
        """Return the hyperparameters of every parameter, in the parameters' order."""
        return [self.distinct[number] for number in self.order]

    def common_clip(self, limits: ClipLimits) -> GradientClip:
        """Return how all gradients are clipped, given the recipe's limits."""
        sets = self.clip_sets(limits)
        return gradient_clip(sets[0].limits) if len(sets) == 1 else GradientClip(apart=True)

    def clip_sets(self, limits: ClipLimits) -> list[ClipSet]:
        """Return which parameters are clipped together, and how (S11); every parameter lies in one set.

        Args:
            limits: the recipe's, for the parameters without limits of a group.
        """
        own = [member.clip_limits(limits) for member in self.distinct]
        return clip_sets([own[number] for number in self.order])

    def __repr__(self) -> str:
        lines = [f"Members of {len(self.numbers)} parameters:"]
        for number, member in enumerate(self.distinct):
            paths = [path for path, own in self.numbers.items() if own == number]
            scale = "" if member.scale == 1.0 else f", learning rate times {member.scale:g}"
            start = f", trainable after {member.start} updates" if member.start else ""
            limits = {} if member.clip is None else member.clip._asdict()
            clips = [f", clip_{name} {limits[name]:g}" for name in ("norm", "value") if limits.get(name) is not None]
            lines.append(f"  {_whole_call(member.spec)}{scale}{start}{''.join(clips)}: {join_first(paths, 6)}")
        return "\n".join(lines)


def resolve_group_members(
    recipe: Recipe,
    paths: Iterable[str],
    leaves: Callable[[], Sequence[ParameterLeaf]],
    *,
    backend: str,
    modules: Callable[[], Iterable[str]] = tuple,
) -> GroupMembers:
    """Resolve the parameter groups of a recipe's optimizer for a model.

    Args:
        recipe: the recipe.
        paths: path of every trainable parameter, in the order of the state.
        leaves: returns descriptions of the same parameters, in the same order; called only if there are groups, or the
            optimizer's hyperparameters depend on the parameter.
        backend: backend whose spelling the paths have, for aliases.
        modules: returns the path of every module, because an alias may name one without trained parameters.

    Raises:
        RecipeError: a glob matches no parameter (lists the closest paths), a kind cannot be determined, a
            hyperparameter is impossible for a parameter, or no parameter trains from the first update.
        PolicyError: an alias does not match the model.

    Example:
        >>> import polyamp
        >>> optimizer = polyamp.sgd(0.1, weight_decay=0.5, groups=[polyamp.Group("**/bias", weight_decay=0.0)])
        >>> leaves = [ParameterLeaf("a/kernel", 2), ParameterLeaf("a/bias", 1)]
        >>> recipe = polyamp.Recipe(optimizer=optimizer)
        >>> found = resolve_group_members(recipe, ["a/kernel", "a/bias"], lambda: leaves, backend="jax")
        >>> found.of("a/bias").spec.weight_decay, found.of("a/kernel").spec.weight_decay
        (0.0, 0.5)
    """
    spec: Any = recipe.optimizer
    if not is_spec(spec) or not spec.needs_model:
        return GroupMembers([GroupHyperparameters(spec)], dict.fromkeys(paths, 0))
    told = leaves()
    paths, names = [leaf.path for leaf in told], _parameter_names(recipe, told, backend, modules)
    base = spec.replace(groups=())
    every = [name for own in names.values() for name in own]
    chosen: dict[str, dict[str, tuple[Any, str, Any]]] = {path: {} for path in paths}
    for number, group in enumerate(spec.groups):
        _check_globs_match(group, number, every)
        for path, rank in _select_parameters(group, told, names).items():
            for name, value in group.settings.items():
                one = _HYPERPARAMETERS.get(name, name)
                found = (*rank, number)
                if one not in chosen[path] or chosen[path][one][0] <= found:
                    chosen[path][one] = (found, name, value)
    distinct: dict[GroupHyperparameters, int] = {}
    numbers = {}
    embeddings = find_embeddings(told) if spec.depends_on_parameter else {}
    for leaf in told:
        facts = ParameterFacts(
            leaf.path, leaf.dimensions, embeddings.get(leaf.path), leaf.outputs_first, recipe.policy.compute
        )
        member = _group_hyperparameters(base, chosen[leaf.path], facts)
        numbers[leaf.path] = distinct.setdefault(member, len(distinct))
    members = GroupMembers(list(distinct), numbers)
    if len(members.starts) == len(paths):
        raise RecipeError(
            "trainable_after: at least one parameter trains from the first update, or no update would ever be applied "
            f"to any. Received: groups with which all {len(paths)} parameters wait, the first for "
            f"{min(members.starts.values())} updates. Leave trainable_after out for those that train first."
        )
    return members


def _group_hyperparameters(
    base: Any, chosen: Mapping[str, tuple[Any, str, Any]], facts: ParameterFacts
) -> GroupHyperparameters:
    settings = {name: value for _, name, value in chosen.values()}
    limits = {name: settings.pop(name) for name in CLIP_FIELDS if name in settings}
    clip = GroupClip(chosen["clip"][0][-1], limits.get("clip_norm"), limits.get("clip_value")) if limits else None
    scale, start = float(settings.pop("learning_rate_scale", 1.0)), settings.pop("trainable_after", 0)
    spec = base.replace(**settings) if settings else base
    own = spec.parameter_settings(facts)
    has_rate = "learning_rate" in settings
    changes = {name: value for name, value in own.items() if name != "learning_rate" or not has_rate}
    has_own = has_rate or "learning_rate" in own
    return GroupHyperparameters(spec.replace(**changes) if changes else spec, scale, has_own, start, clip)


def _parameter_names(
    recipe: Recipe, leaves: Sequence[ParameterLeaf], backend: str, modules: Callable[[], Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Return all paths and aliases of each parameter, by its path."""
    places = [leaf.called or (leaf.path,) for leaf in leaves]
    names = path_aliases.expand_aliases(recipe.policy.aliases, backend, places, modules)
    return {leaf.path: own for leaf, own in zip(leaves, names, strict=True)}


def _check_globs_match(group: Group, number: int, names: Sequence[str]) -> None:
    overrides.check_all_match(
        group.globs, names, argument=f"groups[{number}]", what="trainable parameter", error=RecipeError
    )


def _select_parameters(
    group: Group, leaves: Sequence[ParameterLeaf], names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[bool, int]]:
    """Return path -> precision of the match: (whether by kind, length of the longest glob)."""
    lengths = dict.fromkeys(names, 0)
    if group.globs:
        matching = {
            path: [len(glob) for glob in group.globs if any(overrides.covers(glob, name) for name in own)]
            for path, own in names.items()
        }
        lengths = {path: max(found) for path, found in matching.items() if found}
    if not group.kinds:
        return {path: (False, length) for path, length in lengths.items()}
    held = set().union(*(paths_of_kind(kind, leaves, lengths) for kind in group.kinds))
    return {path: (True, length) for path, length in lengths.items() if path in held}


def _whole_call(spec: Any) -> str:
    """Return the call that makes a spec with all hyperparameters, defaults too; the `repr` of another optimizer."""
    if not is_spec(spec):
        return repr(spec)
    given = ", ".join(f"{name}={value!r}" for name, value in spec.to_dict().items() if name != "groups")
    return f"{spec.called()}({given})"
