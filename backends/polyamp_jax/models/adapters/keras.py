"""Adapter of Keras models on JAX (`KERAS_BACKEND=jax`).

Parameters, running statistics and seeds of a model are Keras variables. During a pass a `keras.StatelessScope` holds
the values of the state: the model, its layers and `loss_fn` read them there, and what the pass writes stays there. The
policy is on the layers, as in Keras on every backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import keras

from polyamp.errors import ModelError, TraceError, UnsupportedError
from polyamp.float_formats import HALF_DTYPES
from polyamp.recipe.policy import Policy
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp_jax.arrays import copy_arrays, is_array
from polyamp_jax.models.adapter import ModelAdapter, ModelParts, OpaqueValue
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.model_pass import ModelPass
from polyamp_jax.models.module_path import ModulePath
from polyamp_jax.models.running_state import ModelInputs, RunningState
from polyamp_keras.arrays import native_variable
from polyamp_keras.compat import is_nnx_enabled
from polyamp_keras.interrupts import EnsureUndo, close_stale_blocks
from polyamp_keras.models.copies import copy_model
from polyamp_keras.models.layers import is_built, layer_path_aliases, list_layers, require_built
from polyamp_keras.models.model_snapshot import ModelSnapshot
from polyamp_keras.models.variables import model_variables, parameter_leaves
from polyamp_keras.precision import apply_policy
from polyamp_keras.precision.layer_dtypes import LayerDtype, variable_compute_dtypes
from polyamp_keras.precision.policy_application import PolicyApplication
from polyamp_keras.precision.regularization_losses import regularization, warn_missing_regularization

__all__ = ["KerasAdapter", "build_at_first_call", "is_built", "split_model"]

NESTED_TRACE_ERROR: Final = (
    "the model is called inside a function that JAX traces by itself (jax.vmap, jax.checkpoint, jax.lax.scan, or "
    "policy.autocast of a function), and the call changes {name!r}, which would be lost. Call the model in loss_fn "
    "itself, and put a policy around the model: policy.autocast(model)(x)."
)
"""Error message for a call that changes running state or parameters inside another trace."""


@dataclasses.dataclass
class ModelRecord:
    """A model, what it was at `init`, and whether `loss_fn` was seen to leave out its own losses (S25)."""

    model: Any
    snapshot: ModelSnapshot
    warned_of_additions: bool = False


@dataclasses.dataclass(frozen=True)
class KerasAdapter(ModelAdapter):
    """Adapter of a Keras model or layer. Trainable variables are parameters; other floating ones are statistics.

    Attributes:
        model: the user's model.
        names: paths of the parameters, statistics and streams.
        variables: path -> Keras variable, of all three.
        record: what was seen of the model so far.
    """

    model: OpaqueValue
    names: tuple[tuple[str, ...], ...]
    variables: Mapping[str, Any] = dataclasses.field(compare=False)
    record: ModelRecord = dataclasses.field(compare=False)
    stream: ClassVar[str | None] = "default"
    module: ClassVar[type | tuple[type, ...]] = keras.Layer
    is_mutable: ClassVar[bool] = True
    applies_policy: ClassVar[bool] = True

    def call(self, inputs: ModelInputs, casts: CallCasts, route: ModulePath) -> tuple[Any, RunningState]:
        raise NotImplementedError  # never asked: `bind` returns a `KerasPolicyModule`, which calls the layers itself

    def start(self, params: Any, masters: Any, running: RunningState, model: Any = None) -> ModelPass:
        return KerasPass(self, params, masters, running)

    def resolve_policy(self, policy: Policy, params: Any, running: RunningState) -> ResolvedPolicy:
        return apply_policy.resolve_policy(self.model.value, policy)

    @classmethod
    @contextlib.contextmanager
    def forward_scope(cls, engines: Sequence[Any]) -> Iterator[None]:
        """Context manager around `loss_fn`: variables have the values of the states, and layers follow the policies.

        Raises:
            ModelError: two states have one model.
        """
        adapters = [engine.adapter for engine in engines]
        if len({id(adapter.model.value) for adapter in adapters}) < len(adapters):
            raise ModelError(
                "the states of a step must have Keras models of their own. Received: one model in two states. Make a "
                "second one, such as keras.models.clone_model(model), before polyamp.init."
            )
        close_stale_blocks()
        applications = [PolicyApplication(engine.adapter.model.value, engine.plan) for engine in engines]
        values = [pair for engine in engines for pair in engine.open_pass.variable_values()]
        trained = {id(engine.adapter.variables[name]) for engine in engines for name in engine.adapter.names[0]}
        scope = ParameterWriteScope(values, trained)
        for engine, application in zip(engines, applications, strict=True):
            engine.open_pass.open(scope, application.choices)
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope)
            stack.enter_context(warn_missing_regularization([adapter.record for adapter in adapters]))
            for engine, application in zip(engines, applications, strict=True):
                stack.enter_context(EnsureUndo(application.restore))
                application.put()
                stack.enter_context(engine.watch_layers())
            yield

    def view(self, params: Any, running: RunningState) -> Any:
        return self.model.value

    def params_of(self, part: Any, route: ModulePath, params: Any, running: RunningState) -> Any:
        own = {id(variable) for variable in part.trainable_variables}
        return {name: leaf for name, leaf in params.items() if id(self.variables[name]) in own}

    def modules(self, params: Any, running: RunningState) -> Mapping[str, Any]:
        found = list_layers(self.model.value)
        aliases = layer_path_aliases(found)
        return {alias: entry.layer for entry in found for alias in aliases[entry.path]}

    def parameter_paths(self, modules: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
        own = {name: self.variables[name] for name in self.names[0]}
        leaves = parameter_leaves(self.model.value, own)
        return {leaf.path: (leaf.path, *(path for path in leaf.called if path != leaf.path)) for leaf in leaves}

    def join(self, params: Any, running: RunningState) -> Any:
        """Write copies of the values into the user's model, and return it."""
        values = _named_values(params, running)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in values.values()):
            raise TraceError(
                "state.model writes the values of the state into the Keras model, and in a compiled function there "
                "are none. Read state.params there, and state.model outside of it."
            )
        for name, leaf in values.items():
            self.variables[name].assign(copy_arrays(leaf))
        return self.model.value

    @contextlib.contextmanager
    def exchange(self, params: Any, running: RunningState) -> Iterator[Any]:
        before = {name: variable.value for name, variable in self.variables.items()}
        try:
            yield self.join(params, running)
        finally:
            for name, value in before.items():
                self.variables[name].assign(value)

    def copy(self, params: Any, running: RunningState) -> Any:
        model = self.model.value
        try:
            copied = copy_model(model)
            parts = split_model(copied)
            if not isinstance(parts.adapter, KerasAdapter) or parts.adapter.names != self.names:
                raise ValueError("the copy has other variables")
        except Exception as error:
            raise UnsupportedError(
                f"averaged_model cannot copy this {type(model).__name__} ({type(error).__name__}: "
                f"{next(iter(str(error).splitlines()), '')}). Use `with polyamp.averaged(state) as model:`, which "
                "needs no copy."
            ) from error
        return parts.adapter.join(params, running)

    def check_unchanged(self) -> None:
        self.record.snapshot.check()

    def regularization(self, part: Any) -> Any:
        return regularization(part)

    def find_stream_problem(self, names: Collection[str]) -> str | None:
        return (
            "a Keras model holds its own seeds: give its layers seed=, such as keras.layers.Dropout(0.1, seed=0). Drop "
            "rngs=."
        )


class ParameterWriteScope(keras.StatelessScope):  # type: ignore[misc]  # Keras is untyped
    """Scope in which a parameter that the forward pass writes has the gradient of what was written (S12), as where
    Keras's variables are written in place.

    Args:
        values: pairs of a variable and its value at the beginning.
        trained: ids of the variables that are parameters.
    """

    def __init__(self, values: Sequence[tuple[Any, Any]], trained: Collection[int]) -> None:
        super().__init__(values, collect_losses=True)
        self._starts = {key: value for key, value in self.state_mapping.items() if key in trained}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        start = self._starts.get(id(variable))
        if start is not None:
            value = jax.lax.stop_gradient(value) + (start - jax.lax.stop_gradient(start))
        super().add_update((variable, value))


class KerasPass(ModelPass):
    """Pass of a Keras model, whose variables have their values in a `keras.StatelessScope`."""

    def __init__(self, adapter: KerasAdapter, params: Any, masters: Any, running: RunningState) -> None:
        super().__init__(adapter, params, masters, running)
        self._scope: Any = None
        self._choices: Collection[LayerDtype] = ()
        self._before: dict[str, Any] = {}

    def variable_values(self) -> list[tuple[Any, Any]]:
        """Return pairs of a variable and its value at the beginning of the pass."""
        variables = self._adapter.variables
        values = _named_values(self._params, self._running)
        return [(variables[name], value) for name, value in values.items()]

    def open(self, scope: Any, choices: Collection[LayerDtype]) -> None:
        """Take the values from a scope from now on, in which the layers have the dtypes of `choices`."""
        self._scope, self._choices = scope, choices
        self._before = self.values()

    def values(self) -> dict[str, Any]:
        """Return the current value of each variable by path."""
        return {name: self._scope.get_current_value(variable) for name, variable in self._adapter.variables.items()}

    @property
    def masters(self) -> Any:
        if self._scope is None:
            return self._params
        now = self.values()
        return {name: now[name] for name in self._params}

    @property
    def running(self) -> RunningState:
        now, start = self.values(), self._running
        changed = [name for name in self._params if now[name] is not self._before[name]]
        variables = self._adapter.variables
        dtypes = variable_compute_dtypes(self._adapter.model.value, self._choices) if changed else {}
        narrow = {name: dtypes[id(native_variable(variables[name]))] for name in changed}
        written = {name: _written_master(now[name], self._before[name], narrow[name]) for name in changed}
        written = {**(start.written or {}), **written}
        return start._replace(
            statistics={name: now[name] for name in start.statistics},
            streams={name: now[name] for name in start.streams},
            written=written or None,
        )

    def refuse_changes(self, before: Mapping[str, Any]) -> None:
        """Raise if a variable has another value than before, and take the write back.

        Raises:
            TraceError: names the variable.
        """
        now = self.values()
        changed = [name for name, value in now.items() if value is not before[name]]
        for name in changed:
            self._scope.add_update((self._adapter.variables[name], before[name]))
        if changed:
            raise TraceError(NESTED_TRACE_ERROR.format(name=changed[0]))


def _written_master(now: Any, before: Any, dtype: str | None) -> Any:
    """Return a written parameter as master weights: what a pass wrote in 16 bits has the digits from before where it is
    the same number."""
    if dtype not in HALF_DTYPES or before.dtype.name in HALF_DTYPES:
        return now

    def rounded(value: Any) -> Any:
        return value.astype(dtype).astype(value.dtype)

    return jnp.where(jnp.all(rounded(now) == now) & (now == rounded(before)), before, now)


def _named_values(params: Any, running: RunningState) -> dict[str, Any]:
    return {**params, **running.statistics, **running.streams}


def build_at_first_call(model: Any, bind: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return a callable for a model that is not built: its first call builds it by the shapes of its arguments.

    Args:
        model: the model or layer.
        bind: returns the callable for the built model.
    """
    bound: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not bound:
            model(*keras.tree.map_structure(_symbol, args), **keras.tree.map_structure(_symbol, kwargs))
            bound.append(bind())
        return bound[0](*args, **kwargs)

    return call


def _symbol(leaf: Any) -> Any:
    """Return a symbolic tensor in place of an array."""
    return keras.KerasTensor(leaf.shape, str(leaf.dtype)) if is_array(leaf) else leaf


def split_model(model: Any) -> ModelParts:
    """Split a built Keras model into its parts, by the paths that polyamp has for Keras on every backend."""
    if not isinstance(model, keras.Layer):
        raise ModelError("pass a Keras model as the model itself; it holds its own variables.")
    if is_nnx_enabled():
        raise UnsupportedError(
            "polyamp does not train nnx-enabled Keras models. Received: keras.config.is_nnx_enabled(). Unset "
            "KERAS_NNX_ENABLED."
        )
    if keras.distribution.distribution() is not None:
        raise UnsupportedError(
            "polyamp does not place the state of a Keras model on a keras.distribution. Received: "
            f"{type(keras.distribution.distribution()).__name__}. Train on one device, or a model of a JAX library, "
            "whose sharding polyamp.train_step follows."
        )
    require_built(model, "polyamp with Keras on JAX")
    found = model_variables(model)
    roles = (found.parameters, {**found.frozen, **found.running}, found.rng)
    variables = {name: variable for role in roles for name, variable in role.items()}
    params, statistics, streams = ({name: variable.value for name, variable in role.items()} for role in roles)
    adapter = KerasAdapter(
        OpaqueValue(model),
        tuple(map(tuple, roles)),
        variables,
        ModelRecord(model, ModelSnapshot(model, found, "polyamp.refresh(state, state.model)")),
    )
    return ModelParts(adapter, params, RunningState(statistics, streams))
