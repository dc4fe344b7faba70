"""The table of JAX libraries: a row and a file in each room per library, and lookups that import none of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import pytest
from flax import linen, nnx

import polyamp
from polyamp_jax.models.adapter import ModelParts
from polyamp_jax.models.libraries import FUNCTIONS, LIBRARIES, Library, library_of
from polyamp_jax.observe.jax_only.library_observer import LibraryObserver
from polyamp_jax.porting.libraries.porting_library import PortingLibrary

ROWS = [*LIBRARIES, FUNCTIONS]


INTERPRETED = [library for library in ROWS if not library.applies_policy]
"""Those whose models are ported and observed here. Keras models are ported by polyamp_keras, and not observed."""


@pytest.mark.parametrize("library", INTERPRETED, ids=[library.name for library in INTERPRETED])
def test_each_library_has_its_file_in_each_room(library: Library) -> None:
    functions = [name for name in vars(PortingLibrary) if not name.startswith("_")]
    assert [name for name in functions if not callable(getattr(library.file_in("porting.libraries"), name, None))] == []
    assert isinstance(library.file_in("observe.library_observers").OBSERVER, LibraryObserver)
    assert callable(library.file_in("models.adapters").split_model)


def models() -> dict[str, Any]:
    transformed = hk.transform(lambda x: hk.Linear(2)(x))
    dense = linen.Dense(2)
    return {
        "equinox": eqx.nn.Linear(3, 2, key=jax.random.key(0)),
        "nnx": nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
        "linen": (dense, dense.init(jax.random.key(0), jax.numpy.ones((1, 3)))),
        "haiku": (transformed, transformed.init(jax.random.key(0), jax.numpy.ones((1, 3)))),
        "function": (lambda params, x: x @ params, jax.numpy.ones((3, 2))),
    }


def test_a_model_leads_to_its_library_and_half_of_one_too() -> None:
    for name, model in models().items():
        library = library_of(model)
        assert library is not None
        assert library.name == name
        assert isinstance(library.file_in("models.adapters").split_model(model), ModelParts)
    halves = {"linen": linen.Dense(2), "haiku": hk.transform(lambda x: x)}
    assert {name: getattr(library_of(half), "name", None) for name, half in halves.items()} == {
        name: name for name in halves
    }
    assert library_of(lambda x: x) is None
    assert library_of((1, 2)) is None


def test_an_nnx_module_in_a_tuple_is_refused_and_not_taken_for_a_function() -> None:
    """As a function it would train the other half alone, and none of its own parameters."""
    pair = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {"w": jax.numpy.ones(2)})
    with pytest.raises(polyamp.ModelError, match="pass an nnx model as the module itself"):
        polyamp.init(pair, polyamp.Recipe())


def test_a_lookup_imports_no_library() -> None:
    program = (
        "import sys, polyamp, jax.numpy as jnp\n"
        "state = polyamp.init((lambda params, x: x @ params['w'], {'w': jnp.ones((2, 1))}),"
        " polyamp.Recipe(policy='float32', optimizer=polyamp.sgd(0.1)))\n"
        "from polyamp_jax.models.libraries import library_of\n"
        "assert library_of(object()) is None\n"
        "print([name for name in ('flax', 'equinox', 'haiku') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
