"""A policy's spelling is taken wherever polyamp and polyamp_jax take a policy: one row for each public function."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import polyamp
import polyamp_jax
from polyamp.errors import PolicyError
from tests.fixtures.spellings import taking_a_policy

X = jnp.ones((2, 2))
PRODUCT = (lambda params, x: x @ params["w"], {"w": X})


def mean_loss(model: Any, x: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(x), x)


def _float8_plan(policy: Any) -> str:
    """Its error, which names the policy as it was read: that of this table has no products in 8 bits."""
    with pytest.raises(polyamp.ArgumentError) as caught:
        polyamp.float8_plan(PRODUCT, policy, X)
    return str(caught.value)


ROWS: dict[str, Any] = {
    "Policy.of": polyamp.Policy.of,
    "LossScaler.for_policy": polyamp.LossScaler.for_policy,
    "Recipe": lambda policy: polyamp.Recipe(policy=policy),
    "explain": lambda policy: polyamp.explain(jnp.exp, policy, X),
    "float8_plan": _float8_plan,
    "find_nonfinite": lambda policy: polyamp.find_nonfinite(mean_loss, policy, PRODUCT, X),
    "lint": lambda policy: polyamp.lint({"kernel": X}, policy=policy).findings,
    "polyamp_jax.autocast": lambda policy: str(polyamp_jax.autocast(lambda x: x @ x, policy)(X).dtype),
    "polyamp_jax.explain": lambda policy: polyamp_jax.explain(jnp.exp, policy, X),
}


def test_every_function_has_a_row() -> None:
    own = {f"polyamp_jax.{name}" for name in taking_a_policy(polyamp_jax)}
    made_by_polyamp = {"CastingReport"}
    assert (taking_a_policy(polyamp) | own) - made_by_polyamp == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_spelling_is_taken_and_a_slip_is_named(name: str) -> None:
    assert ROWS[name]("fp16") == ROWS[name](polyamp.Policy("fp16"))
    with pytest.raises(PolicyError, match="mixed_float16"):
        ROWS[name]("mixed_flaot16")


@pytest.mark.parametrize("name", [name for name in ROWS if name != "Recipe"])
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=r"Pass recipe\.policy"):
        ROWS[name](polyamp.Recipe(policy="fp16"))
