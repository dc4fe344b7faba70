"""Adapters for flax: linen's `(module, variables)` and nnx modules. Loaded by `models.adapt`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flax import core, linen, nnx

from polyamp.errors import ModelError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.models.call_hook import calling, set_class
from polyamp_jax.models.parts import Keys, Opaque, Parts, Running, owners
from polyamp_jax.models.scopes import Casts


@dataclasses.dataclass(frozen=True)
class LinenAdapter:
    """`(linen_module, variables)`: every collection beside "params" is mutable and runs with the step."""

    module: Opaque
    stream: str | None = None
    pinned: frozenset[str] = frozenset()

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        statistics = running.statistics
        rngs = {**keys, **kwargs.pop("rngs", {})}
        module: Any = self.module.value
        casts.expect(owners(params))
        # linen's own scopes begin with the name of the root's class; polyamp's are the paths that overrides name
        named = linen.override_named_call(False) if casts.scoped else contextlib.nullcontext()
        with named, linen.intercept_methods(_interceptor(casts)):
            output, changed = module.apply(
                {"params": params, **statistics}, *args, rngs=rngs or None, mutable=sorted(statistics), **kwargs
            )
        return output, running._replace(statistics={**statistics, **core.unfreeze(changed)})

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        return owners(params)

    def join(self, params: Any, running: Running) -> Any:
        return self.module.value, {"params": params, **running.statistics}

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
    """An nnx module: `nnx.Param` is trained, `nnx.RngState` moves on, every other variable runs with the step.

    Streams given to `init` are passed as `rngs=`, unless the caller passes some.
    """

    graphdef: Opaque
    takes_rngs: bool = False
    stream: str | None = "default"
    pinned: frozenset[str] = frozenset()

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        model = self.join(params, running)
        if casts.active:
            for segments, module in compat.nnx_modules(model):
                path = "/".join(map(str, segments))
                casts.expect([path])
                set_class(module, path, casts)
        given = {"rngs": nnx.Rngs(**keys)} if keys and not _bound("rngs", model, args, kwargs) else {}
        with calling(casts):
            output = model(*args, **given, **kwargs)
        return output, _split(model)[2]._replace(draws=running.draws)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        inside = compat.nnx_modules(self.join(params, running))
        return [*owners(params), *("/".join(map(str, segments)) for segments, _ in inside)]

    def join(self, params: Any, running: Running) -> Any:
        return nnx.merge(self.graphdef.value, params, running.streams, running.statistics)

    def write_back(self, model: Any, running: Running) -> None:
        nnx.update(model, running.streams, running.statistics)

    def check_streams(self, names: Collection[str]) -> None:
        if not self.takes_rngs:
            raise UnsupportedError(
                "rngs= is passed on as the keyword argument rngs of the nnx module, whose __call__ takes none: it "
                "holds its own nnx.Rngs. Drop rngs=, or let __call__ take rngs."
            )


def adapt_nnx(model: Any) -> Parts:
    """The parts of an nnx module."""
    graphdef, params, running = _split(model)
    return Parts(NnxAdapter(Opaque(graphdef), _takes_rngs(model)), params, running)


def _takes_rngs(model: Any) -> bool:
    parameters = inspect.signature(type(model).__call__).parameters.values()
    return any(p.name == "rngs" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _bound(name: str, model: Any, args: Any, kwargs: Any) -> bool:
    """Whether the caller gives the argument, by position too."""
    given = inspect.signature(type(model).__call__).bind_partial(model, *args, **kwargs).arguments
    return name in given or name in kwargs


def _split(model: Any) -> tuple[Any, Any, Running]:
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    return graphdef, nnx.to_pure_dict(params), Running(nnx.to_pure_dict(rest), nnx.to_pure_dict(streams))
