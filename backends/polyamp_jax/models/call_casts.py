"""Argument casts and named scopes around each module's call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.errors import PolicyError
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax.arrays import cast_arguments


class CallCasts:
    """Wrapper around each module's call that casts its arguments or opens a named scope.

    In cast mode every module's floating arguments are cast to its own dtype, so that the layer after a float32 one is
    16-bit again. In autocast mode every module opens a scope named after its path. The interpreter assigns each
    operation to a module by these scopes (S5).

    Attributes:
        plan: the policy, resolved for the model.
        dtypes: cast mode: path of a module that owns parameters -> dtype of its floating inputs.
        scoped: whether scopes are opened.
        paths: autocast mode: the known paths of the model's modules.
    """

    def __init__(self, plan: ResolvedPolicy, dtypes: Mapping[str, str] | None = None, *, scoped: bool = False) -> None:
        self.plan = plan
        self.dtypes = dtypes or {}
        self.scoped = scoped
        self.paths: set[str] = set()
        self._open = [""]

    @property
    def active(self) -> bool:
        """Whether any call needs a cast or a scope. If False, no module is changed."""
        return self.scoped or bool(self.dtypes)

    def expect(self, paths: Iterable[str]) -> None:
        """Record the paths of modules that may be called, and of their parents, before the first call.

        A module inside a function that JAX has already traced is not called again.
        """
        for path in paths:
            segments = path.split("/") if path else []
            self.paths.update("/".join(segments[: n + 1]) for n in range(len(segments)))

    @contextlib.contextmanager
    def module(self, path: str, args: Any, kwargs: Any, explicit: Any) -> Iterator[tuple[Any, Any]]:
        """Wrap one call of a module and yield its arguments.

        Args:
            path: the module's path.
            args: positional arguments.
            kwargs: keyword arguments.
            explicit: the dtype that the module itself was built with, or None.

        Raises:
            PolicyError: an override contradicts the module's own dtype.
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
        """Open the named scopes that assign the enclosed operations to the module at `path`."""
        outer = self._open[-1]
        self.expect([path])
        if path == outer or not path:
            yield
            return
        # The scope is relative to the open module. It is absolute in two cases: the module is not inside the open one,
        # or this scope plus the scope that the library itself opens (haiku) would spell the path of a submodule.
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
        """Reject an override that contradicts the dtype that a module was built with. Raises `PolicyError`."""
        override = self.plan.at(path).named
        if explicit is not None and override is not None and jnp.dtype(explicit) != jnp.dtype(override):
            raise PolicyError(
                f"overrides give the module {path!r} the dtype {override}, but it was built with "
                f"dtype={jnp.dtype(explicit)}. Build it with dtype=None, or drop the override."
            )
