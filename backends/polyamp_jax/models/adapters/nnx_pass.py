"""Model state of an nnx module during one pass through `loss_fn`, in which variables can be created and removed.

Variables that a forward pass creates (`sow`, `self.loss = Loss(...)`) stay in the model: `loss_fn` can read and pop
them, and the next call of the pass sees them. A state keeps its structure from step to step. The pass therefore raises
if the model's variables at its end differ from those at its start. Variables of type `nnx.Intermediate` live for one
pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from polyamp.errors import TraceError
from polyamp_jax.arrays import conform_tree, is_same_tree
from polyamp_jax.models.adapter import OpaqueValue
from polyamp_jax.models.flax_compat import drop_stale_nnx_attributes
from polyamp_jax.models.model_pass import RUNNING_STATE_NAME, ModelPass, OutputCast
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.module_proxy import native_classes
from polyamp_jax.models.parameter_writes import (
    NamedLeaves,
    conform_writes,
    find_writes,
    nest_values,
    nest_writes,
    writes_on_masters,
)
from polyamp_jax.models.running_state import RunningState

VariablePath = tuple[Any, ...]
PARAMETER_VARIABLES: Final = "parameters"
STREAM_VARIABLES: Final = "streams"
STEP_VARIABLES: Final = "kept"


@jax.tree_util.register_static
class NnxGraph(OpaqueValue):
    """Graph definition of a model as a static pytree node."""


class NnxPassVariables(NamedTuple):
    """Variables of a model within a pass, in place of `RunningState.statistics`.

    Attributes:
        state: the variables of the running state, as nested dicts of values.
        collected: the variables that the pass created, an `nnx.State`.
        graph: the graph definition of the model.
    """

    state: Any
    collected: Any
    graph: NnxGraph


def variable_roles(model: Any) -> dict[VariablePath, str]:
    """Return a mapping from the path of each variable of a model to its role in the state."""
    _, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
    groups = zip((PARAMETER_VARIABLES, STREAM_VARIABLES, STEP_VARIABLES), states, strict=True)
    return {path: group for group, state in groups for path, _ in nnx.to_flat_state(state)}


def split_nnx_model(model: Any, roles: Mapping[VariablePath, str], draws: Any) -> tuple[Any, RunningState]:
    """Split a model with native classes into its parameters and its running state within a pass."""

    def of(group: str) -> Any:
        return lambda path, _: roles.get(tuple(path)) == group

    graphdef, params, streams, state, collected = nnx.split(
        model, of(PARAMETER_VARIABLES), of(STREAM_VARIABLES), of(STEP_VARIABLES), ...
    )
    inside = NnxPassVariables(nnx.to_pure_dict(state), collected, NnxGraph(graphdef))
    return nnx.to_pure_dict(params), RunningState(inside, nnx.to_pure_dict(streams), draws)


def merge_nnx_model(params: Any, running: RunningState) -> Any:
    """Build a new model from the arrays: the inverse of `split_nnx_model`."""
    state, collected, graph = running.statistics
    collected = jax.tree.map(lambda leaf: leaf, collected)  # copies the variables
    return nnx.merge(graph.value, params, running.streams, state, collected)


def without_intermediates(model: Any) -> Any:
    """Return a copy of a model without the intermediates of earlier passes, or the model itself if it has none."""
    if not jax.tree.leaves(nnx.state(model, nnx.Intermediate)):
        return model
    copy = nnx.merge(*nnx.split(model))
    nnx.pop(copy, nnx.Intermediate)
    return copy


class NnxPass(ModelPass):
    """Pass of an nnx module, which changes in place.

    Args:
        adapter: the nnx adapter.
        model: the model of the pass, with master parameters; outside of a step the user's own model.
        params: the parameters that the model computes with: the masters, or in mode "cast" their casts.
        masters: the master parameters.
        running: the model's running state.
    """

    def __init__(self, adapter: Any, model: Any, params: Any, masters: Any, running: RunningState) -> None:
        super().__init__(adapter, params, masters, running)
        self._graph = NnxGraph(adapter.graphdef.value)
        self._roles: Mapping[VariablePath, str] = adapter.roles
        self._model = model
        self._start = running
        self._casts: Any = None
        self._cast_params: Any = None
        self._moved = False

    @property
    def masters(self) -> Any:
        return self._split()[0]

    @property
    def running(self) -> RunningState:
        params, now = self._split()
        self._check(params, now)
        earlier = self._start._replace(written=None)
        found: RunningState = conform_tree(
            RunningState(now.statistics.state, now.streams, now.draws), earlier, what=RUNNING_STATE_NAME
        )
        new = conform_writes(find_writes(self._masters, params) or {}, self._masters)
        written = {**(self._start.written or {}), **new}
        return found._replace(written=written or None)

    def view(self) -> Any:
        return self._model

    def inputs(self) -> tuple[Any, RunningState]:
        params, running = self._split()
        return self._computed(params), running

    def conform_state(
        self, after: RunningState, before: RunningState, cast_output: OutputCast
    ) -> tuple[RunningState, bool]:
        state, collected, graph = after.statistics
        if _has_same_structure((state, after.streams), (self._start.statistics, self._start.streams)):
            own = (self._start.statistics, self._start.streams)
            state, streams = conform_tree((state, after.streams), own, what=RUNNING_STATE_NAME)
            after = after._replace(streams=streams)
        collected = cast_output(collected)
        after = after._replace(statistics=NnxPassVariables(state, collected, graph))
        self._moved = not is_same_tree((after.statistics, after.streams), (before.statistics, before.streams))
        return after, self._moved

    def advance(self, after: RunningState, route: ModulePath, written: NamedLeaves | None = None) -> None:
        if written:
            with native_classes(self._model):
                nnx.update(self._model, nest_writes(self._masters, written))
            if self._casts is not None:
                nnx.update(self._casts, nest_writes(self._cast_params, conform_writes(written, self._cast_params)))
                self._cast_params = _parameter_arrays(self._casts)
        if not self._moved:
            return
        _, before = self._split()
        now, then = self._values(after), self._values(before)
        with native_classes(self._model):
            if after.statistics.graph != before.statistics.graph:
                removed = then.keys() - now.keys()
                if removed:
                    nnx.pop(self._model, lambda path, _: tuple(path) in removed)
                self._create({path: now[path] for path in now.keys() - then.keys()}, route)
                self._check_made_of(after, route)
            changed = {
                path: value for path, value in now.items() if path in then and not _has_same_arrays(value, then[path])
            }
            if changed:
                nnx.update(self._model, nest_values(changed))

    def compute_part(self, route: ModulePath) -> Any:
        if self._params is self._masters:
            with native_classes(self._model):
                return route.resolve(self._model)
        if self._casts is None:
            params, _ = self._split()
            self._casts = self._adapter.view(self._computed(params), self._start)
            self._cast_params = _parameter_arrays(self._casts)
        return route.resolve(self._casts)

    def _split(self) -> tuple[Any, RunningState]:
        with native_classes(self._model):
            self._take_casts()
            params, running = split_nnx_model(self._model, self._roles, self._start.draws)
        if not _has_same_structure(params, self._masters):
            raise TraceError(
                "a parameter was taken out of the model in loss_fn, or put there under another name. The optimizer has "
                "a state for each parameter of polyamp.init: choose with nnx.state(model, nnx.Param), which leaves the "
                "model as it is, and see polyamp.refresh for models that grow."
            )
        return params, running

    def _computed(self, params: Any) -> Any:
        """Return the parameters for the next call: the given ones, except those that the pass has written."""
        return jax.tree.map(
            lambda now, master, own: own if now is master else jnp.asarray(now, own.dtype),
            params,
            self._masters,
            self._params,
        )

    def _values(self, running: RunningState) -> dict[VariablePath, Any]:
        """Return path -> value for every variable except parameters. If the pass created it, the variable itself."""
        state, collected, _ = running.statistics
        found = dict(nnx.to_flat_state(collected))
        for tree, group in ((state, STEP_VARIABLES), (running.streams, STREAM_VARIABLES)):
            for path, own in self._roles.items():
                if own == group and (place := _value_at_path(tree, path)) is not None:
                    found[path] = place[0]
        return found

    def _create(self, variables: Mapping[VariablePath, Any], route: ModulePath) -> None:
        for path in variables:
            owner = _variable_owner(self._model, path)
            if not isinstance(owner, nnx.Module):
                raise TraceError(
                    f"{route}(...) creates {_format_path(path)!r} in a part that the model did not have before. "
                    "loss_fn works on a copy that lives for one call: create modules and containers before "
                    "polyamp.init, and in a call variables of the modules alone."
                )
        if variables:
            nnx.update(self._model, nnx.from_flat_state(variables.items()))

    def _check_made_of(self, after: RunningState, route: ModulePath) -> None:
        if NnxGraph(nnx.graphdef(self._model)) == after.statistics.graph:
            return
        params, now = split_nnx_model(self._model, self._roles, self._start.draws)
        if _model_graph(merge_nnx_model(params, now)) != _model_graph(merge_nnx_model(params, after)):
            raise TraceError(
                f"{route}(...) changes what the model is made of, such as a setting of its layers, and not only the "
                "arrays in it. loss_fn works on a copy that lives for one call, so that the change would be lost. "
                "Make it before polyamp.init."
            )

    def _is_as_before(self, params: Any, now: RunningState) -> bool:
        """Return whether the model has the same graph as before, ignoring the intermediates of this pass."""
        if now.statistics.graph == self._graph:
            return True
        model = merge_nnx_model(params, now)
        nnx.pop(model, nnx.Intermediate)
        return _model_graph(model) == _model_graph(self._adapter.view(self._masters, self._start))

    def _check(self, params: Any, now: RunningState) -> None:
        """Raise `TraceError` for changes that the state cannot carry to the next step."""
        for path, variable in nnx.to_flat_state(now.statistics.collected):
            kind = type(variable).__name__
            if not isinstance(variable, nnx.Intermediate):
                raise TraceError(
                    f"the forward pass creates {_format_path(path)!r} ({kind}) and leaves it in the model, which a "
                    f"compiled step cannot carry to the next one. Take it out in loss_fn, nnx.pop(model, {kind}); or "
                    "derive its class from nnx.Intermediate, whose variables live for one pass; or create it before "
                    "polyamp.init."
                )
        for path, group in self._roles.items():
            tree = now.streams if group == STREAM_VARIABLES else now.statistics.state
            if group != PARAMETER_VARIABLES and _value_at_path(tree, path) is None:
                raise TraceError(
                    f"loss_fn takes {_format_path(path)!r} out of the model, which had it at polyamp.init: a "
                    "compiled step cannot carry a model without it to the next one. Read it with nnx.state(model, "
                    "...), which leaves the model as it is; or derive its class from nnx.Intermediate, whose "
                    "variables live for one pass."
                )
        if not self._is_as_before(params, now):
            raise TraceError(
                "loss_fn changes what the model is made of, such as a setting of its layers, and not only the arrays "
                "in it. A compiled step cannot carry that to the next one: make it before polyamp.init."
            )

    def _take_casts(self) -> None:
        """In mode "cast", apply writes that `loss_fn` made to the cast parameters to the masters."""
        if self._casts is None:
            return
        casts = _parameter_arrays(self._casts)
        if written := find_writes(self._cast_params, casts):
            params, _ = split_nnx_model(self._model, self._roles, self._start.draws)
            masters = writes_on_masters(conform_writes(written, self._cast_params), self._cast_params, params)
            nnx.update(self._model, nest_writes(params, masters))
            self._cast_params = casts


def _parameter_arrays(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _model_graph(model: Any) -> NnxGraph:
    """Return the graph definition of a separate model."""
    drop_stale_nnx_attributes(model)
    return NnxGraph(nnx.graphdef(model))


def _has_same_structure(one: Any, other: Any) -> bool:
    structure: Any = jax.tree.structure(one)
    return bool(structure == jax.tree.structure(other))


def _has_same_arrays(one: Any, other: Any) -> bool:
    a, b = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _value_at_path(tree: Any, path: VariablePath) -> tuple[Any] | None:
    """Return the value of nested dicts at a path, in a tuple, or None if there is none."""
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return (tree,)


def _variable_owner(model: Any, path: VariablePath) -> Any:
    """Return the object that owns the variable at a path, or None if the model has no such part."""
    for key in path[:-1]:
        attributes = vars(model) if isinstance(key, str) and hasattr(model, "__dict__") else model
        try:
            model = attributes[key]
        except (KeyError, IndexError, TypeError):
            return None
    return model


def _format_path(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))
