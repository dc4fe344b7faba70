"""JAX training state as a pytree, and its arrays by name for checkpoints.

`JaxState` works with `jax.jit`, `jax.tree.map` and donation like any pytree. Unflattening checks nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import EllipsisType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.contract.backend import Backend
from polyamp.display import StateClass, StateDisplayMixin, plain_number
from polyamp.errors import CheckpointError
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.resolved_policy import ResolvedPolicy
from polyamp.recipe.scaler import LossScaleState
from polyamp.results import Gradients
from polyamp.rules import step_checks
from polyamp.rules.averages import averaged_paths
from polyamp.rules.group_members import GroupMembers, resolve_group_members
from polyamp.rules.stuck_scale import StuckScaleMonitor
from polyamp_jax import compat
from polyamp_jax.arrays import copy_arrays, dtype_name, is_key, named_leaves, to_numpy
from polyamp_jax.distributed.jax_only.sharding_layout import ShardingLayout, commit_to_devices, find_sharding_layout
from polyamp_jax.models.adapter import ModelAdapter, ModelParts, OpaqueValue, module_paths, parameter_leaves
from polyamp_jax.models.running_state import RunningState
from polyamp_jax.step.averages import Averages, averaged_values
from polyamp_jax.step.jax_only.native_transformations import check_extra_arguments, check_outermost
from polyamp_jax.step.optimizers import lagging_parameters, make_transformation, widen_parameters


class StaticSetup:
    """Static part of a state: adapter, recipe, the policy's plan, the optimizer's groups and the backend.

    Compares by value. The hash is computed once, because `jit` needs it at every call.

    The monitor of a stuck scale (S17) is stored here too, so that it survives every way of rebuilding a state:
    `jax.tree.map`, `dataclasses.replace`, a compiled function. A compiled function returns states of equal setups with
    one setup, so the monitor is shared.
    """

    __slots__ = ("_hash", "_key", "adapter", "backend", "groups", "plan", "recipe", "watch")

    def __init__(
        self, adapter: ModelAdapter, recipe: Recipe, plan: ResolvedPolicy, groups: GroupMembers, backend: Backend
    ) -> None:
        self.adapter = adapter
        self.recipe = recipe
        self.plan = plan
        self.groups = groups
        self.backend = backend
        self.watch = StuckScaleMonitor(shared=True)
        self._key = (adapter, OpaqueValue(recipe), plan, None if groups.is_ungrouped else groups)
        self._hash = hash(self._key)

    @property
    def optimizer(self) -> Any:
        """The recipe's optimizer, with its groups resolved if it has groups (S27).

        This also applies if all parameters of this model are in one group: in a changed model they may not be (S28).
        """
        given: Any = self.recipe.optimizer
        return self.groups if is_spec(given) and given.needs_model else given

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticSetup):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "scale_state", "running", "rngs", "step", "averages"),
    meta_fields=("setup",),
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class JaxState(StateDisplayMixin, metaclass=StateClass):
    """Training state of a JAX model.

    Attributes:
        params: the master weights, a pytree in the policy's `param` dtype.
        opt_state: the optimizer's state as optax initialises it, over float32 parameters.
        scale_state: the loss-scale state.
        running: running statistics and the model's own random streams.
        rngs: base keys of the random streams given to `init`; folded with the number of attempted steps.
        step: number of applied updates, int32 scalar.
        averages: moving averages of parameters and running statistics by role and path (S34); empty without `ema`.
        setup: the static part: the model adapter, the recipe and the backend.
    """

    params: Any
    opt_state: Any
    scale_state: LossScaleState
    running: RunningState
    rngs: dict[str, jax.Array]
    step: Any
    setup: StaticSetup
    averages: Averages = dataclasses.field(default_factory=dict)

    _shown: ClassVar[tuple[str, ...]] = ("attempts", "averages", "opt_state", "params", "rngs", "running", "setup")

    lagging: ClassVar[frozenset[int] | None] = None
    """Indices of the parameters that have missed an update (S23); None if unknown, as inside a trace. Not part of the
    pytree: `with_host_facts` sets it on one object."""

    _layout: ClassVar[Any] = ...
    """Cached value of `layout`; `...` before the first lookup."""

    def with_host_facts(
        self, lagging: frozenset[int] | None, layout: ShardingLayout | EllipsisType | None = ...
    ) -> JaxState:
        """Set `lagging`, and `layout` if given, on this object, and return it."""
        object.__setattr__(self, "lagging", lagging)
        if layout is not ...:
            object.__setattr__(self, "_layout", layout)
        return self

    def take_arrays(self, state: JaxState) -> None:
        """Become `state`, in this object: its own arrays were donated."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, getattr(state, field.name))
        self.with_host_facts(state.lagging, state.layout)

    @property
    def layout(self) -> ShardingLayout | None:
        """Sharding layout of the arrays, or None on one device or if unknown. Looked up once per object."""
        if self._layout is ...:
            object.__setattr__(self, "_layout", find_sharding_layout(jax.tree.leaves(self)))
        found: ShardingLayout | None = self._layout
        return found

    @property
    def watch(self) -> StuckScaleMonitor:
        """Monitor that tells the host when to check for a stuck scale (S17); see `StaticSetup`."""
        return self.setup.watch

    _moved: ClassVar[RunningState | None] = None
    """Running state after the last call of `value_and_grad` on this object, for its streams."""
    _traced: ClassVar[tuple[Any, RunningState] | None] = None
    """The same for the last call inside a trace, with the trace in which it is valid."""

    def note(self, running: RunningState) -> None:
        """Record the position of the streams for the next call on this object (S12)."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((running.streams, running.draws))):
            object.__setattr__(self, "_traced", (compat.trace_state(), running))
        else:
            object.__setattr__(self, "_moved", running)

    def resume_streams(self) -> JaxState:
        """Return the state with its streams as the last call on it left them; itself if there was no call."""
        moved = self._moved
        if self._traced is not None and self._traced[0] == compat.trace_state():
            moved = self._traced[1]
        return self if moved is None else replace_streams(self, moved)

    @property
    def backend(self) -> Backend:
        return self.setup.backend

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def groups(self) -> GroupMembers:
        """Hyperparameters of each parameter (S27)."""
        return self.setup.groups

    @property
    def model(self) -> Any:
        """Current model in its native form, with this state's arrays.

        A compiled step donates them, so use the model, or copy it, before the next step.
        """
        return self.setup.adapter.join(self.params, self.running)

    @property
    def attempts(self) -> Any:
        """Number of attempted steps, including skipped ones, int32 scalar."""
        return self.step + self.scale_state.skipped

    def _place(self) -> tuple[str, int]:
        leaves = jax.tree.leaves(self.params)
        return _device_name(leaves[0]), sum(int(np.prod(jnp.shape(leaf))) for leaf in leaves)

    def _number(self, value: Any) -> str:
        if isinstance(value, jax.core.Tracer):
            return "traced"
        if isinstance(value, jax.Array) and value.is_deleted():
            return "donated"
        return plain_number(value) if hasattr(value, "item") else str(value)


def replace_streams(state: JaxState, running: RunningState) -> JaxState:
    """Return the state with the random streams replaced by those of `running`."""
    own = state.running._replace(streams=running.streams, draws=running.draws)
    return dataclasses.replace(state, running=own).with_host_facts(state.lagging, state.layout)


def continue_streams(state: JaxState, gradients: Gradients) -> JaxState:
    """Return the state with its random streams as the call of `value_and_grad` that returned `gradients` left them.

    Two calls of `value_and_grad` on one state automatically draw two masks, also inside one `jax.jit`. A function that
    is compiled once and called again, or the body of a `jax.lax.scan`, only knows its arguments. There the streams
    must be passed in and returned.

    Args:
        state: the state that `value_and_grad` was called with.
        gradients: the gradients that the call returned.

    Returns:
        A state that differs only in its streams, with the structure of `state`.

    Example:
        >>> import jax, jax.numpy as jnp, polyamp
        >>> def apply_fn(params, x, rng):
        ...     return params["w"] * x * jax.random.bernoulli(rng, 0.5, x.shape)
        >>> recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
        >>> state = polyamp.init((apply_fn, {"w": jnp.ones(())}), recipe, rngs=0)
        >>> half = jax.jit(polyamp.value_and_grad(lambda model, x: model(x).sum()))
        >>> _, first = half(state, jnp.ones(64))
        >>> _, again = half(state, jnp.ones(64))
        >>> _, second = half(continue_streams(state, first), jnp.ones(64))
        >>> (first.values["w"] == again.values["w"]).item(), (first.values["w"] == second.values["w"]).item()
        (True, False)
    """
    return replace_streams(state, gradients.running)


def create_state(
    parts: ModelParts, recipe: Recipe, rngs: dict[str, jax.Array], scale_state: LossScaleState, backend: Backend
) -> JaxState:
    """Return a new state. Every array is copied, so that donating the state never deletes the user's arrays.

    Raises:
        ModelError, PolicyError, UnsupportedError: the recipe requires something that this model does not support (S20).
    """
    named = named_leaves(parts.params)
    step_checks.check_parameters([(path, dtype_name(leaf)) for path, leaf in named.items()], recipe)
    plan = parts.adapter.resolve_policy(recipe.policy, parts.params, parts.running)
    groups = resolve_group_members(
        recipe, named, lambda: parameter_leaves(parts), backend="jax", modules=lambda: module_paths(parts)
    )
    setup = StaticSetup(parts.adapter, recipe, plan, groups, backend)
    named_leaves(parts.running)
    params = copy_arrays(parts.params)
    run, wide = make_transformation(setup.optimizer), widen_parameters(params)
    opt_state = copy_arrays(run.init(wide))
    if not is_spec(recipe.optimizer):
        check_outermost(recipe.optimizer, opt_state)
        check_extra_arguments(run, opt_state, wide)
    state = JaxState(
        params=params,
        opt_state=opt_state,
        scale_state=scale_state,
        running=copy_arrays(parts.running),
        rngs=copy_arrays(rngs),
        step=jnp.array(0, jnp.int32),
        setup=setup,
        averages=copy_arrays(
            averaged_values(params, parts.running.statistics, averaged_paths(recipe, named, backend="jax"), recipe)
        ),
    )
    whole: JaxState = commit_to_devices(state, jax.tree.leaves(params))
    return whole.with_host_facts(frozenset())


def export_arrays(state: JaxState) -> dict[str, np.ndarray[Any, Any]]:
    """Return every array of the state by name, on the host. PRNG keys are returned as their data.

    Raises:
        CheckpointError: the state was donated to a step, before or during the call.
    """
    try:
        return {name: _copy_to_host(leaf) for name, leaf in named_state_arrays(state).items()}
    except (RuntimeError, ValueError) as error:
        check_not_donated(state, error)
        raise


def is_donated(state: JaxState) -> bool:
    """Whether an array of the state was donated to a step, so that it no longer exists; False inside of a trace."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return any(leaf.is_deleted() for leaf in arrays if not isinstance(leaf, jax.core.Tracer))


def check_not_donated(state: JaxState, error: Exception | None = None) -> None:
    """Raise if the state's arrays no longer exist.

    Raises:
        CheckpointError: the state was donated to a step.
    """
    if is_donated(state):
        raise CheckpointError(
            "this state was donated to a step, so its arrays are gone. Save the state that the step returned, before "
            "the next step begins; from another thread, with train_step(..., donate=False), which keeps both."
        ) from error


def _copy_to_host(leaf: Any) -> np.ndarray[Any, Any]:
    """Return a copy on the host. An array that is divided among processes is gathered; then every process must call."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return to_numpy(leaf)


def replace_arrays(state: JaxState, arrays: Mapping[str, Any]) -> JaxState:
    """Return the state with its arrays replaced by those of the same names, with dtypes and placement kept.

    NumPy arrays are whole; JAX arrays are already on their devices.
    """
    names = iter(named_state_arrays(state))
    leaves, structure = jax.tree.flatten(_state_tree(state))
    new = jax.tree.unflatten(structure, [_array_like(leaf, arrays[next(names)]) for leaf in leaves])
    return dataclasses.replace(
        state,
        params=new["model"],
        opt_state=new["optimizer"],
        scale_state=new["loss_scale"],
        running=RunningState(new["running"], new["rng"]["model"], new["rng"]["draws"]),
        rngs=new["rng"]["given"],
        step=new["step"],
        averages=new["average"],
    ).with_host_facts(lagging_parameters(new["optimizer"]))


def _state_tree(state: JaxState) -> dict[str, Any]:
    """Return the state as one tree whose paths are the names in a checkpoint."""
    return {
        "model": state.params,
        "optimizer": state.opt_state,
        "average": state.averages,
        "loss_scale": state.scale_state,
        "running": state.running.statistics,
        "rng": {"model": state.running.streams, "given": state.rngs, "draws": state.running.draws},
        "step": state.step,
    }


def named_state_arrays(state: JaxState) -> dict[str, Any]:
    """Return the state's device arrays, by the names of `export_arrays`."""
    return named_leaves(_state_tree(state))


def _array_like(leaf: Any, array: Any) -> jax.Array:
    new: jax.Array
    if isinstance(array, jax.Array):
        return array
    if not leaf.is_fully_addressable:  # every process has the whole array and places its part
        old = jax.random.key_data(leaf) if is_key(leaf) else leaf
        data = np.asarray(array, old.dtype)
        new = jax.make_array_from_callback(old.shape, old.sharding, lambda index: data[index])
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(leaf)) if is_key(leaf) else new
    if is_key(leaf):
        new = jax.random.wrap_key_data(jnp.array(array), impl=jax.random.key_impl(leaf))
    else:
        new = jnp.array(array, dtype=leaf.dtype, copy=True)
    if leaf.committed:
        new = jax.device_put(new, leaf.sharding)
    return new


def _device_name(leaf: Any) -> str:
    if isinstance(leaf, jax.core.Tracer):
        return "traced"
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__
    devices: Any = leaf.sharding.device_set
    return ", ".join(sorted(f"{device.platform}:{device.id}" for device in devices))
