"""`JaxState`: a model under training as a pytree, and its arrays by name for checkpoints.

Called by `backend` and `step`. It goes through `jax.jit`, `jax.tree.map` and donation like any pytree; unflattening
checks nothing.
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
from polyamp.errors import CheckpointError
from polyamp.recipe.members import Members, members
from polyamp.recipe.optimizers import is_spec
from polyamp.recipe.recipe import Recipe
from polyamp.results import Gradients
from polyamp.rules import refusals
from polyamp.rules.plan import Plan
from polyamp.rules.scale import LossScaleState
from polyamp.rules.stuck import Watch
from polyamp.shown import ShownState, plain_number
from polyamp_jax import compat
from polyamp_jax.arrays import dtype_name, fresh, is_key, named_leaves, to_numpy
from polyamp_jax.models.kinds import leaves_of
from polyamp_jax.models.parts import Adapter, Opaque, Parts, Running, module_paths
from polyamp_jax.step.extra_arguments import check_extra
from polyamp_jax.step.layouts import Layout, layout_of, settled
from polyamp_jax.step.lookahead import check_outermost
from polyamp_jax.step.optimizers import lagging, transformation, widened


class Setup:
    """The static half of a state: adapter, recipe, the policy's plan, the optimizer's groups, backend; compared by
    value, hashed once since `jit` asks every call.

    The watch over a stuck scale (S17) is here too, so that it outlives every way of making a state anew:
    `jax.tree.map`, `dataclasses.replace`, a compiled function. The last gives states of equal setups one setup, so the
    watch is a shared one.
    """

    __slots__ = ("_hash", "_key", "adapter", "backend", "groups", "plan", "recipe", "watch")

    def __init__(self, adapter: Adapter, recipe: Recipe, plan: Plan, groups: Members, backend: Backend) -> None:
        self.adapter = adapter
        self.recipe = recipe
        self.plan = plan
        self.groups = groups
        self.backend = backend
        self.watch = Watch(shared=True)
        self._key = (adapter, Opaque(recipe), plan, None if groups.plain else groups)
        self._hash = hash(self._key)

    @property
    def optimizer(self) -> Any:
        """The recipe's optimizer, with its groups resolved where it has some (S27), also if all parameters are alike in
        this model: in a changed one they need not be (S28)."""
        given: Any = self.recipe.optimizer
        return self.groups if is_spec(given) and given.groups else given

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Setup):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "scale_state", "running", "rngs", "step"),
    meta_fields=("setup",),
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class JaxState(ShownState):
    """A JAX model under training.

    Attributes:
        params: the master weights, a pytree in the policy's `param` dtype.
        opt_state: the optimizer's state, as optax made it, over float32 parameters.
        scale_state: the loss-scale state.
        running: running statistics and the model's own random streams.
        rngs: base keys of the random streams given to `init`; folded with the number of attempted steps.
        step: number of applied updates, int32 scalar.
        setup: what does not change: how to call the model, the recipe, and the backend.
    """

    params: Any
    opt_state: Any
    scale_state: LossScaleState
    running: Running
    rngs: dict[str, jax.Array]
    step: Any
    setup: Setup

    lagging: ClassVar[frozenset[int] | None] = None
    """Parameters known to have missed an update (S23), by number; None where it is not known, as inside a trace. It
    is no part of the pytree: `knowing` sets it on one object."""

    _layout: ClassVar[Any] = ...
    """What `layout` found, or was told; `...` before."""

    def knowing(self, lagging: frozenset[int] | None, layout: Layout | EllipsisType | None = ...) -> JaxState:
        """This very state, with `lagging` known, and `layout` where it is given."""
        object.__setattr__(self, "lagging", lagging)
        if layout is not ...:
            object.__setattr__(self, "_layout", layout)
        return self

    @property
    def layout(self) -> Layout | None:
        """Where the arrays lie, if on several devices and known; looked up once for an object."""
        if self._layout is ...:
            object.__setattr__(self, "_layout", layout_of(jax.tree.leaves(self)))
        found: Layout | None = self._layout
        return found

    @property
    def watch(self) -> Watch:
        """When the host looks whether the scale is stuck (S17); see `Setup`."""
        return self.setup.watch

    _moved: ClassVar[Running | None] = None
    """Where the last call of `value_and_grad` on this very object left the streams."""
    _traced: ClassVar[tuple[Any, Running] | None] = None
    """The same of the last call inside a trace, which only counts in that trace."""

    def note(self, running: Running) -> None:
        """Remember how far the streams have come, for the next call on this object (S12)."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((running.streams, running.draws))):
            object.__setattr__(self, "_traced", (compat.trace_state(), running))
        else:
            object.__setattr__(self, "_moved", running)

    def continued(self) -> JaxState:
        """The state with its streams where the last call on it left them; itself, if there was none."""
        moved = self._moved
        if self._traced is not None and self._traced[0] == compat.trace_state():
            moved = self._traced[1]
        return self if moved is None else with_streams(self, moved)

    @property
    def backend(self) -> Backend:
        return self.setup.backend

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def groups(self) -> Members:
        """Which parameter has which hyperparameters (S27)."""
        return self.setup.groups

    @property
    def model(self) -> Any:
        """The current model in its native form, around this state's arrays.

        A compiled step donates them, so use the model, or copy it, before the next step.
        """
        return self.setup.adapter.join(self.params, self.running)

    @property
    def attempts(self) -> Any:
        """Number of steps tried, skipped ones included, int32 scalar."""
        return self.step + self.scale_state.skipped

    def _place(self) -> tuple[str, int]:
        leaves = jax.tree.leaves(self.params)
        return _device(leaves[0]), sum(int(np.prod(jnp.shape(leaf))) for leaf in leaves)

    def _number(self, value: Any) -> str:
        if isinstance(value, jax.core.Tracer):
            return "traced"
        if isinstance(value, jax.Array) and value.is_deleted():
            return "donated"
        return plain_number(value) if hasattr(value, "item") else str(value)


def with_streams(state: JaxState, running: Running) -> JaxState:
    """A state with the random streams of `running`, and all else its own."""
    own = state.running._replace(streams=running.streams, draws=running.draws)
    return dataclasses.replace(state, running=own).knowing(state.lagging, state.layout)


def continue_streams(state: JaxState, gradients: Gradients) -> JaxState:
    """The state with its random streams where the call of `value_and_grad` that made `gradients` left them.

    Two calls of `value_and_grad` on one state draw two masks by themselves, also inside one `jax.jit`. A function
    that is compiled once and called again, or the body of a `jax.lax.scan`, knows of its arguments alone: there the
    streams have to go in and come out.

    Args:
        state: the state that `value_and_grad` was called with.
        gradients: what the call returned.

    Returns:
        A state that differs in its streams alone, with the structure of `state`.

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
    return with_streams(state, gradients.running)


def create(
    parts: Parts, recipe: Recipe, rngs: dict[str, jax.Array], scale_state: LossScaleState, backend: Backend
) -> JaxState:
    """A fresh state; every array is copied, so that donating it never deletes the user's.

    Raises:
        ModelError, PolicyError, UnsupportedError: what the recipe asks for and this model cannot honour (S20).
    """
    named = named_leaves(parts.params)
    refusals.check_parameters([(path, dtype_name(leaf)) for path, leaf in named.items()], recipe)
    plan = recipe.policy.plan(module_paths(parts), backend="jax")
    groups = members(recipe, named, lambda: leaves_of(parts), backend="jax", modules=lambda: module_paths(parts))
    setup = Setup(parts.adapter, recipe, plan, groups, backend)
    named_leaves(parts.running)
    params = fresh(parts.params)
    run, wide = transformation(setup.optimizer), widened(params)
    opt_state = fresh(run.init(wide))
    if not is_spec(recipe.optimizer):
        check_outermost(recipe.optimizer, opt_state)
        check_extra(run, opt_state, wide)
    state = JaxState(
        params=params,
        opt_state=opt_state,
        scale_state=scale_state,
        running=fresh(parts.running),
        rngs=fresh(rngs),
        step=jnp.array(0, jnp.int32),
        setup=setup,
    )
    whole: JaxState = settled(state, jax.tree.leaves(params))
    return whole.knowing(frozenset())


def export(state: JaxState) -> dict[str, np.ndarray[Any, Any]]:
    """Every array of the state by name, on the host; PRNG keys as their data.

    Raises:
        CheckpointError: the state was donated to a step, before or meanwhile.
    """
    try:
        return {name: _on_host(leaf) for name, leaf in _arrays(state).items()}
    except (RuntimeError, ValueError) as error:
        check_held(state, error)
        raise


def check_held(state: JaxState, error: Exception | None = None) -> None:
    """Refuse a state whose arrays are gone.

    Raises:
        CheckpointError: it was donated to a step.
    """
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise CheckpointError(
            "this state was donated to a step, so its arrays are gone. Save the state that the step returned, before "
            "the next step begins; from another thread, with train_step(..., donate=False), which keeps both."
        ) from error


def named_arrays(state: JaxState) -> dict[str, Any]:
    """The arrays themselves, by the names of `export`."""
    return _arrays(state)


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    """A copy on the host, gathered where several processes hold it; then each of them calls this."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    return to_numpy(leaf)


def replaced(state: JaxState, arrays: Mapping[str, Any]) -> JaxState:
    """The state with its arrays replaced by those of the same names, with dtypes and placement kept.

    NumPy's are whole, JAX's already lie where they belong.
    """
    names = iter(_arrays(state))
    leaves, structure = jax.tree.flatten(_tree(state))
    new = jax.tree.unflatten(structure, [_like(leaf, arrays[next(names)]) for leaf in leaves])
    return dataclasses.replace(
        state,
        params=new["model"],
        opt_state=new["optimizer"],
        scale_state=new["loss_scale"],
        running=Running(new["running"], new["rng"]["model"], new["rng"]["draws"]),
        rngs=new["rng"]["given"],
        step=new["step"],
    ).knowing(lagging(new["optimizer"]))


def _tree(state: JaxState) -> dict[str, Any]:
    """The state as one tree whose paths are the names in a checkpoint."""
    return {
        "model": state.params,
        "optimizer": state.opt_state,
        "loss_scale": state.scale_state,
        "running": state.running.statistics,
        "rng": {"model": state.running.streams, "given": state.rngs, "draws": state.running.draws},
        "step": state.step,
    }


def _arrays(state: JaxState) -> dict[str, Any]:
    return named_leaves(_tree(state))


def _like(leaf: Any, array: Any) -> jax.Array:
    new: jax.Array
    if isinstance(array, jax.Array):
        return array
    if not leaf.is_fully_addressable:  # every process has the whole, and puts its part on its devices
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


def _device(leaf: Any) -> str:
    if isinstance(leaf, jax.core.Tracer):
        return "traced"
    if not isinstance(leaf, jax.Array):
        return type(leaf).__name__
    devices: Any = leaf.sharding.device_set
    return ", ".join(sorted(f"{device.platform}:{device.id}" for device in devices))
