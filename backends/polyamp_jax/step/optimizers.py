"""Optimizer specs as optax transformations with PyTorch's formulas.

A native optax optimizer is used unchanged. SGD, RMSprop and Lion, for which optax has torch's formula, are chains of
optax. A small transformation runs the spec's own formula for all others, of which optax has another one:

- Adagrad: optax has epsilon inside the root and no decay of the rate.
- Adam: optax computes the bias correction as `1 - b2**count` in float32, which is 1e-5 off at the first steps. This
  alone led to a distance of 3e-3 from torch within 100 steps of the digits transformer; with the formula it stays
  within 1e-6.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizer_formulas.lion import Lion
from polyamp.recipe.optimizer_formulas.rmsprop import RMSprop
from polyamp.recipe.optimizer_formulas.sgd import SGD
from polyamp.recipe.optimizers import SPECS, OptimizerSpec, is_spec
from polyamp.rules.group_members import GroupMembers
from polyamp_jax import compat
from polyamp_jax.arrays import XP, conform_tree, materialize, path_name, select_if_finite
from polyamp_jax.step.jax_only.native_transformations import (
    NO_EXTRA_ARGUMENTS,
    OptaxExtraArguments,
    is_lookahead,
    slow_parameters_transformation,
    update_with_extra,
)


def make_transformation(optimizer: Any) -> Any:
    """Return the `optax.GradientTransformation` of a spec, or the one that runs the spec's own formula.

    A native transformation is returned unchanged. For `GroupMembers` (S27) the transformation runs the formulas, with
    each parameter's hyperparameters as constants of a single program.

    Raises:
        UnsupportedError: `optimizer` is neither a spec nor an optax transformation.
    """
    if isinstance(optimizer, GroupMembers):
        return _Formula(tuple(member.whole for member in optimizer.each()))
    if is_spec(optimizer):
        return _transformation_from_spec(optimizer)
    if is_lookahead(optimizer):
        return slow_parameters_transformation(optimizer)
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return optimizer
    names = ", ".join(spec.tag for spec in SPECS)
    raise UnsupportedError(
        f"optimizer must be one of polyamp's specs ({names}) or an optax.GradientTransformation on the jax backend. "
        f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
    )


def widen_parameters(params: Any) -> Any:
    """Cast parameters to at least float32 for the optimizer, so that 16-bit parameters have float32 moments."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)


@functools.cache
def _transformation_from_spec(spec: OptimizerSpec) -> Any:
    match spec:
        case SGD():
            parts = [
                _l2_transformation(spec.weight_decay),
                _momentum_transformation(spec.momentum, nesterov=spec.nesterov),
            ]
        case RMSprop():
            scaled = optax.scale_by_stddev if spec.centered else optax.scale_by_rms
            root = scaled(decay=spec.alpha, eps=spec.eps, eps_in_sqrt=False)
            parts = [_l2_transformation(spec.weight_decay), root, _momentum_transformation(spec.momentum)]
        case Lion():
            parts = [optax.scale_by_lion(*spec.betas), optax.add_decayed_weights(spec.weight_decay)]
        case _:
            return _Formula((spec,))
    return optax.chain(*parts, optax.scale_by_learning_rate(lambda count: spec.rate(count, XP)))


def _l2_transformation(weight_decay: float) -> Any:
    return optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()


def _momentum_transformation(momentum: float, *, nesterov: bool = False) -> Any:
    return optax.trace(momentum, nesterov=nesterov) if momentum else optax.identity()


class FormulaState(NamedTuple):
    """State of a transformation that runs `spec.update`.

    Attributes:
        count: number of updates of the state, int32 scalar; schedules follow it.
        missed: int32 vector: number of updates that each parameter missed, in the order of the parameters' leaves
            (S23).
        slots: the spec's slot name -> pytree of arrays like the parameters.
    """

    count: Any
    missed: Any
    slots: dict[str, Any]


def update_parameters(
    optimizer: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    even: bool = False,
    finite: Any | None = None,
    extra: OptaxExtraArguments = NO_EXTRA_ARGUMENTS,
    skipped: Any = None,
    trains: Sequence[Any] | None = None,
) -> tuple[Any, Any]:
    """Return the new parameters and optimizer state after one update, or the old ones if the update is skipped.

    A parameter without a gradient and its optimizer state do not change (S23). For a native transformation this is the
    part of the state under the parameter's own path. Such a transformation receives a gradient of zeros, and its
    counters shared by all parameters still advance.

    Args:
        optimizer: a spec, a native transformation, or the members of a spec with groups.
        grads: float32 gradients like the parameters, None for a parameter without one.
        opt_state: the optimizer's state.
        params: the parameters, in their own dtypes, including the writes of the forward pass (S12).
        even: True if no parameter that has a gradient is known to have missed an update, except those that `trains`
            has an entry for. All others then share one count.
        finite: whether the update is applied, boolean scalar; None: it is (S12).
        extra: extra arguments available to a native transformation.
        skipped: the parameters to return if the update is skipped; None: `params`.
        trains: for members of a spec with groups, whether each parameter takes this update, boolean scalar or None for
            True, in the order of the leaves (S27). One that does not is as without a gradient.

    Raises:
        ModelError: a native transformation changes the structure of its state.
        GradientError: it needs the value of the loss, which the gradients do not contain.
    """
    wide = widen_parameters(params)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    given = [grad is not None for grad in leaves_like(grads, params)]
    whole = jax.tree.map(lambda w, g: jnp.zeros_like(w) if g is None else g, wide, grads)
    run: Any = make_transformation(optimizer)
    if isinstance(run, _Formula):
        flags = [_both(finite, own) for own in trains or [None] * len(given)]
        made, new_state = run.apply(whole, opt_state, wide, given=given, even=even, finite=finite, flags=flags)
    else:
        updates, new_state = update_with_extra(run, whole, opt_state, wide, extra)
        new_state = select_if_finite(
            finite, conform_tree(new_state, opt_state, what="the optimizer's state"), opt_state
        )
        made = jax.tree.map(lambda w, u: w + u, wide, updates)
    old = params if skipped is None else skipped
    cast = jax.tree.map(lambda before, w: w.astype(before.dtype), params, made)
    if trains is not None:
        pairs = zip(trains, jax.tree.leaves(cast), jax.tree.leaves(params), strict=True)
        cast = jax.tree.unflatten(jax.tree.structure(params), [select_if_finite(*each) for each in pairs])
    new = select_if_finite(finite, cast, old)
    if all(given):
        return new, new_state
    idle = {path for path, has in zip(paths, given, strict=True) if not has}
    return _keep_idle(idle, paths, new, select_if_finite(finite, params, old)), _keep_idle(
        idle, paths, new_state, opt_state
    )


def leaves_like(tree: Any, params: Any) -> list[Any]:
    """Return the entries of a tree like the parameters, in the order of their leaves, including None."""
    structure: Any = jax.tree.structure(params)
    entries: list[Any] = structure.flatten_up_to(tree)
    return entries


def lagging_parameters(opt_state: Any) -> frozenset[int]:
    """Return the indices of the parameters that missed an update, in the order of their leaves. Reads on the host."""
    if not isinstance(opt_state, FormulaState):
        return frozenset()
    return frozenset(np.flatnonzero(np.asarray(opt_state.missed)).tolist())


def _both(finite: Any | None, trains: Any | None) -> Any | None:
    """Return the conjunction of two flags, of which None is True."""
    if finite is None or trains is None:
        return finite if trains is None else trains
    return finite & trains


def _keep_idle(idle: Collection[Any], paths: Sequence[Any], new: Any, old: Any) -> Any:
    """Return `new`, with the leaves that belong to the parameters at the `idle` paths taken from `old`.

    A leaf belongs to the parameter whose path is the longest suffix of the leaf's path.
    """
    known = set(paths)

    def one(path: Any, after: Any, before: Any) -> Any:
        owner = next((path[n:] for n in range(len(path) + 1) if path[n:] in known), None)
        return before if owner in idle else after

    return jax.tree_util.tree_map_with_path(one, new, old)


class _Formula(NamedTuple):
    """Transformation that runs the formula of its specs.

    Attributes:
        specs: the spec of each parameter, in the order of the leaves; or one for all. All are of one class.
    """

    specs: tuple[OptimizerSpec, ...]

    def spec_per_parameter(self, size: int) -> list[OptimizerSpec]:
        """Return the spec of each of `size` parameters."""
        return list(self.specs) * (size if len(self.specs) == 1 else 1)

    def init(self, params: Any) -> FormulaState:
        leaves, structure = jax.tree.flatten(params)
        specs = self.spec_per_parameter(len(leaves))
        slots = {
            slot: jax.tree.unflatten(
                structure,
                [_initial_slot(spec, slot, leaf) for leaf, spec in zip(leaves, specs, strict=True)],
            )
            for slot in self.specs[0].slots
        }
        missed = jnp.zeros(len(leaves), jnp.int32)
        return FormulaState(jnp.zeros([], jnp.int32), missed, slots)

    def apply(
        self,
        grads: Any,
        state: FormulaState,
        params: Any,
        *,
        given: Sequence[bool],
        even: bool,
        finite: Any | None,
        flags: Sequence[Any],
    ) -> tuple[Any, FormulaState]:
        """Return the new parameters, not yet selected, and the selected state: by `finite`, and a parameter's slots by
        its own entry of `flags`.

        A parameter is computed from the selected slots, not from the formula's new slots. Otherwise the old slot would
        be read again after the new one is stored in its place, and XLA would copy all of them first.
        """
        specs, names = self.spec_per_parameter(len(given)), self.specs[0].slots
        _check_whole(specs[0], params)
        wide = jnp.result_type(jnp.float32, *jax.tree.leaves(params))  # dtype of rates and counts: the masters' (S1)
        count = state.count if wide == jnp.float32 else state.count.astype(wide)  # an integer count gives float32 rates
        rates = {spec: spec.rate(count, XP) for spec in dict.fromkeys(specs)}
        waits = [flag is not finite for flag in flags]
        numbers = self._numbers(state, specs, rates, wide, shared=[even and not wait for wait in waits])
        made: list[Any] = []
        slots: dict[str, list[Any]] = {slot: [] for slot in names}
        columns = [jax.tree.leaves(state.slots[slot]) for slot in names]
        leaves = zip(specs, jax.tree.leaves(params), jax.tree.leaves(grads), numbers, flags, *columns, strict=True)
        for spec, param, grad, number, flag, *row in leaves:
            run = _update_in_trace if isinstance(param, jax.core.Tracer) else _update_parameter
            new, own = run(spec, param, grad, dict(zip(names, row, strict=True)), rates[spec], number, flag)
            made.append(new)
            for slot in names:
                slots[slot].append(own[slot])
        structure = jax.tree.structure(params)
        missed = state.missed
        if not all(given) or any(waits):
            took: Any = np.asarray(given)
            if any(waits):
                pairs = zip(given, waits, flags, strict=True)
                took = jnp.stack(
                    [jnp.asarray(has if flag is None or not wait else has & flag) for has, wait, flag in pairs]
                )
            missed = select_if_finite(finite, missed + (~took).astype(np.int32), missed)
        return jax.tree.unflatten(structure, made), FormulaState(
            select_if_finite(finite, state.count + 1, state.count),
            missed,
            {slot: jax.tree.unflatten(structure, own) for slot, own in slots.items()},
        )

    def _numbers(
        self,
        state: FormulaState,
        specs: Sequence[OptimizerSpec],
        rates: dict[OptimizerSpec, Any],
        wide: Any,
        *,
        shared: Sequence[bool],
    ) -> list[Any]:
        """Return the `count` argument of `spec.update` for each parameter: the state's where it is `shared`.

        With a shared count, tensors of equal shape have equal programs, which XLA compiles once: 200 tensors compile
        several times faster than with separate counts.
        """
        count = (state.count + 1).astype(wide)
        if all(shared):
            return [count] * len(specs)
        taken = (state.count + 1 - state.missed).astype(wide)
        # materialized before indexing; otherwise each tensor's loop would compute them again
        columns = materialize([spec.corrections(XP, rate, taken) for spec, rate in rates.items()])
        own = dict(zip(rates, columns, strict=True))
        return [
            count if together else {name: column[n] for name, column in own[spec].items()}
            for n, (spec, together) in enumerate(zip(specs, shared, strict=True))
        ]


def _check_whole(spec: OptimizerSpec, params: Any) -> None:
    """Raise if a formula that needs a parameter as a whole would see a shard of it, inside `shard_map`."""
    if spec.is_elementwise:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if axes := compat.varying_axes(leaf):
            raise UnsupportedError(
                f"{spec.tag} needs each parameter as a whole, and {path_name(path)!r} is divided over "
                f"{', '.join(sorted(map(str, axes)))} inside shard_map, where polyamp sees a shard alone. Give a step "
                "under jax.jit arrays with a NamedSharding, which XLA gathers, or use an elementwise optimizer such as "
                "polyamp.adamw."
            )


def _initial_slot(spec: OptimizerSpec, slot: str, leaf: Any) -> Any:
    shape = spec.slot_shape(slot, leaf.shape)
    if shape != leaf.shape:
        return jnp.full(shape, spec.initial(slot), leaf.dtype)
    return jnp.full_like(leaf, spec.initial(slot))  # sharded as the parameter


def _update_parameter(
    spec: OptimizerSpec, param: Any, grad: Any, slots: dict[str, Any], rate: Any, number: Any, finite: Any | None
) -> tuple[Any, dict[str, Any]]:
    """Return one parameter's new value, not yet selected by `finite`, and its selected slots."""
    keep = functools.partial(_select_slots, finite, slots)
    return spec.update(XP, param, grad, slots, rate, number, keep=keep)


_update_in_trace: Any = jax.jit(_update_parameter, static_argnums=0, inline=True)
"""`_update_parameter` inside a trace: the same operations, of which Python writes those of each shape only once."""


def _select_slots(finite: Any | None, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {slot: select_if_finite(finite, array, old[slot]) for slot, array in new.items()}
