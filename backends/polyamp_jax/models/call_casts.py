"""Argument casts and named scopes around each module's call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.context_values import temporary_value
from polyamp.errors import PolicyError
from polyamp.recipe.float8 import head_paths
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax.arrays import cast_arguments
from polyamp_jax.models.call_hook import hook_calls
from polyamp_jax.models.module_path import ModulePath


class CallCasts:
    """Wrapper around each module's call that casts its arguments or opens a named scope.

    In cast mode every module's floating arguments are cast to its own dtype, so that the layer after a float32 one is
    16-bit again. In autocast mode every module opens a scope named after its path. The interpreter assigns each
    operation to a module by these scopes (S5).

    linen and haiku, which intercept the calls of modules, use `module`. nnx and equinox use `hook_module` before a call
    of the model, and `call_of_part` around it.

    Attributes:
        plan: the policy, resolved for the model.
        dtypes: cast mode: path of a module that owns parameters -> dtype of its floating inputs.
        has_scopes: whether scopes are opened.
        paths: autocast mode: the known paths of the model's modules.
    """

    def __init__(self, plan: ResolvedPolicy, dtypes: Mapping[str, str], *, has_scopes: bool) -> None:
        self.plan = plan
        self.dtypes = dtypes
        self.has_scopes = has_scopes
        self.paths: set[str] = set()
        self._open = [""]

    @property
    def is_active(self) -> bool:
        """Whether any call needs a cast or a scope. If False, no module is changed."""
        return self.has_scopes or bool(self.dtypes)

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
        self._check(path, explicit)
        if not self.has_scopes:
            yield self._cast(path, args, kwargs)
            return
        with self.scope(path):
            yield args, kwargs

    def hook_module(self, module: Any, path: str, *, is_pinned: bool = False, uncast: tuple[type, ...] = ()) -> None:
        """Cast the arguments of a module's calls, or open its scope, from now on.

        Args:
            module: a copy that polyamp made, never the user's own module. It is changed in place.
            path: its path.
            is_pinned: cast mode: whether the module runs in the dtype of its master parameters unless an override names
                it.
            uncast: cast mode: types of arguments that are never cast, such as running statistics. An override of a
                pinned module casts them too: the dtypes must agree.

        Raises:
            PolicyError: an override contradicts the dtype that the module was built with.
        """
        plan = self.plan
        if self.has_scopes:
            self.expect([path])
        if not callable(module):
            return
        if not self.has_scopes and is_pinned and plan.at(path).named is None and plan.compute != plan.param:
            hook_calls(module, _cast_call, plan.param, plan.compute, plan.float64, uncast)
            return
        if self.has_scopes or path in self.dtypes:
            self._check(path, getattr(module, "dtype", None))
        if self.has_scopes:
            hook_calls(module, _open_scope, path)
        elif path in self.dtypes:
            hook_calls(module, _cast_call, self.dtypes[path], None, plan.float64, () if is_pinned else uncast)

    @contextlib.contextmanager
    def call_of_part(self, route: ModulePath, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Wrap a call of a model, or of a part of it, whose modules `hook_module` changed. Yield its arguments.

        A method or property, which the hooks do not cover, is wrapped like a call of its module.
        """
        if route.is_method and not self.has_scopes:
            args, kwargs = self._cast(route.path, args, kwargs)
        path = route.path if route.is_method and self.has_scopes else ""
        with temporary_value(_active_casts, self), self.scope(path):
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

    def _cast(self, path: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a call's arguments in the dtype of the module at `path`; unchanged if it owns no parameters."""
        dtype = self.dtypes.get(path)
        if dtype is None:
            return args, kwargs
        made: tuple[Any, Any] = cast_arguments((args, kwargs), dtype, float64=self.plan.float64)
        return made

    def _check(self, path: str, explicit: Any) -> None:
        """Reject an override that contradicts the dtype that a module was built with. Raises `PolicyError`."""
        place = self.plan.at(path)
        override = None if place.named is None else place.dtype
        if self.plan.policy.float8 is not None and head_paths([path]):
            return
        if explicit is not None and override is not None and jnp.dtype(explicit) != jnp.dtype(override):
            raise PolicyError(
                f"overrides give the module {path!r} the dtype {override}, but it was built with "
                f"dtype={jnp.dtype(explicit)}. Build it with dtype=None, or drop the override."
            )


_active_casts: ContextVar[CallCasts | None] = ContextVar("polyamp_casts", default=None)


def _open_scope(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, path: str) -> Any:
    """Call a module in its named scope."""
    casts = _active_casts.get()
    # Outside the model's call, in a backward rule that is traced later, the scope is the full path from the root.
    with jax.named_scope(f"/{path}") if casts is None else casts.scope(path):
        return call(*args, **kwargs)


def _cast_call(
    call: Callable[..., Any],
    module: Any,
    args: Any,
    kwargs: Any,
    inputs: str,
    outputs: str | None,
    float64: bool,
    uncast: tuple[type, ...],
) -> Any:
    """Call a module with its arguments in the dtype `inputs`, and return its output in the dtype `outputs` if given."""

    def cast(tree: Any, dtype: str) -> Any:
        if not uncast:
            return cast_arguments(tree, dtype, float64=float64)
        parts, structure = jax.tree.flatten(tree, is_leaf=lambda part: isinstance(part, uncast))
        return jax.tree.unflatten(
            structure,
            [part if isinstance(part, uncast) else cast_arguments(part, dtype, float64=float64) for part in parts],
        )

    args, kwargs = cast((args, kwargs), inputs)
    result = call(*args, **kwargs)
    return result if outputs is None else cast(result, outputs)
