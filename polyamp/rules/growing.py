"""S28: which parameters stayed when a model was changed, so that their optimizer state is kept.

`polyamp.refresh` makes a `Growth`, and every backend asks it once. It knows no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp.errors import ModelError, StateError, nearest
from polyamp.rules.overrides import covers

Shape = tuple[int, ...]


def check_alive(retired: bool) -> None:
    """Refuse to use a state of which `refresh` has made another: both would train one model.

    Raises:
        StateError: it has.
    """
    if retired:
        raise StateError(
            "this state was refreshed, and the new one trains its model and optimizer. Go on with the state that "
            "polyamp.refresh(state) returned."
        )


class Known(NamedTuple):
    """A trained parameter.

    Attributes:
        key: what tells it from others as an object, such as `id(parameter)`.
        shape: its shape; that of its optimizer state, for a parameter of the old state.
    """

    key: int
    shape: Shape


class Growth(NamedTuple):
    """What the user said of a changed model.

    Attributes:
        fresh: globs (S5) of parameters, or of modules around them, whose optimizer state starts anew.
        keep: globs of those whose optimizer state is kept though they are other objects, or have other values.
    """

    fresh: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def stayed(
        self,
        before: Mapping[str, Known],
        now: Mapping[str, Known],
        same: Callable[[str, str], bool] | None = None,
    ) -> dict[str, str]:
        """Path now -> path before of every parameter that stayed.

        That is the same object with the same shape, wherever it lies now. Where models are values, it is also a
        parameter with the path, the shape and the values of one before.

        Args:
            before: the parameters that the old state trains, by path.
            now: those of the changed model that are trained.
            same: whether the parameter at the first path, before, has the values of that at the second, now; None
                where objects tell everything.

        Raises:
            ModelError: a glob that matches nothing; values of a parameter that neither say that it stayed nor that it
                was replaced.

        >>> old = {"body": Known(1, (2,)), "head": Known(2, (3,))}
        >>> Growth().stayed(old, {"body/base": Known(1, (2,)), "head": Known(9, (3,))})
        {'body/base': 'body'}
        >>> Growth(keep=("head",)).stayed(old, {"head": Known(9, (3,))})
        {'head': 'head'}
        """
        self._check_globs(now)
        by_key = {known.key: path for path, known in before.items()}
        found: dict[str, str] = {}
        for path, known in now.items():
            old = by_key.get(known.key)
            if _covered(self.fresh, path) or (old is not None and before[old].shape != known.shape):
                continue
            if old is not None:
                found[path] = old
            elif path in before and before[path].shape == known.shape:
                if _covered(self.keep, path) or (same is not None and same(path, path)):
                    found[path] = path
                elif same is not None:
                    raise _other_values(path)
        return found

    def _check_globs(self, paths: Iterable[str]) -> None:
        known = sorted(paths)
        for name, globs in (("fresh", self.fresh), ("keep", self.keep)):
            for glob in globs:
                if not any(covers(glob, path) for path in known):
                    close = nearest(glob, known) or known[:5]
                    raise ModelError(
                        f"{name}: the glob {glob!r} matches no trained parameter of the changed model. Nearest: "
                        f"{', '.join(map(repr, close))}."
                    )


def needs_model(what: str) -> ModelError:
    """The error of `refresh(state)` where a model is a value, so that the state cannot see a change."""
    return ModelError(
        f"refresh(state, model) needs the changed model: {what}. Take model = state.model, change it, and give it: "
        "state = polyamp.refresh(state, model)."
    )


def globs(name: str, value: Any) -> tuple[str, ...]:
    """An argument of `refresh` as globs.

    Raises:
        ModelError: it is none, nor a sequence of some.
    """
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not all(isinstance(glob, str) and glob for glob in found):
        raise ModelError(f"{name} must be a glob of parameter paths, or a list of them. Received: {name}={value!r}.")
    return tuple(found)


def _covered(globs: Sequence[str], path: str) -> bool:
    return any(covers(glob, path) for glob in globs)


def _other_values(path: str) -> ModelError:
    return ModelError(
        f"the changed model has other values at {path!r} than the state has trained. A model is a value here: change "
        "state.model, not the model that was given to init. If the parameter was replaced, say "
        f"fresh=[{path!r}]: its optimizer state starts anew. If its values were changed on purpose, say "
        f"keep=[{path!r}]: its optimizer state is kept."
    )
