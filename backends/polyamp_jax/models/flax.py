"""Adapters for flax: linen's `(module, variables)` and nnx modules. Loaded by `models.adapt`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import jax
from flax import core, linen, nnx

from polyamp.errors import ModelError, TraceError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.models.call_hook import calling, set_class
from polyamp_jax.models.parameter_writes import selected, writes
from polyamp_jax.models.parts import Keys, Opaque, Parts, Running, inside, owners
from polyamp_jax.models.routes import Route, accepts, given, narrowed
from polyamp_jax.models.scopes import Casts


@dataclasses.dataclass(frozen=True)
class LinenAdapter:
    """`(linen_module, variables)`: every collection beside "params" is mutable and runs with the step."""

    static: Opaque
    stream: str | None = None
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = False
    module: ClassVar[type | tuple[type, ...]] = linen.Module

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        statistics = running.statistics
        rngs = {**keys, **kwargs.pop("rngs", {})}
        module: Any = self.static.value
        if "mutable" in kwargs and not route.steps:
            raise UnsupportedError(
                "mutable= of linen's apply is the step's: every collection of the model but 'params' is mutable, and "
                "what a call writes there moves with the step. A forward pass cannot write to 'params'; what it keeps "
                f"belongs in a collection of its own, made in module.init. Leave mutable out. Received: "
                f"mutable={kwargs['mutable']!r}."
            )
        if route.steps:  # its own keyword arguments, whatever `apply` has of the same name
            named_arguments = kwargs
            kwargs = {"method": lambda root, *args: route.function(root)(*args, **named_arguments)}
        casts.expect(owners(params))
        # linen's own scopes begin with the name of the root's class; polyamp's are the paths that overrides name
        named = linen.override_named_call(False) if casts.scoped else contextlib.nullcontext()
        with named, linen.intercept_methods(_interceptor(casts)):
            output, changed = module.apply(
                {"params": params, **statistics}, *args, rngs=rngs or None, mutable=sorted(statistics), **kwargs
            )
        return output, running._replace(statistics={**statistics, **core.unfreeze(changed)})

    def view(self, params: Any, running: Running) -> Any:
        return self.static.value.bind({"params": params, **running.statistics})

    def written(self, view: Any, params: Any, running: Running) -> Running:
        return running

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return inside(params, part.path)

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        return owners(params)

    def join(self, params: Any, running: Running) -> Any:
        return self.static.value, {"params": params, **running.statistics}

    def write_back(self, model: Any, running: Running) -> None:
        """Nothing: linen modules hold no arrays."""

    def check_streams(self, names: Collection[str]) -> None:
        """linen's streams have names of the module's choosing."""


def adapt_linen(module: Any, variables: Any) -> Parts:
    """The parts of a linen module with its variables."""
    if not isinstance(variables, Mapping) or (variables and "params" not in variables):
        raise ModelError(
            "pass the model as (linen_module, variables): variables is the whole result of module.init(...), with its "
            f"'params' collection. Received: {sorted(variables) if isinstance(variables, Mapping) else variables!r}."
        )
    collections = dict(core.unfreeze(variables))
    params = collections.pop("params", {})
    return Parts(LinenAdapter(Opaque(module)), params, Running(collections, ()))


def _interceptor(casts: Casts) -> Any:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not casts.active or context.method_name == "setup" or context.module.scope is None:
            return call(*args, **kwargs)
        path = "/".join(context.module.path)
        with casts.module(path, args, kwargs, getattr(context.module, "dtype", None)) as (args, kwargs):
            return call(*args, **kwargs)

    return intercept


@dataclasses.dataclass(frozen=True)
class NnxAdapter:
    """An nnx module: `nnx.Param` is trained, `nnx.RngState` moves on, every other variable runs with the step, and so
    does what is written to an `nnx.Param` (S12).

    Streams given to `init` are passed as `rngs=`, unless the caller passes some.
    """

    graphdef: Opaque
    takes_rngs: bool = False
    stream: str | None = "default"
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = True
    module: ClassVar[type | tuple[type, ...]] = nnx.Module

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        model = self.join(params, running)
        if casts.active:
            for segments, module in compat.nnx_modules(model):
                path = "/".join(map(str, segments))
                casts.expect([path])
                set_class(module, path, casts)
        function = route.function(model)
        if keys and accepts(function, "rngs") and not given(function, "rngs", args, kwargs):
            kwargs = {**kwargs, "rngs": nnx.Rngs(**keys)}
        args, kwargs = narrowed(route, casts, args, kwargs)
        before = nnx.graphdef(model) if route.is_method else None
        with calling(casts), casts.scope(route.path if route.is_method and casts.scoped else ""):
            output = function(*args, **kwargs)
        after, now, changed = _split(model)
        if before is not None and before != after:
            raise TraceError(
                f"{route}(...) changes what the model is made of, such as a setting of its layers, and not only the "
                "arrays in it. loss_fn works on a copy that lives for one call, so that the change would be lost. "
                "Make it before polyamp.init."
            )
        return output, changed._replace(draws=running.draws, written=writes(params, now))

    def view(self, params: Any, running: Running) -> Any:
        return self.join(params, running)

    def written(self, view: Any, params: Any, running: Running) -> Running:
        _, now, changed = _split(view)
        changed = changed._replace(draws=running.draws, written=writes(params, now))
        same = zip(jax.tree.leaves(changed), jax.tree.leaves(running._replace(written=None)), strict=False)
        return running if changed.written is None and all(a is b for a, b in same) else changed

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        """Of a part as nnx finds them in it: a shared one lies in all of them under the path of one place alone."""
        return nnx.to_pure_dict(self.tree(part, route, params, running)) if route.steps else params

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return nnx.state(route.walked(self.join(params, running)), nnx.Param)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        inside = compat.nnx_modules(self.join(params, running))
        return [*owners(params), *("/".join(map(str, segments)) for segments, _ in inside)]

    def join(self, params: Any, running: Running) -> Any:
        return nnx.merge(self.graphdef.value, params, running.streams, running.statistics)

    def write_back(self, model: Any, running: Running) -> None:
        nnx.update(model, running.streams, running.statistics)
        if running.written:
            nnx.update(model, selected(_split(model)[1], running.written))

    def check_streams(self, names: Collection[str]) -> None:
        if not self.takes_rngs:
            raise UnsupportedError(
                "rngs= is passed on as the keyword argument rngs of the nnx module, whose __call__ takes none, and no "
                "other method does: it holds its own nnx.Rngs. Drop rngs=, or let __call__ take rngs."
            )


def adapt_nnx(model: Any) -> Parts:
    """The parts of an nnx module."""
    graphdef, params, running = _split(model)
    return Parts(NnxAdapter(Opaque(graphdef), _takes_rngs(model)), params, running)


def _takes_rngs(model: Any) -> bool:
    """Whether a method of the user's, `__call__` or another, takes random streams."""
    methods = [
        function
        for kind in type(model).__mro__
        if kind not in nnx.Module.__mro__
        for name, function in vars(kind).items()
        if name != "__init__" and inspect.isfunction(function)
    ]
    return any(accepts(method, "rngs") for method in methods)


def _split(model: Any) -> tuple[Any, Any, Running]:
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    return graphdef, nnx.to_pure_dict(params), Running(nnx.to_pure_dict(rest), nnx.to_pure_dict(streams))
