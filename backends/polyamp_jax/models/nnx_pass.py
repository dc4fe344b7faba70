"""`NnxPass`: an nnx model during one pass through `loss_fn`, whose variables come and go as in a loop by hand.

What a forward pass creates (`sow`, `self.loss = Loss(...)`) is in the model for `loss_fn` to read and to pop, and for
the next call of the pass. At the end the model has what it had before, or the pass is refused: a state keeps its
structure from step to step. Variables of the kind `nnx.Intermediate` live for one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from polyamp.errors import TraceError
from polyamp_jax.arrays import conform
from polyamp_jax.models.bound_nnx import native
from polyamp_jax.models.compat import forget_nnx_attributes
from polyamp_jax.models.parameter_writes import Leaves, conformed, on_masters, selected, writes
from polyamp_jax.models.parts import Opaque, Running
from polyamp_jax.models.passes import WHAT, Outward
from polyamp_jax.models.routes import Route

Path = tuple[Any, ...]
PARAMETERS: Final = "parameters"
STREAMS: Final = "streams"
KEPT: Final = "kept"


@jax.tree_util.register_static
class Graph:
    """What a model is made of, in a pytree."""

    def __init__(self, graphdef: Any) -> None:
        self.opaque = Opaque(graphdef)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.opaque == other.opaque

    def __hash__(self) -> int:
        return hash(self.opaque)

    @property
    def graphdef(self) -> Any:
        return self.opaque.value


class Inside(NamedTuple):
    """The variables of a model within a pass, where `Running` has the statistics.

    Attributes:
        kept: the variables that run with the step, as nested dicts of values.
        more: those that the pass created, an `nnx.State`.
        graph: what the model is made of.
    """

    kept: Any
    more: Any
    graph: Graph


def known_paths(model: Any) -> dict[Path, str]:
    """Path of each variable of a model -> what it is to the state."""
    _, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
    groups = zip((PARAMETERS, STREAMS, KEPT), states, strict=True)
    return {path: group for group, state in groups for path, _ in nnx.to_flat_state(state)}


def split(model: Any, known: Mapping[Path, str], draws: Any) -> tuple[Any, Running]:
    """A model with native classes as its parameters and its running state within a pass."""

    def of(group: str) -> Any:
        return lambda path, _: known.get(tuple(path)) == group

    graphdef, params, streams, kept, more = nnx.split(model, of(PARAMETERS), of(STREAMS), of(KEPT), ...)
    inside = Inside(nnx.to_pure_dict(kept), more, Graph(graphdef))
    return nnx.to_pure_dict(params), Running(inside, nnx.to_pure_dict(streams), draws)


def merge(params: Any, running: Running) -> Any:
    """A model of its own around the arrays, the other way round."""
    kept, more, graph = running.statistics
    more = jax.tree.map(lambda leaf: leaf, more)  # variables of its own
    return nnx.merge(graph.graphdef, params, running.streams, kept, more)


def without_intermediates(model: Any) -> Any:
    """A model less what earlier passes left in it; the model itself if there is nothing."""
    if not jax.tree.leaves(nnx.state(model, nnx.Intermediate)):
        return model
    copy = nnx.merge(*nnx.split(model))
    nnx.pop(copy, nnx.Intermediate)
    return copy


class NnxPass:
    """A `Pass` whose model is an nnx module that changes in place.

    Args:
        adapter: of nnx.
        model: the model of the pass around the masters, or outside of a step the user's own.
        params: what the model computes with: the masters, or in mode "cast" their casts.
        masters: the masters.
        running: its running state.
    """

    def __init__(self, adapter: Any, model: Any, params: Any, masters: Any, running: Running) -> None:
        self._adapter = adapter
        self._graph = Graph(adapter.graphdef.value)
        self._known: Mapping[Path, str] = adapter.known
        self._model = model
        self._params = params
        self._masters = masters
        self._start = running
        self._casts: Any = None
        self._cast_params: Any = None
        self._moved = False

    @property
    def masters(self) -> Any:
        return self._split()[0]

    @property
    def running(self) -> Running:
        params, now = self._split()
        self._check(params, now)
        earlier = self._start._replace(written=None)
        found: Running = conform(Running(now.statistics.kept, now.streams, now.draws), earlier, what=WHAT)
        new = conformed(writes(self._masters, params) or {}, self._masters)
        written = {**(self._start.written or {}), **new}
        return found._replace(written=written or None)

    def view(self) -> Any:
        return self._model

    def inputs(self) -> tuple[Any, Running]:
        params, running = self._split()
        return self._computed(params), running

    def moved(self, after: Running, before: Running, outward: Outward) -> tuple[Running, bool]:
        (kept, more, graph), (kept_before, more_before, graph_before) = after.statistics, before.statistics
        if _same((kept, after.streams), (self._start.statistics, self._start.streams)):
            own = (self._start.statistics, self._start.streams)
            kept, streams = conform((kept, after.streams), own, what=WHAT)
            after = after._replace(streams=streams)
        more = outward(more)
        pairs = ((kept, kept_before), (after.streams, before.streams), (more, more_before))
        self._moved = graph != graph_before or not all(_same(a, b) and _identical(a, b) for a, b in pairs)
        return after._replace(statistics=Inside(kept, more, graph)), self._moved

    def take(self, after: Running, route: Route, written: Leaves | None = None) -> None:
        if written:
            with native(self._model):
                nnx.update(self._model, selected(self._masters, written))
            if self._casts is not None:
                nnx.update(self._casts, selected(self._cast_params, conformed(written, self._cast_params)))
                self._cast_params = _parameters(self._casts)
        if not self._moved:
            return
        _, before = self._split()
        now, then = self._values(after), self._values(before)
        with native(self._model):
            if after.statistics.graph != before.statistics.graph:
                removed = then.keys() - now.keys()
                if removed:
                    nnx.pop(self._model, lambda path, _: tuple(path) in removed)
                self._create({path: now[path] for path in now.keys() - then.keys()}, route)
                self._check_made_of(after, route)
            changed = {path: value for path, value in now.items() if path in then and not _identical(value, then[path])}
            if changed:
                nnx.update(self._model, _nested(changed))

    def computed(self, route: Route) -> Any:
        if self._params is self._masters:
            with native(self._model):
                return route.walked(self._model)
        if self._casts is None:
            params, _ = self._split()
            self._casts = self._adapter.view(self._computed(params), self._start)
            self._cast_params = _parameters(self._casts)
        return route.walked(self._casts)

    def _split(self) -> tuple[Any, Running]:
        with native(self._model):
            self._take_casts()
            params, running = split(self._model, self._known, self._start.draws)
        if not _same(params, self._masters):
            raise TraceError(
                "a parameter was taken out of the model in loss_fn, or put there under another name. The optimizer has "
                "a state for each parameter of polyamp.init: choose with nnx.state(model, nnx.Param), which leaves the "
                "model as it is, and see polyamp.refresh for models that grow."
            )
        return params, running

    def _computed(self, params: Any) -> Any:
        """What the next call computes with: of a parameter that the pass has not written the given one."""
        return jax.tree.map(
            lambda now, master, own: own if now is master else jnp.asarray(now, own.dtype),
            params,
            self._masters,
            self._params,
        )

    def _values(self, running: Running) -> dict[Path, Any]:
        """Path of each variable but the parameters -> its value, or of one that the pass created the variable."""
        kept, more, _ = running.statistics
        found = dict(nnx.to_flat_state(more))
        for tree, group in ((kept, KEPT), (running.streams, STREAMS)):
            for path, own in self._known.items():
                if own == group and (place := _inside(tree, path)) is not None:
                    found[path] = place[0]
        return found

    def _create(self, variables: Mapping[Path, Any], route: Route) -> None:
        for path in variables:
            owner = _owner(self._model, path)
            if not isinstance(owner, nnx.Module):
                raise TraceError(
                    f"{route}(...) creates {_shown(path)!r} in a part that the model did not have before. loss_fn "
                    "works on a copy that lives for one call: create modules and containers before polyamp.init, and "
                    "in a call variables of the modules alone."
                )
        if variables:
            nnx.update(self._model, nnx.from_flat_state(variables.items()))

    def _check_made_of(self, after: Running, route: Route) -> None:
        if Graph(nnx.graphdef(self._model)) == after.statistics.graph:
            return
        params, now = split(self._model, self._known, self._start.draws)
        if _made_of(merge(params, now)) != _made_of(merge(params, after)):
            raise TraceError(
                f"{route}(...) changes what the model is made of, such as a setting of its layers, and not only the "
                "arrays in it. loss_fn works on a copy that lives for one call, so that the change would be lost. "
                "Make it before polyamp.init."
            )

    def _is_as_before(self, params: Any, now: Running) -> bool:
        """Whether the model, less the intermediates of this pass, is made of what it was made of before."""
        if now.statistics.graph == self._graph:
            return True
        model = merge(params, now)
        nnx.pop(model, nnx.Intermediate)
        return _made_of(model) == _made_of(self._adapter.view(self._masters, self._start))

    def _check(self, params: Any, now: Running) -> None:
        """Refuse what the state cannot carry to the next step."""
        for path, variable in nnx.to_flat_state(now.statistics.more):
            kind = type(variable).__name__
            if not isinstance(variable, nnx.Intermediate):
                raise TraceError(
                    f"the forward pass creates {_shown(path)!r} ({kind}) and leaves it in the model, which a compiled "
                    f"step cannot carry to the next one. Take it out in loss_fn, nnx.pop(model, {kind}); or derive its "
                    "class from nnx.Intermediate, whose variables live for one pass; or create it before polyamp.init."
                )
        for path, group in self._known.items():
            tree = now.streams if group == STREAMS else now.statistics.kept
            if group != PARAMETERS and _inside(tree, path) is None:
                raise TraceError(
                    f"loss_fn takes {_shown(path)!r} out of the model, which had it at polyamp.init: a compiled step "
                    "cannot carry a model without it to the next one. Read it with nnx.state(model, ...), which leaves "
                    "the model as it is; or derive its class from nnx.Intermediate, whose variables live for one pass."
                )
        if not self._is_as_before(params, now):
            raise TraceError(
                "loss_fn changes what the model is made of, such as a setting of its layers, and not only the arrays "
                "in it. A compiled step cannot carry that to the next one: make it before polyamp.init."
            )

    def _take_casts(self) -> None:
        """In mode "cast": what `loss_fn` wrote to the casts that it reads by attributes goes to the masters."""
        if self._casts is None:
            return
        casts = _parameters(self._casts)
        if written := writes(self._cast_params, casts):
            params, _ = split(self._model, self._known, self._start.draws)
            masters = on_masters(conformed(written, self._cast_params), self._cast_params, params)
            nnx.update(self._model, selected(params, masters))
            self._cast_params = casts


def _parameters(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _made_of(model: Any) -> Graph:
    """What a model of its own is made of."""
    forget_nnx_attributes(model)
    return Graph(nnx.graphdef(model))


def _same(one: Any, other: Any) -> bool:
    structure: Any = jax.tree.structure(one)
    return bool(structure == jax.tree.structure(other))


def _identical(one: Any, other: Any) -> bool:
    a, b = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _inside(tree: Any, path: Path) -> tuple[Any] | None:
    """What nested dicts hold at a path, in a tuple; None if nothing."""
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return (tree,)


def _nested(values: Mapping[Path, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return tree


def _owner(model: Any, path: Path) -> Any:
    """What holds the variable at a path; None if the model has no such part."""
    for key in path[:-1]:
        held = vars(model) if isinstance(key, str) and hasattr(model, "__dict__") else model
        try:
            model = held[key]
        except (KeyError, IndexError, TypeError):
            return None
    return model


def _shown(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))
