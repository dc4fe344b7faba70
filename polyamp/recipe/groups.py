"""`Group`: parameters, selected by path or kind, with their own optimizer hyperparameters (S27).

A spec stores groups in its field `groups`; `polyamp.rules.group_members` resolves them against a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from polyamp.errors import RecipeError, did_you_mean
from polyamp.recipe.clip_limits import ClipLimits, check_clip_limits
from polyamp.recipe.overrides import check_glob
from polyamp.records import Record
from polyamp.schedules import Schedule

KINDS: Final = ("bias", "norm", "embedding", "vector")
"""Kinds of parameters; `polyamp.rules.parameter_kinds` determines them."""
RATE_FIELDS: Final = ("learning_rate", "learning_rate_scale")
CLIP_FIELDS: Final = ("clip_norm", "clip_value")
_SELECTORS: Final = ("paths", "kind")
_NOT_OF_THE_SPEC: Final = ("learning_rate_scale", "trainable_after", *CLIP_FIELDS)


class Group(Record):
    """Hyperparameters for some of a model's parameters, in place of those of the recipe's optimizer (S27).

    Args:
        paths: one glob or several over `/`-separated parameter paths, as in overrides: `*` stays inside one segment,
            `**` crosses segments, and a glob that matches a module covers its parameters. A parameter's path is its
            module's path and its own name, as in checkpoints.
        kind: one kind or several: "bias", "norm" (all parameters of a normalization), "embedding", "vector" (fewer
            than two axes). With `paths` too, both must match.
        learning_rate: a number or a schedule, in place of the optimizer's.
        learning_rate_scale: factor of the optimizer's rate or schedule; excludes `learning_rate`.
        weight_decay, betas, eps, momentum, nesterov, alpha, lr_decay, initial_accumulator_value, method: as in the
            optimizer. A value that changes which arrays the optimizer keeps is an error.
        trainable_after: number of applied updates of the state before the first update of these parameters. Until then
            they count as unused (S23): no update, no decay, and no part in the norm and the finite flag. 0, the
            default, is to train from the start. It is said here instead of freezing the parameters in the framework.
        clip_norm: maximum L2 norm of the unscaled gradients of this group's parameters together (S11). The recipe's
            limit is then that of the other parameters, by their own norm. `clip_eps` is the recipe's.
        clip_value: maximum magnitude of each element of their gradients. Excludes `clip_norm`.

    If several groups set one hyperparameter of a parameter, the first of these rules decides: a group with a kind
    precedes one without; the longest glob wins (S5); the later group wins. Each hyperparameter is decided separately,
    so a parameter may take its rate from one group and its decay from another.

    Raises:
        RecipeError: no selection, no setting, both rates, a value out of range, or an unknown name.

    Example:
        >>> import polyamp
        >>> optimizer = polyamp.adamw(
        ...     1e-3,
        ...     weight_decay=0.1,
        ...     groups=[polyamp.Group("**/bias", weight_decay=0.0), polyamp.Group("encoder/**", learning_rate=1e-4)],
        ... )
        >>> optimizer.groups[0]
        Group(paths=('**/bias',), weight_decay=0.0)
    """

    word: ClassVar[str] = "group"

    paths: str | Sequence[str] = ()
    kind: str | Sequence[str] | None = None
    learning_rate: float | Schedule | None = None
    learning_rate_scale: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    alpha: float | None = None
    lr_decay: float | None = None
    initial_accumulator_value: float | None = None
    method: str | None = None
    trainable_after: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else self.paths
        if not isinstance(paths, list | tuple):
            raise RecipeError(f"paths must be a glob or several, such as '**/bias'. Received: paths={self.paths!r}.")
        for glob in paths:
            check_glob(glob, argument="group: each of its paths", error=RecipeError)
        self._set_field("paths", tuple(paths))
        kinds = (self.kind,) if isinstance(self.kind, str) else self.kind
        if kinds is not None:
            if not isinstance(kinds, list | tuple) or not kinds or not all(kind in KINDS for kind in kinds):
                close = did_you_mean(kinds[0], KINDS) if len(kinds or ()) == 1 and isinstance(kinds[0], str) else ""
                raise RecipeError(f"kind must be one of {KINDS}, or several. Received: kind={self.kind!r}.{close}")
            self._set_field("kind", kinds[0] if len(kinds) == 1 else tuple(kinds))
        if not self.paths and self.kind is None:
            raise RecipeError("a group needs paths (globs over parameter paths) or a kind. Received: neither.")
        if not self.settings:
            raise RecipeError(f"a group sets at least one hyperparameter, such as weight_decay=0.0. Received: {self}.")
        if all(getattr(self, name) is not None for name in RATE_FIELDS):
            raise RecipeError(
                "a group has learning_rate (a rate of its own) or learning_rate_scale (times the optimizer's), not "
                f"both. Received: {self}."
            )
        scale = self.learning_rate_scale
        if scale is not None and (
            isinstance(scale, bool) or not isinstance(scale, int | float) or not 0.0 <= scale < float("inf")
        ):
            raise RecipeError(
                f"learning_rate_scale must be a finite number of at least 0. Received: learning_rate_scale={scale!r}."
            )
        check_clip_limits(ClipLimits(self.clip_norm, self.clip_value))
        start: Any = self.trainable_after
        if start is not None and (isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < 2**31):
            raise RecipeError(
                "trainable_after must be a number of applied updates: an int of at least 0 and below 2**31. Received: "
                f"trainable_after={start!r}."
            )

    @property
    def globs(self) -> tuple[str, ...]:
        """`paths`, always a tuple."""
        return tuple(self.paths)

    @property
    def kinds(self) -> tuple[str, ...]:
        """`kind` as a tuple; empty if there is none."""
        return () if self.kind is None else (self.kind,) if isinstance(self.kind, str) else tuple(self.kind)

    @property
    def settings(self) -> dict[str, Any]:
        """The hyperparameters that the group sets, by name."""
        named = ((name, getattr(self, name)) for name in self.field_names if name not in _SELECTORS)
        return {name: value for name, value in named if value is not None}


def no_decay(*kinds: str) -> list[Group]:
    """Return groups without weight decay for these kinds of parameters, for `groups=`.

    Args:
        *kinds: "bias", "norm", "embedding" or "vector" (fewer than two axes, as in nanoGPT).

    Raises:
        RecipeError: no kind, or an unknown one.

    >>> from polyamp import adamw
    >>> adamw(1e-3, weight_decay=0.1, groups=no_decay("bias", "norm")).groups
    (Group(kind=('bias', 'norm'), weight_decay=0.0),)
    """
    if not kinds:
        raise RecipeError(f"no_decay() needs the kinds that are not decayed, of {KINDS}. Received: none.")
    if len(kinds) == 1 and isinstance(kinds[0], list | tuple):
        words = ", ".join(f'"{kind}"' for kind in kinds[0])
        raise RecipeError(f"no_decay() takes each kind by itself. Received: {kinds[0]!r}. Write no_decay({words}).")
    return [Group(kind=kinds, weight_decay=0.0)]


def check_groups(spec: Any, groups: Any) -> tuple[Group, ...]:
    """Check the groups of a spec and return them as a tuple.

    Raises:
        RecipeError: the value is no list of groups, or a group sets a hyperparameter that the spec does not have, that
            groups cannot set, or that changes which arrays the optimizer keeps.
    """
    if isinstance(groups, Group) or not isinstance(groups, list | tuple) or not all(map(_is_group, groups)):
        nested = isinstance(groups, list | tuple) and any(isinstance(item, list | tuple) for item in groups)
        raise RecipeError(
            "groups must be a list of polyamp.Group, such as [polyamp.Group('**/bias', weight_decay=0.0)]. Received: "
            f"groups={groups!r}."
            + (" A list in a list: no_decay() gives one itself, groups=no_decay(...) + [...]." if nested else "")
        )
    own = [name for name in spec.field_names if name != "groups"]
    plain = {name: getattr(spec, name) for name in own}
    for number, group in enumerate(groups):
        where = f"groups[{number}] ({', '.join(group.globs + group.kinds)})"
        settings = {name: value for name, value in group.settings.items() if name not in _NOT_OF_THE_SPEC}
        for name in settings:
            if name not in own:
                raise RecipeError(f"{where}: {spec.tag} has {', '.join(own)}. Received: {name}={settings[name]!r}.")
        try:
            changed = type(spec)(**{**plain, **settings})
        except RecipeError as error:
            raise RecipeError(f"{where}: {error}") from error
        if changed.slots != spec.slots:
            raise RecipeError(
                f"{where}: a group cannot change which arrays the optimizer keeps. Received: momentum="
                f"{group.momentum!r}, with which {spec.tag} keeps {', '.join(changed.slots) or 'none'} instead of "
                f"{', '.join(spec.slots) or 'none'}."
            )
    return tuple(groups)


def _is_group(value: Any) -> bool:
    return isinstance(value, Group)
