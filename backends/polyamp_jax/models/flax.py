"""Adapters for flax: linen's `(module, variables)` and nnx modules. Loaded by `models.adapt`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from flax import core, linen, nnx
from flax.core import scope

from polyamp.errors import ModelError, TraceError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.models.bound_nnx import bind, share
from polyamp_jax.models.call_hook import calling, native_class, set_class
from polyamp_jax.models.nnx_pass import NnxPass, known_paths, merge, split, without_intermediates
from polyamp_jax.models.parameter_writes import writes
from polyamp_jax.models.parts import Collected, Keys, Opaque, Parts, Running, inside, owners
from polyamp_jax.models.routes import Route, accepts, given, narrowed
from polyamp_jax.models.scopes import Casts


@dataclasses.dataclass(frozen=True)
class LinenAdapter:
    """`(linen_module, variables)`: every collection beside "params" is mutable and runs with the step.

    `mutable=` of a call adds collections, as it does for `apply`: they are of that call alone.
    """

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
        asked = False if route.steps else kwargs.pop("mutable", False)
        module: Any = self.static.value
        if route.steps:  # its own keyword arguments, whatever `apply` has of the same name
            named_arguments = kwargs
            kwargs = {"method": lambda root, *args: route.function(root)(*args, **named_arguments)}
        casts.expect(owners(params))
        mutable = scope.union_filters(sorted(statistics), _collections(asked))
        # linen's own scopes begin with the name of the root's class; polyamp's are the paths that overrides name
        named = linen.override_named_call(False) if casts.scoped else contextlib.nullcontext()
        with named, linen.intercept_methods(_interceptor(casts)):
            output, changed = module.apply(
                {"params": params, **statistics}, *args, rngs=rngs or None, mutable=mutable, **kwargs
            )
        changed = dict(core.unfreeze(changed))
        kept, collected = collections_of(changed, statistics)
        if asked is not False:
            output = (
                output,
                {name: collected.get(name, changed[name]) for name in changed if scope.in_filter(asked, name)},
            )
        return output, running._replace(statistics=Collected({**statistics, **kept}, collected))

    def view(self, params: Any, running: Running) -> Any:
        return self.static.value.bind({"params": params, **running.statistics})

    def bound(self, engine: Any) -> Any:
        return None

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return inside(params, part.path)

    def state_of(self, running: Running) -> Any:
        return None

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return self.params_of(part, route, params, running)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        return owners(params)

    def join(self, params: Any, running: Running) -> Any:
        return self.static.value, {"params": params, **running.statistics}

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


def _collections(asked: Any) -> Any:
    """What `mutable=` of a call names, less the parameters.

    Raises:
        TraceError: it names them.
    """
    if asked is not True and scope.in_filter(asked, "params") and not isinstance(asked, core.DenyList):
        raise TraceError(
            "mutable= names 'params': the optimizer changes parameters, and what the forward pass writes there would "
            f"be lost. Name the other collections. Received: mutable={asked!r}."
        )
    return scope.subtract_filters(asked, "params")


def collections_of(changed: dict[str, Any], before: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a call made of the collections that run with the step, and what it collected beside them.

    `sow` appends to a tuple: what is new at its end is of this call, and what was there before stays in the state.
    """
    kept: dict[str, Any] = {}
    collected: dict[str, Any] = {}
    for name, values in changed.items():
        if name not in before:
            collected[name] = values
            continue
        kept[name], fresh = _without_sown(values, before[name])
        if fresh is not values:
            collected[name] = fresh
    return kept, collected


def _without_sown(after: Any, before: Any) -> tuple[Any, Any]:
    """A collection as it goes on, and as `loss_fn` reads it."""
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        pairs = {
            key: _without_sown(value, before[key]) if key in before else (value, value) for key, value in after.items()
        }
        if all(fresh is after[key] for key, (_, fresh) in pairs.items()):
            return after, after
        return {key: own for key, (own, _) in pairs.items()}, {key: fresh for key, (_, fresh) in pairs.items()}
    both_tuples = isinstance(after, tuple) and isinstance(before, tuple)
    if both_tuples and len(after) > len(before) and all(map(operator.is_, after, before)):
        return before, after[len(before) :]
    return after, after


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
    paths: tuple[tuple[Any, str], ...] = dataclasses.field(compare=False)
    takes_rngs: bool = False
    stream: str | None = "default"
    pinned: frozenset[str] = frozenset()
    mutable: ClassVar[bool] = True
    module: ClassVar[type | tuple[type, ...]] = nnx.Module

    def call(
        self, params: Any, running: Running, keys: Keys, casts: Casts, route: Route, args: Any, kwargs: Any
    ) -> tuple[Any, Running]:
        """`running` is that of the pass: see `NnxPass`."""
        model = self.inside(params, running)
        if casts.active:
            for segments, module in compat.nnx_modules(model):
                path = "/".join(map(str, segments))
                casts.expect([path])
                set_class(module, path, casts)
        function = route.function(model)
        if keys and accepts(function, "rngs") and not given(function, "rngs", args, kwargs):
            kwargs = {**kwargs, "rngs": nnx.Rngs(**keys)}
        args, kwargs = narrowed(route, casts, args, kwargs)
        with calling(casts), casts.scope(route.path if route.is_method and casts.scoped else ""):
            output = function(*args, **kwargs)
        for _, module in list(compat.nnx_modules(model)):
            object.__setattr__(module, "__class__", native_class(type(module)))
        now, changed = split(model, self.known, running.draws)
        return output, changed._replace(written=writes(params, now))

    @property
    def known(self) -> Mapping[Any, str]:
        """Path of each variable of the model -> what it is to the state."""
        return dict(self.paths)

    def inside(self, params: Any, running: Running) -> Any:
        """A model of its own, with what the pass has created so far."""
        return merge(params, running)

    def start(self, params: Any, masters: Any, running: Running, model: Any = None) -> NnxPass:
        """The pass of a model; of the user's own, where that is given."""
        made = NnxAdapter.join(self, masters, running) if model is None else model
        return NnxPass(self, made, params, masters, running)

    def view(self, params: Any, running: Running) -> Any:
        return self.join(params, running)

    def bound(self, engine: Any) -> Any:
        if engine.shared is None:
            return bind(engine.view(), engine)
        return share(engine.shared, engine)

    def params_of(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        """Of a part as nnx finds them in it: a shared one lies in all of them under the path of one place alone."""
        return nnx.to_pure_dict(self.tree(part, route, params, running)) if route.steps else params

    def state_of(self, running: Running) -> Any:
        return None

    def tree(self, part: Any, route: Route, params: Any, running: Running) -> Any:
        return nnx.state(route.walked(self.join(params, running)), nnx.Param)

    def modules(self, params: Any, running: Running) -> Iterable[str]:
        inside = compat.nnx_modules(self.join(params, running))
        return [*owners(params), *("/".join(map(str, segments)) for segments, _ in inside)]

    def join(self, params: Any, running: Running) -> Any:
        return nnx.merge(self.graphdef.value, params, running.streams, running.statistics)

    def check_streams(self, names: Collection[str]) -> None:
        if not self.takes_rngs:
            raise UnsupportedError(
                "rngs= is passed on as the keyword argument rngs of the nnx module, whose __call__ takes none, and no "
                "other method does: it holds its own nnx.Rngs. Drop rngs=, or let __call__ take rngs."
            )


def adapt_nnx(model: Any) -> Parts:
    """The parts of an nnx module, less the intermediates that a call left in it."""
    own = without_intermediates(model)
    graphdef, params, streams, rest = nnx.split(own, nnx.Param, nnx.RngState, ...)
    running = Running(nnx.to_pure_dict(rest), nnx.to_pure_dict(streams))
    adapter = NnxAdapter(Opaque(graphdef), tuple(known_paths(own).items()), _takes_rngs(model))
    return Parts(adapter, nnx.to_pure_dict(params), running)


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
