"""`JaxBackend`: the `Backend` protocol for JAX. The modules of this package implement its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp.backend_parts import BackendParts
from polyamp.contract.backend import Backend, BackendInfo, ValueAndGrad
from polyamp.contract.harness import Harness
from polyamp.errors import GradientError, PolyampError, UnsupportedError
from polyamp.float_formats import FLOAT_DTYPES
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, LossFunction, StepFunction
from polyamp.rules import step_checks
from polyamp.rules.refresh import RefreshPlan
from polyamp_jax import arrays
from polyamp_jax.arrays import XP, dtype_name, named_leaves
from polyamp_jax.distributed.jax_only.sharding_layout import gather_array, scalar_placement
from polyamp_jax.distributed.replicas import check_axis_name
from polyamp_jax.losses import JaxLosses
from polyamp_jax.models.adapter import random_keys
from polyamp_jax.models.libraries import adapt
from polyamp_jax.own_loop.native_scaler import native_scaler
from polyamp_jax.precision.autocast import autocast
from polyamp_jax.precision.op_list import check_policy
from polyamp_jax.precision.policy_module import engine_and_path, follows_layer_policy, is_policy_module, master_weights
from polyamp_jax.step import averages, error_hints, optimizer_metadata
from polyamp_jax.step import state as states_
from polyamp_jax.step import step as steps
from polyamp_jax.step.forward_backward import scale_loss_value
from polyamp_jax.step.grad_stats import global_norm_and_finite, unscale_leaf
from polyamp_jax.step.refresh import refresh_state


class JaxBackend(BackendParts):
    """JAX backend; implements `Backend`."""

    name = "jax"
    monitors_steps = True

    def __reduce__(self) -> str:
        return "BACKEND"  # keeps the singleton when a state that refers to it is copied or pickled

    xp = XP
    losses = JaxLosses()
    to_numpy = staticmethod(arrays.to_numpy)
    cast = staticmethod(arrays.cast)
    changes_op_rules = True
    has_float8_products = True
    apply_gradients = staticmethod(steps.apply_gradients)
    export_state = staticmethod(states_.export_arrays)
    import_state = staticmethod(states_.replace_arrays)

    def info(self) -> BackendInfo:
        return BackendInfo("jax", jax.__version__, tuple(map(arrays.device_name, jax.devices())))

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        scalar = jnp.array(value, dtype)
        if isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer) and like.committed:
            return jax.device_put(scalar, scalar_placement(like))
        return scalar

    def is_concrete(self, array: Any) -> bool:
        return not isinstance(array, jax.core.Tracer)

    def native_policy(self, policy: Policy) -> Any:
        """Return a function transform: `policy.native("jax")(fn_or_model)` is `policy.autocast(fn_or_model)`.

        >>> import jax.numpy as jnp, polyamp
        >>> cast = polyamp.Policy(compute="bfloat16", output="float32").native("jax")
        >>> float(cast(lambda x: x @ x)(jnp.full((2, 2), 1.001))[0, 0])
        2.0
        """
        check_policy(policy)
        return functools.partial(self.autocast, policy=policy)

    def native_scaler(self, scaler: LossScaler, **options: Any) -> Any:
        """Return a function transform: `scaler.native("jax")(fun)` is
        `polyamp_jax.scaled_value_and_grad(fun, scaler)`.
        """
        return native_scaler(scaler, **options)

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        return autocast(target, policy)

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        return scale_loss_value(loss, scale, what="scale()")[0]

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(grads)
        step_checks.check_any_gradient(leaves, who="unscale()")
        for leaf in leaves:
            if dtype_name(leaf) not in FLOAT_DTYPES:
                raise GradientError(f"gradients must be floating arrays. Received: {dtype_name(leaf)}.")
        unscaled, finite = _unscale_leaves(leaves, scale)
        return jax.tree.unflatten(structure, unscaled), finite

    def regularization(self, model: Any) -> Any:
        if is_policy_module(model):
            return engine_and_path(model)[0].adapter.regularization(model)
        return adapt(model).adapter.regularization(model) if follows_layer_policy(model) else jnp.zeros((), jnp.float32)

    def parameters(self, model: Any) -> dict[str, Any]:
        return master_weights(model) if is_policy_module(model) else named_leaves(adapt(model).params)

    def init(self, model: Any, recipe: Recipe, **options: Any) -> states_.JaxState:
        """Create a new training state.

        Args:
            model: see `polyamp_jax.models.libraries.ACCEPTED_MODELS`. Its arrays are copied.
            recipe: the recipe.
            **options:
                `rngs`: the seeds or keys of the model's random streams: by name for linen and for functions (as
                keyword arguments), a single one for haiku (`rng`) and equinox (`key`). An nnx module advances its own
                streams. One that takes them as an argument (`__call__(x, rngs)`) receives those of `rngs`, seeds by
                name or an `nnx.Rngs`: call `model(x)` in `loss_fn`.
                `axis_name`: map an equinox module over the batch axis.
        """
        step_checks.check_options(options, ("rngs", "axis_name"), function="init", backend=self.name)
        parts = adapt(model, axis_name=options.get("axis_name"))
        if not parts.adapter.applies_policy:
            check_policy(recipe.policy)
        rngs = random_keys(options.get("rngs"), parts.adapter)
        return states_.create_state(parts, recipe, rngs, recipe.loss_scaler.init(self.name), self)

    def hand_back(self, consumed: states_.JaxState, state: states_.JaxState) -> None:
        """Give a donated state the arrays of the state that its step made."""
        if states_.is_donated(consumed):
            consumed.take_arrays(state)

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        """Create the complete training step as one function.

        Args:
            loss_fn: the loss.
            recipe: the recipe.
            **options:
                `compile` (True): wrap in `jax.jit`.
                `donate` (True): the step consumes its input state and reuses its memory; False keeps the input state
                valid, also when a step is interrupted.
                `axis_name`: inside `pmap`, or `shard_map` with `check_vma=False`, the axes of the replicas, a name or
                a tuple of names. A `shard_map` with `check_vma=True` needs none.
        """
        accepted = ("compile", "donate", "axis_name", "weight", "monitor")
        step_checks.check_options(options, accepted, function="train_step", backend=self.name)
        axis_name = options.get("axis_name")
        check_axis_name(axis_name)
        compiled, donate = options.get("compile", True), options.get("donate", True)
        monitor = options.get("monitor")
        watch = None
        if monitor is not None and (monitor.activations or monitor.products):
            from polyamp_jax.observe.jax_only.tagged_figures import TaggedFigures

            watch = TaggedFigures(monitor)
        return steps.JaxTrainStep(
            loss_fn,
            compiled=compiled,
            donate=donate,
            axis_name=axis_name,
            weight=options.get("weight"),
            monitor=monitor,
            watch=watch,
        )

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        """Create the first half of the step: loss and gradients. `axis_name`: see `train_step`.

        `compile=False` leaves compilation to the caller's `jax.jit`. The n-th call on one state draws the masks of
        the n-th micro-batch of a window (S12). For calls inside your own compiled function, see
        `polyamp_jax.continue_streams`.
        """
        accepted = ("compile", "axis_name", "weight")
        step_checks.check_options(options, accepted, function="value_and_grad", backend=self.name)
        axis_name = options.get("axis_name")
        check_axis_name(axis_name)
        compiled, weight = options.get("compile", True), options.get("weight")
        return steps.value_and_grad(loss_fn, compiled=compiled, axis_name=axis_name, weight=weight)

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        return [(name, gather_array(leaf)) for name, leaf in named_leaves(gradients.values).items()]

    def optimizer_settings(self, state: Any) -> dict[str, Any]:
        return optimizer_metadata.optimizer_metadata(state.recipe.optimizer)

    def setting_of(self, state: Any, name: str) -> str | None:
        return optimizer_metadata.optimizer_setting(state.recipe.optimizer, name)

    def explain_error(self, error: Exception, states: Sequence[Any], batch: Any) -> PolyampError | None:
        return error_hints.explain_error(error, batch, casts=any(state.setup.plan.cast for state in states))

    def refresh(self, state: Any, model: Any, plan: RefreshPlan) -> states_.JaxState:
        try:
            return refresh_state(state, model, plan)
        except Exception as error:
            steps.refuse_deleted_states([state], error)
            raise

    def averaged(self, state: Any) -> AbstractContextManager[Any]:
        states_.check_not_donated(state)
        return averages.averaged(state)

    def averaged_model(self, state: Any) -> Any:
        states_.check_not_donated(state)
        return averages.averaged_model(state)

    def library_harness(self, library: str) -> Harness:
        if library != "keras":
            raise UnsupportedError(f"the library of a harness must be 'keras'. Received: {library!r}.")
        from polyamp_jax.keras_harness import KerasJaxHarness

        return KerasJaxHarness()

    def testing(self) -> Harness:
        from polyamp_jax.harness import JaxHarness

        return JaxHarness()


BACKEND: Final[Backend] = JaxBackend()
"""The backend itself, which `polyamp` finds by its entry point."""


@jax.jit
def _unscale_leaves(leaves: list[Any], scale: Any | None) -> tuple[list[Any], Any]:
    unscaled = [unscale_leaf(leaf, scale) for leaf in leaves]
    return unscaled, global_norm_and_finite(unscaled)[1]
