"""`Casts`: what an adapter does around each module's call. Made by `bound`, read by the adapters and `call_hook`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import PolicyError
from polyamp.rules.plan import Plan
from polyamp_jax.arrays import cast_arguments


class Casts:
    """What an adapter does around each module's call: cast its arguments, or name its scope.

    In cast mode every module's floating arguments are cast to its own dtype, so that the layer after a float32 one is
    16-bit again. In autocast mode every module opens a scope named after its path, by which the interpreter knows
    where an operation belongs (S5).

    Attributes:
        plan: the policy, resolved for the model.
        dtypes: cast mode: path of a module that owns parameters -> dtype of its floating inputs.
        scoped: whether scopes are opened.
        paths: autocast mode: the paths of the modules that the model has, as far as they are known.
    """

    def __init__(self, plan: Plan, dtypes: Mapping[str, str] | None = None, *, scoped: bool = False) -> None:
        self.plan = plan
        self.dtypes = dtypes or {}
        self.scoped = scoped
        self.paths: set[str] = set()
        self._open = [""]

    @property
    def active(self) -> bool:
        """False where nothing is to be done: then no module is touched."""
        return self.scoped or bool(self.dtypes)

    def expect(self, paths: Iterable[str]) -> None:
        """Note the paths of modules that may be called, and of those around them, before any of them is.

        A module inside a function that JAX has traced already is not called again.
        """
        for path in paths:
            segments = path.split("/") if path else []
            self.paths.update("/".join(segments[: n + 1]) for n in range(len(segments)))

    @contextlib.contextmanager
    def module(self, path: str, args: Any, kwargs: Any, explicit: Any) -> Iterator[tuple[Any, Any]]:
        """Around one call of a module; gives its arguments.

        Args:
            path: the module's path.
            args: positional arguments.
            kwargs: keyword arguments.
            explicit: the dtype that the module itself was built with, or None.

        Raises:
            PolicyError: an override and the module's own dtype contradict each other.
        """
        self.check(path, explicit)
        if not self.scoped:
            dtype = self.dtypes.get(path)
            if dtype is not None:
                args, kwargs = cast_arguments((args, kwargs), dtype, float64=self.plan.float64)
            yield args, kwargs
            return
        with self.scope(path):
            yield args, kwargs

    @contextlib.contextmanager
    def scope(self, path: str) -> Iterator[None]:
        """The scopes that say that what is inside belongs to the module at `path`."""
        outer = self._open[-1]
        self.expect([path])
        if path == outer or not path:
            yield
            return
        # relative to the module that is open, as a path is; absolute where the module belongs elsewhere, or where the
        # scope that the library opens itself (haiku) and this one together would name a module inside
        inside = not outer or path.startswith(f"{outer}/")
        doubled = f"{path}/{path.rpartition('/')[2]}" in self.paths
        self._open.append(path)
        try:
            with contextlib.ExitStack() as scopes:
                segments = path[len(outer) :].strip("/").split("/") if inside and not doubled else [f"/{path}"]
                for segment in segments:
                    scopes.enter_context(jax.named_scope(segment))
                yield
        finally:
            self._open.pop()

    def check(self, path: str, explicit: Any) -> None:
        """Refuse an override that contradicts the dtype that a module was built with. Raises `PolicyError`."""
        override = self.plan.at(path).named
        if explicit is not None and override is not None and jnp.dtype(explicit) != jnp.dtype(override):
            raise PolicyError(
                f"overrides give the module {path!r} the dtype {override}, but it was built with "
                f"dtype={jnp.dtype(explicit)}. Build it with dtype=None, or drop the override."
            )
