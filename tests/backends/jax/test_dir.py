"""`dir` of the package and of a state: what users need, and no internals."""

from __future__ import annotations

import pydoc
import re

import jax.numpy as jnp

import polyamp
import polyamp_jax

COMMON = ["backend", "groups", "model", "recipe", "scale_state", "step"]


def test_the_packages_names_are_its_public_ones() -> None:
    assert dir(polyamp_jax) == sorted(polyamp_jax.__all__)


def test_a_states_names_are_what_users_need() -> None:
    state = polyamp.init(
        (lambda params, x: x @ params["w"], {"w": jnp.ones((2, 1))}), polyamp.Recipe(optimizer=polyamp.sgd(0.1))
    )
    shown = [name for name in dir(state) if not name.startswith("__")]
    assert shown == sorted([*COMMON, "attempts", "averages", "opt_state", "params", "rngs", "running", "setup"])
    assert all(hasattr(state, name) for name in shown)
    listed = set(re.findall(r"^ \|  (\w+)(?:\(| =|$)", pydoc.plain(pydoc.render_doc(state)), re.MULTILINE))
    internals = {name for name in type.__dir__(type(state)) if not name.startswith("_")} - set(shown)
    assert listed & internals == set(), "help lists internals"
    assert internals, "there is something to hide"
