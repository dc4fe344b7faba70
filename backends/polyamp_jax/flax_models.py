"""Adapters for flax: linen's `(module, variables)` and nnx modules. Loaded by `models.adapt`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from flax import core, linen, nnx

from polyamp.errors import ModelError, UnsupportedError
from polyamp_jax.casting import calling, set_class
from polyamp_jax.models import Casts, Keys, Opaque, Parts, Running, owners


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
    """An nnx module: `nnx.Param` is trained, `nnx.RngState` moves on, every other variable runs with the step."""

    graphdef: Opaque
    stream: str | None = "default"
    pinned: frozenset[str] = frozenset()

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        model = self.join(params, running)
        if casts.active:
            for keys, module in _modules(model):
                path = "/".join(map(str, keys))
                casts.expect([path])
                set_class(module, path, casts)
        with calling(casts):
            output = model(*args, **kwargs)
        return output, _split(model)[2]

    def join(self, params: Any, running: Running) -> Any:
        return nnx.merge(self.graphdef.value, params, running.streams, running.statistics)

    def write_back(self, model: Any, running: Running) -> None:
        nnx.update(model, running.streams, running.statistics)

    def check_streams(self, names: Collection[str]) -> None:
        raise UnsupportedError("rngs= is for other libraries: an nnx module holds its own nnx.Rngs. Drop rngs=.")


def adapt_nnx(model: Any) -> Parts:
    """The parts of an nnx module."""
    graphdef, params, running = _split(model)
    return Parts(NnxAdapter(Opaque(graphdef)), params, running)


def _modules(model: Any) -> Any:
    """(keys, module) of the model and of every module in it, each once."""
    if hasattr(nnx, "iter_modules"):
        return nnx.iter_modules(model)
    return model.iter_modules()  # until flax 0.11, and deprecated later


def _split(model: Any) -> tuple[Any, Any, Running]:
    graphdef, params, streams, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    return graphdef, nnx.to_pure_dict(params), Running(nnx.to_pure_dict(rest), nnx.to_pure_dict(streams))
