"""Optimizer specs as optax transformations with PyTorch's formulas. Called by `state` and `step`.

A native optax optimizer passes as it is. Where optax has torch's formula it is used as it stands. Two differ, and there
a small transformation runs the spec's own formula: Adagrad (epsilon inside the root, no decay of the rate) and Adam,
whose bias correction optax computes as `1 - b2**count` in float32, 1e-5 off at the first steps. That alone put the
digits transformer 3e-3 away from torch within 100 steps; with the formula it stays within 1e-6.
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
from polyamp.recipe.members import Members
from polyamp.recipe.optimizers import SGD, SPECS, Adagrad, Adam, AdamW, Lion, OptimizerSpec, RMSprop, is_spec
from polyamp_jax.arrays import XP, chosen, conform, made_first
from polyamp_jax.step.extra_arguments import NOTHING, Asked, given_extra
from polyamp_jax.step.lookahead import is_lookahead, with_slow_parameters


def transformation(optimizer: Any) -> Any:
    """The `optax.GradientTransformation` of a spec, or what runs its own formula; a native one as it is.

    Of `Members` (S27) what runs the formulas, with each parameter's own numbers as constants of the one program.

    Raises:
        UnsupportedError: neither.
    """
    if isinstance(optimizer, Members):
        return _Formula(tuple(member.whole for member in optimizer.each()))
    if is_spec(optimizer):
        return _from_spec(optimizer)
    if is_lookahead(optimizer):
        return with_slow_parameters(optimizer)
    if callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None)):
        return optimizer
    names = ", ".join(spec.__name__.lower() for spec in SPECS)
    raise UnsupportedError(
        f"optimizer must be one of polyamp's specs ({names}) or an optax.GradientTransformation on the jax backend. "
        f"Received: {type(optimizer).__module__}.{type(optimizer).__qualname__}."
    )


def widened(params: Any) -> Any:
    """Parameters as the optimizer sees them: at least float32, so that 16-bit parameters have float32 moments."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)


@functools.cache
def _from_spec(spec: OptimizerSpec) -> Any:
    match spec:
        case SGD():
            parts = [_l2(spec.weight_decay), _momentum(spec.momentum, nesterov=spec.nesterov)]
        case RMSprop():
            scaled = optax.scale_by_stddev if spec.centered else optax.scale_by_rms
            root = scaled(decay=spec.alpha, eps=spec.eps, eps_in_sqrt=False)
            parts = [_l2(spec.weight_decay), root, _momentum(spec.momentum)]
        case Lion():
            parts = [optax.scale_by_lion(*spec.betas), optax.add_decayed_weights(spec.weight_decay)]
        case Adam() | AdamW() | Adagrad():
            return _Formula((spec,))
    return optax.chain(*parts, optax.scale_by_learning_rate(lambda count: spec.rate(count, XP)))


def _l2(weight_decay: float) -> Any:
    return optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()


def _momentum(momentum: float, *, nesterov: bool = False) -> Any:
    return optax.trace(momentum, nesterov=nesterov) if momentum else optax.identity()


class FormulaState(NamedTuple):
    """State of a transformation that runs `spec.update`.

    Attributes:
        count: updates that the state took, int32 scalar; schedules follow it.
        missed: int32 vector: how many of them each parameter did not take, in the order of the parameters' leaves
            (S23).
        slots: the spec's slot name -> pytree of arrays like the parameters.
    """

    count: Any
    missed: Any
    slots: dict[str, Any]


def updated(
    optimizer: Any,
    grads: Any,
    opt_state: Any,
    params: Any,
    *,
    even: bool = False,
    finite: Any | None = None,
    asked: Asked = NOTHING,
    skipped: Any = None,
) -> tuple[Any, Any]:
    """One update: the new parameters and the optimizer's new state, or the old ones where the update is skipped.

    A parameter without a gradient, and what the optimizer keeps for it, stay as they are (S23): of a native
    transformation what lies in its state under the parameter's own path. Such a transformation hears of a gradient of
    zeros, and what it counts for all parameters together counts on.

    Args:
        optimizer: a spec, a native transformation, or the members of a spec with groups.
        grads: float32 gradients like the parameters, None where there is none.
        opt_state: its state.
        params: the parameters, in their own dtypes, with what the forward pass wrote to them (S12).
        even: known beforehand: no parameter that has a gradient has missed an update. Then all share one number.
        finite: whether the update is applied, boolean scalar; None: it is (S12).
        asked: what a native transformation may ask for beside the gradients.
        skipped: the parameters where the update is skipped; None: `params`.

    Raises:
        ModelError: a native transformation changes the structure of its state.
        GradientError: it asks for the value of the loss, which the gradients do not hold.
    """
    wide = widened(params)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    given = [grad is not None for grad in like(grads, params)]
    whole = jax.tree.map(lambda w, g: jnp.zeros_like(w) if g is None else g, wide, grads)
    run: Any = transformation(optimizer)
    if isinstance(run, _Formula):
        made, new_state = run.updated(whole, opt_state, wide, given=given, even=even, finite=finite)
    else:
        updates, new_state = given_extra(run, whole, opt_state, wide, asked)
        new_state = chosen(finite, conform(new_state, opt_state, what="the optimizer's state"), opt_state)
        made = jax.tree.map(lambda w, u: w + u, wide, updates)
    old = params if skipped is None else skipped
    new = chosen(finite, jax.tree.map(lambda before, w: w.astype(before.dtype), params, made), old)
    if all(given):
        return new, new_state
    idle = {path for path, has in zip(paths, given, strict=True) if not has}
    return _kept(idle, paths, new, chosen(finite, params, old)), _kept(idle, paths, new_state, opt_state)


def like(tree: Any, params: Any) -> list[Any]:
    """The entries of a tree like the parameters, in the order of their leaves, None included."""
    structure: Any = jax.tree.structure(params)
    entries: list[Any] = structure.flatten_up_to(tree)
    return entries


def lagging(opt_state: Any) -> frozenset[int]:
    """Numbers of the parameters that missed an update, in the order of their leaves; read on the host."""
    if not isinstance(opt_state, FormulaState):
        return frozenset()
    return frozenset(np.flatnonzero(np.asarray(opt_state.missed)).tolist())


def _kept(idle: Collection[Any], paths: Sequence[Any], new: Any, old: Any) -> Any:
    """`new`, with what belongs to the parameters at the `idle` paths as it is in `old`.

    A leaf belongs to the parameter whose path its own path ends with, the longest where there are several.
    """
    known = set(paths)

    def one(path: Any, after: Any, before: Any) -> Any:
        owner = next((path[n:] for n in range(len(path) + 1) if path[n:] in known), None)
        return before if owner in idle else after

    return jax.tree_util.tree_map_with_path(one, new, old)


class _Formula(NamedTuple):
    """Specs' own formula, in the place of a gradient transformation.

    Attributes:
        specs: of each parameter, in the order of the leaves; or one for all. They are of one class.
    """

    specs: tuple[OptimizerSpec, ...]

    def of(self, size: int) -> list[OptimizerSpec]:
        """The spec of each of `size` parameters."""
        return list(self.specs) * (size if len(self.specs) == 1 else 1)

    def init(self, params: Any) -> FormulaState:
        leaves, structure = jax.tree.flatten(params)
        specs = self.of(len(leaves))
        slots = {
            slot: jax.tree.unflatten(
                structure,
                [jnp.full_like(leaf, spec.initial(slot)) for leaf, spec in zip(leaves, specs, strict=True)],
            )
            for slot in self.specs[0].slots
        }
        missed = jnp.zeros(len(leaves), jnp.int32)
        return FormulaState(jnp.zeros([], jnp.int32), missed, slots)

    def updated(
        self,
        grads: Any,
        state: FormulaState,
        params: Any,
        *,
        given: Sequence[bool],
        even: bool,
        finite: Any | None,
    ) -> tuple[Any, FormulaState]:
        """The new parameters, which are still to be chosen where `finite`, and the chosen state.

        A parameter is made of the slots that were chosen: of those that the formula makes, the old slot would be read
        once more after the new one has its place, and XLA would copy all of them first.
        """
        specs, names = self.of(len(given)), self.specs[0].slots
        wide = jnp.result_type(jnp.float32, *jax.tree.leaves(params))  # of rates and counts: the masters' (S1)
        count = state.count if wide == jnp.float32 else state.count.astype(wide)  # of an integer rates are float32
        rates = {spec: spec.rate(count, XP) for spec in dict.fromkeys(specs)}
        numbers = self._numbers(state, specs, rates, wide, even=even)
        made: list[Any] = []
        slots: dict[str, list[Any]] = {slot: [] for slot in names}
        columns = [jax.tree.leaves(state.slots[slot]) for slot in names]
        leaves = zip(specs, jax.tree.leaves(params), jax.tree.leaves(grads), numbers, *columns, strict=True)
        for spec, param, grad, number, *row in leaves:
            old = dict(zip(names, row, strict=True))
            keep = functools.partial(_chosen_slots, finite, old)
            new, own = spec.update(XP, param, grad, old, rates[spec], number, keep=keep)
            made.append(new)
            for slot in names:
                slots[slot].append(own[slot])
        structure = jax.tree.structure(params)
        missed = state.missed
        if not all(given):
            missed = chosen(finite, missed + np.logical_not(given).astype(np.int32), missed)
        return jax.tree.unflatten(structure, made), FormulaState(
            chosen(finite, state.count + 1, state.count),
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
        even: bool,
    ) -> list[Any]:
        """The `count` of `spec.update` for each parameter.

        One number for all leaves XLA equal programs for tensors of equal shape, which it compiles once: 200 tensors
        compile several times faster than with numbers of their own.
        """
        if even:
            return [(state.count + 1).astype(wide)] * len(specs)
        taken = (state.count + 1 - state.missed).astype(wide)
        # made before they are taken apart, or each tensor's loop would make its own again
        columns = made_first([spec.corrections(XP, rate, taken) for spec, rate in rates.items()])
        own = dict(zip(rates, columns, strict=True))
        return [{name: column[n] for name, column in own[spec].items()} for n, spec in enumerate(specs)]


def _chosen_slots(finite: Any | None, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {slot: chosen(finite, array, old[slot]) for slot, array in new.items()}
