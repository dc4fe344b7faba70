"""`JaxBackend`: the `Backend` contract over JAX. Its parts live in the modules beside this one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.arrays import ArrayNamespace
from polyamp.contract.backend import Backend, BackendInfo, LossFunctions, ValueAndGrad
from polyamp.contract.harness import Harness
from polyamp.contract.parts import Parts
from polyamp.contract.report import CastingReport
from polyamp.errors import GradientError, PolyampError
from polyamp.recipe.policy import Policy
from polyamp.recipe.recipe import Recipe
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, LossFunction, StepFunction, StepResult
from polyamp.rules import refusals
from polyamp.rules.decide import Skip
from polyamp.rules.growing import Growth
from polyamp_jax.arrays import XP, cast, dtype_name, named_leaves, to_numpy
from polyamp_jax.losses import JaxLosses
from polyamp_jax.models.adapt import adapt
from polyamp_jax.models.random_keys import random_keys
from polyamp_jax.own_loop.scaled_value_and_grad import scaled_value_and_grad
from polyamp_jax.precision.autocast import autocast, explain
from polyamp_jax.precision.op_list import check_policy
from polyamp_jax.precision.reading import is_bound, masters_of
from polyamp_jax.step import failures, resuming
from polyamp_jax.step import state as states_
from polyamp_jax.step import step as steps
from polyamp_jax.step.forward_backward import scaled_loss
from polyamp_jax.step.layouts import scalar_placement, whole
from polyamp_jax.step.measure import norm_and_finite, unscaled_leaf
from polyamp_jax.step.refresh import refreshed
from polyamp_jax.step.replicas import check_axis_name

if TYPE_CHECKING:
    from polyamp.parity.observing import Observer
    from polyamp.porting.layouts.converter import Converter
    from polyamp.porting.states.layout import StateConverter


class JaxBackend:
    """`Backend` over JAX."""

    name = "jax"

    def __reduce__(self) -> str:
        return "BACKEND"  # the one object, also where a state that holds it is copied or pickled

    @property
    def xp(self) -> ArrayNamespace:
        return XP

    @property
    def losses(self) -> LossFunctions:
        return JaxLosses()

    def info(self) -> BackendInfo:
        return BackendInfo("jax", jax.__version__, tuple(f"{d.platform}:{d.id}" for d in jax.devices()))

    def scalar(self, value: float, dtype: str, *, like: Any = None) -> Any:
        scalar = jnp.array(value, dtype)
        if isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer) and like.committed:
            return jax.device_put(scalar, scalar_placement(like))
        return scalar

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return to_numpy(array)

    def is_concrete(self, array: Any) -> bool:
        return not isinstance(array, jax.core.Tracer)

    def cast(self, tree: Any, dtype: str, *, float64: bool = False) -> Any:
        return cast(tree, dtype, float64=float64)

    @property
    def porting(self) -> Converter:
        from polyamp_jax.porting.converter import CONVERTER

        return CONVERTER

    @property
    def observer(self) -> Observer:
        from polyamp_jax.observe.observer import OBSERVER

        return OBSERVER

    def native_policy(self, policy: Policy) -> Any:
        """A function transform: `policy.native("jax")(fn_or_model)` is `policy.autocast(fn_or_model)`.

        >>> import jax.numpy as jnp, polyamp
        >>> cast = polyamp.Policy(compute="bfloat16", output="float32").native("jax")
        >>> float(cast(lambda x: x @ x)(jnp.full((2, 2), 1.001))[0, 0])
        2.0
        """
        check_policy(policy)
        return functools.partial(self.autocast, policy=policy)

    def native_scaler(self, scaler: LossScaler, **options: Any) -> Any:
        """A function transform: `scaler.native("jax")(fun)` is `polyamp_jax.scaled_value_and_grad(fun, scaler)`."""
        refusals.check_options(options, ("argnums", "has_aux"), function="native", backend=self.name)
        return functools.partial(scaled_value_and_grad, scaler=scaler, **options)

    def autocast(self, target: Any, policy: Policy) -> Callable[..., Any]:
        return autocast(target, policy)

    def explain(self, target: Any, policy: Policy, *inputs: Any, strict: bool = False) -> CastingReport:
        return explain(target, policy, *inputs, strict=strict)

    def scale_loss(self, loss: Any, scale: Any | None) -> Any:
        return scaled_loss(loss, scale, what="scale()")[0]

    def unscale(self, grads: Any, scale: Any | None) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(grads)
        refusals.check_any(leaves, who="unscale()")
        for leaf in leaves:
            if dtype_name(leaf) not in refusals.FLOATING:
                raise GradientError(f"gradients must be floating arrays. Received: {dtype_name(leaf)}.")
        unscaled, finite = _unscale(leaves, scale)
        return jax.tree.unflatten(structure, unscaled), finite

    def regularization(self, model: Any) -> Any:
        return jnp.zeros((), jnp.float32)

    def parameters(self, model: Any) -> dict[str, Any]:
        return masters_of(model) if is_bound(model) else named_leaves(adapt(model).params)

    def init(self, model: Any, recipe: Recipe, **options: Any) -> states_.JaxState:
        """A fresh state.

        Args:
            model: see `polyamp_jax.models.adapt.ACCEPTED`. Its arrays are copied.
            recipe: the recipe.
            **options: `rngs`, the seeds or keys of the model's random streams: by name for linen and for functions
                (as keyword arguments), a single one for haiku (`rng`) and equinox (`key`). An nnx module moves its
                own streams on; one that takes them (`__call__(x, rngs)`) is passed those of `rngs`, seeds by name or an
                `nnx.Rngs`: call `model(x)` in `loss_fn`.
                `axis_name`: map an equinox module over the batch axis.
        """
        refusals.check_options(options, ("rngs", "axis_name"), function="init", backend=self.name)
        check_policy(recipe.policy)
        parts = adapt(model, axis_name=options.get("axis_name"))
        rngs = random_keys(options.get("rngs"), parts.adapter)
        return states_.create(parts, recipe, rngs, recipe.loss_scaler.init(self.name), self)

    def train_step(self, loss_fn: LossFunction, recipe: Recipe, **options: Any) -> StepFunction:
        """The whole step as one function.

        Args:
            loss_fn: the loss.
            recipe: the recipe.
            **options: `compile` (True): wrap in `jax.jit`. `donate` (True): the step consumes the state it is given,
                so that new arrays take the place of the old; False keeps both, also when a step is interrupted.
                `axis_name`: inside `pmap`, or `shard_map` with `check_vma=False`, the axes of the replicas, a name or
                a tuple of names; a `shard_map` that checks needs none.
        """
        accepted = ("compile", "donate", "axis_name", "weight")
        refusals.check_options(options, accepted, function="train_step", backend=self.name)
        axis_name = options.get("axis_name")
        check_axis_name(axis_name)
        compiled, donate = options.get("compile", True), options.get("donate", True)
        weight = options.get("weight")
        return steps.Step(loss_fn, compiled=compiled, donate=donate, axis_name=axis_name, weight=weight)

    def value_and_grad(self, loss_fn: LossFunction, **options: Any) -> ValueAndGrad:
        """The first half; `compile=False` leaves it to the caller's own `jax.jit`. `axis_name`: see `train_step`.

        The n-th call on one state draws the masks of the n-th micro-batch of a window (S12). Across calls of a
        function of your own that is compiled, see `polyamp_jax.continue_streams`.
        """
        accepted = ("compile", "axis_name", "weight")
        refusals.check_options(options, accepted, function="value_and_grad", backend=self.name)
        axis_name = options.get("axis_name")
        check_axis_name(axis_name)
        compiled, weight = options.get("compile", True), options.get("weight")
        return steps.value_and_grad(loss_fn, compiled=compiled, axis_name=axis_name, weight=weight)

    def apply_gradients(
        self, states: Sequence[Any], grads: Sequence[Gradients], skip: Skip
    ) -> tuple[list[Any], list[StepResult]]:
        return steps.apply_gradients(states, grads, skip)

    def named_gradients(self, gradients: Gradients) -> list[tuple[str, Any]]:
        return [(name, whole(leaf)) for name, leaf in named_leaves(gradients.values).items()]

    def in_parts(self, state: Any) -> AbstractContextManager[Parts]:
        from polyamp_jax.step.parts import in_parts

        return in_parts(state)

    def export_state(self, state: Any) -> dict[str, np.ndarray[Any, Any]]:
        return states_.export(state)

    def import_state(self, state: Any, arrays: Mapping[str, Any]) -> states_.JaxState:
        return states_.replaced(state, arrays)

    def optimizer_settings(self, state: Any) -> dict[str, Any]:
        return resuming.described(state.recipe.optimizer)

    def setting_of(self, state: Any, name: str) -> str | None:
        return resuming.setting_of(state.recipe.optimizer, name)

    def explained(self, error: Exception, states: Sequence[Any], batch: Any) -> PolyampError | None:
        return failures.explained(error, batch, casts=any(state.setup.plan.cast for state in states))

    @property
    def porting_states(self) -> StateConverter:
        from polyamp_jax.porting.states import STATES

        return STATES

    def described(self, state: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
        from polyamp.porting.states.described import text

        return text(state, arrays, self.porting, self.porting_states)

    def refresh(self, state: Any, model: Any, growth: Growth) -> states_.JaxState:
        try:
            return refreshed(state, model, growth)
        except Exception as error:
            steps.refuse_gone([state], error)
            raise

    def testing(self) -> Harness:
        from polyamp_jax.harness import JaxHarness

        return JaxHarness()


BACKEND: Final[Backend] = JaxBackend()


@jax.jit
def _unscale(leaves: list[Any], scale: Any | None) -> tuple[list[Any], Any]:
    unscaled = [unscaled_leaf(leaf, scale) for leaf in leaves]
    return unscaled, norm_and_finite(unscaled)[1]
