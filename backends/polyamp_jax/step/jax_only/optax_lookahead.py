"""Support for `optax.lookahead` in a recipe: a transformation that stores the slow parameters in its state.

optax's own transformation takes pairs of fast and slow parameters (`optax.LookaheadParams`). A model contains only the
fast ones.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import optax

from polyamp.errors import UnsupportedError

LOOKAHEAD_STATE: Final[type] = optax.LookaheadState


class SlowParametersState(NamedTuple):
    """State of `optax.lookahead` in a recipe.

    Attributes:
        slow: the slow parameters, for evaluation.
        state: optax's own.
    """

    slow: Any
    state: Any


def is_lookahead(optimizer: Any) -> bool:
    """Return whether a transformation is the result of `optax.lookahead`. A nested lookahead does not count."""
    update = getattr(optimizer, "update", None)
    made_by = getattr(update, "__qualname__", "").partition(".")[0]
    return made_by == "lookahead" and str(getattr(update, "__module__", "")).partition(".")[0] == "optax"


def slow_parameters_transformation(lookahead: Any) -> Any:
    """Return the transformation of the fast parameters.

    Args:
        lookahead: the result of `optax.lookahead`.
    """

    def init(params: Any) -> SlowParametersState:
        return SlowParametersState(params, lookahead.init(optax.LookaheadParams.init_synced(params)))

    def update(grads: Any, state: SlowParametersState, params: Any) -> tuple[Any, SlowParametersState]:
        pair = optax.LookaheadParams(fast=params, slow=state.slow)
        updates, own = lookahead.update(grads, state.state, pair)
        return updates.fast, SlowParametersState(optax.apply_updates(state.slow, updates.slow), own)

    return optax.GradientTransformation(init, update)


def check_outermost(optimizer: Any, opt_state: Any) -> None:
    """Reject a lookahead inside another transformation, which would receive the parameter pairs too.

    Raises:
        UnsupportedError: explains the supported form.
    """
    if is_lookahead(optimizer):
        return
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LOOKAHEAD_STATE))
    if any(isinstance(node, LOOKAHEAD_STATE) for node in nodes):
        raise UnsupportedError(
            "optax.lookahead inside of another transformation: it is given pairs of fast and slow parameters, which "
            "the transformations around it do not take. Put it outermost: optax.lookahead(optax.chain(...), "
            "sync_period=..., slow_step_size=...)."
        )
