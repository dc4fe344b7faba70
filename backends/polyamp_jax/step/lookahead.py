"""`optax.lookahead` in a recipe: a transformation of the parameters alone, which keeps the slow ones in its state.

optax's own is given pairs of fast and slow parameters (`optax.LookaheadParams`), of which a model has the fast ones.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import optax

from polyamp.errors import UnsupportedError

STATE: Final[type] = optax.LookaheadState


class SlowState(NamedTuple):
    """State of `optax.lookahead` in a recipe.

    Attributes:
        slow: the slow parameters, for evaluation.
        state: optax's own.
    """

    slow: Any
    state: Any


def is_lookahead(optimizer: Any) -> bool:
    """Whether a transformation is what `optax.lookahead` returned; one inside of another is not."""
    update = getattr(optimizer, "update", None)
    made_by = getattr(update, "__qualname__", "").partition(".")[0]
    return made_by == "lookahead" and str(getattr(update, "__module__", "")).partition(".")[0] == "optax"


def with_slow_parameters(lookahead: Any) -> Any:
    """The transformation of the fast parameters.

    Args:
        lookahead: what `optax.lookahead` returned.
    """

    def init(params: Any) -> SlowState:
        return SlowState(params, lookahead.init(optax.LookaheadParams.init_synced(params)))

    def update(grads: Any, state: SlowState, params: Any) -> tuple[Any, SlowState]:
        pair = optax.LookaheadParams(fast=params, slow=state.slow)
        updates, own = lookahead.update(grads, state.state, pair)
        return updates.fast, SlowState(optax.apply_updates(state.slow, updates.slow), own)

    return optax.GradientTransformation(init, update)


def check_outermost(optimizer: Any, opt_state: Any) -> None:
    """Refuse a lookahead inside of another transformation, which would be given the pairs too.

    Raises:
        UnsupportedError: says how to write it.
    """
    if is_lookahead(optimizer):
        return
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, STATE))
    if any(isinstance(node, STATE) for node in nodes):
        raise UnsupportedError(
            "optax.lookahead inside of another transformation: it is given pairs of fast and slow parameters, which "
            "the transformations around it do not take. Put it outermost: optax.lookahead(optax.chain(...), "
            "sync_period=..., slow_step_size=...)."
        )
