"""`polyamp port` with orbax's folders and safetensors of flax's names as sources and targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import polyamp
from polyamp import porting
from polyamp.cli.app import app

BUILDER = """
import jax, jax.numpy as jnp
import flax.linen as nn
from flax import nnx
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.LayerNorm()(nn.Dense(5)(x)))
def linen(seed=1):
    module = Net()
    return module, module.init(jax.random.key(seed), jnp.zeros((1, 3)))
def module(seed=1):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(3, 5, rngs=rngs), nnx.LayerNorm(5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "jax_nets.py").write_text(BUILDER)
    import jax_nets  # type: ignore[import-not-found]

    porting.save(jax_nets.module(0), "source.safetensors")
    return tmp_path


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["port", *arguments])
    assert result.exit_code == 0, result.output
    return result


def arrays(model: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(model)]


@pytest.mark.parametrize("target", ["new", "flax.safetensors"])
@pytest.mark.parametrize("build", ["linen", "module"])
def test_a_model_goes_into_its_librarys_file_and_back(folder: Path, build: str, target: str) -> None:
    import jax_nets

    run("source.safetensors", target, "--into", f"jax_nets:{build}", "--to", "jax")
    fresh = getattr(jax_nets, build)(3)
    ported, _ = polyamp.port(target, fresh)
    expected, _ = porting.load(fresh, porting.open("source.safetensors"))
    assert arrays(ported) == arrays(expected) != arrays(fresh)
    assert not list(folder.glob(".*"))
    # and over a file that is there
    porting.save(jax_nets.module(4), "other.safetensors")
    shown = run("other.safetensors", target, "--like", target, "--json")
    assert json.loads(shown.stdout)["written"] is True
    again, _ = polyamp.port(target, fresh)
    assert arrays(again) == arrays(porting.load(fresh, porting.open("other.safetensors"))[0]) != arrays(ported)
