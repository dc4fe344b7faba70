"""S28: parameters that survive a change of the model, and so keep their optimizer state. Knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.errors import ModelError, StateError, closest_words
from polyamp.recipe.overrides import covers

Shape = tuple[int, ...]


def check_not_refreshed(retired: bool) -> None:
    """Raise if `refresh` has replaced this state by another: both would train one model.

    Raises:
        StateError: the state was refreshed.
    """
    if retired:
        raise StateError(
            "this state was refreshed, and the new one trains its model and optimizer. Go on with the state that "
            "polyamp.refresh(state) returned."
        )


class KnownParameter(NamedTuple):
    """Trained parameter.

    Attributes:
        key: identity of the parameter object, such as `id(parameter)`.
        shape: its shape; for a parameter of the old state, that of its optimizer state.
    """

    key: int
    shape: Shape


class RefreshPlan(NamedTuple):
    """The user's globs for a changed model.

    Attributes:
        fresh: globs (S5) of parameters or modules whose optimizer state is reset.
        keep: globs of those that keep their optimizer state although the object or its values changed.
    """

    fresh: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def surviving_parameters(
        self,
        before: Mapping[str, KnownParameter],
        now: Mapping[str, KnownParameter],
        same: Callable[[str, str], bool] | None = None,
    ) -> dict[str, str]:
        """Return new path -> old path of every parameter that survives.

        A parameter survives if it is the same object with the same shape, at any path. Where models are values, it
        also survives if path, shape and values equal those of an old parameter.

        Args:
            before: the parameters that the old state trains, by path.
            now: the trained parameters of the changed model.
            same: whether the old parameter at the first path has the values of the new one at the second; None if
                object identity decides.

        Raises:
            ModelError: a glob matches nothing, or the values of a parameter show neither that it survived nor that
                it was replaced.

        >>> old = {"body": KnownParameter(1, (2,)), "head": KnownParameter(2, (3,))}
        >>> RefreshPlan().surviving_parameters(
        ...     old, {"body/base": KnownParameter(1, (2,)), "head": KnownParameter(9, (3,))}
        ... )
        {'body/base': 'body'}
        >>> RefreshPlan(keep=("head",)).surviving_parameters(old, {"head": KnownParameter(9, (3,))})
        {'head': 'head'}
        """
        self._check_globs(now)
        by_key = {known.key: path for path, known in before.items()}
        found: dict[str, str] = {}
        for path, known in now.items():
            old = by_key.get(known.key)
            if _is_covered(self.fresh, path) or (old is not None and before[old].shape != known.shape):
                continue
            if old is not None:
                found[path] = old
            elif path in before and before[path].shape == known.shape:
                if _is_covered(self.keep, path) or (same is not None and same(path, path)):
                    found[path] = path
                elif same is not None:
                    raise _changed_values_error(path)
        return found

    def _check_globs(self, paths: Iterable[str]) -> None:
        known = sorted(paths)
        for name, globs in (("fresh", self.fresh), ("keep", self.keep)):
            for glob in globs:
                if not any(covers(glob, path) for path in known):
                    close = closest_words(glob, known) or known[:5]
                    raise ModelError(
                        f"{name}: the glob {glob!r} matches no trained parameter of the changed model. Nearest: "
                        f"{', '.join(map(repr, close))}."
                    )


def missing_model_error(what: str) -> ModelError:
    """Return the error of `refresh(state)` without a model where models are values and the state cannot see changes."""
    return ModelError(
        f"refresh(state, model) needs the changed model: {what}. Take model = state.model, change it, and give it: "
        "state = polyamp.refresh(state, model)."
    )


def parse_globs(name: str, value: Any) -> tuple[str, ...]:
    """Parse an argument of `refresh` as globs.

    Raises:
        ModelError: it is neither a glob nor a sequence of globs.
    """
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(glob, str) and glob for glob in found):
        raise ModelError(f"{name} must be a glob of parameter paths, or a list of them. Received: {name}={value!r}.")
    return tuple(found)


def _is_covered(globs: Sequence[str], path: str) -> bool:
    return any(covers(glob, path) for glob in globs)


def _changed_values_error(path: str) -> ModelError:
    return ModelError(
        f"the changed model has other values at {path!r} than the state has trained. A model is a value here: change "
        "state.model, not the model that was given to init. If the parameter was replaced, say "
        f"fresh=[{path!r}]: its optimizer state starts anew. If its values were changed on purpose, say "
        f"keep=[{path!r}]: its optimizer state is kept."
    )
