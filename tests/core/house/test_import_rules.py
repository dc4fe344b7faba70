"""Walks the syntax tree of every module: who may import whom. Function bodies and import calls are included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
BACKENDS = ("polyamp_torch", "polyamp_tensorflow", "polyamp_jax", "polyamp_keras")
FRAMEWORKS = {
    "polyamp_torch": {"torch", "torchvision", "torch_xla"},
    "polyamp_tensorflow": {"tensorflow", "keras", "tf_keras"},
    "polyamp_jax": {"jax", "jaxlib", "flax", "optax", "equinox", "haiku", "orbax", "chex"},
    "polyamp_keras": {"keras"},
}
ENGINES = {"tensorflow": {"tensorflow"}, "torch": {"torch"}, "jax": {"jax"}}
"""Framework of an engine of `polyamp_keras`, whose modules begin with its name; they alone import it."""
BASES = {name: {"polyamp_keras"} for name in ("polyamp_tensorflow", "polyamp_torch", "polyamp_jax")}
"""Backend -> the packages that it builds on."""
KERAS_FILES = {
    "backends/polyamp_jax/keras_harness.py",
    "backends/polyamp_jax/models/adapters/keras.py",
    "backends/polyamp_jax/precision/jax_only/keras_policy_module.py",
    "backends/polyamp_torch/keras_harness.py",
    "backends/polyamp_torch/precision/torch_only/keras_policy_module.py",
    "backends/polyamp_torch/step/torch_only/keras_models.py",
}
"""Files that are loaded only where the program has imported Keras, and build on `polyamp_keras`."""
FORWARDED = {"backends/polyamp_keras/__init__.py": "polyamp_tensorflow"}
"""Package -> the backend that it hands its names on to, and imports by its name only when Keras runs on it."""
ALL_FRAMEWORKS = set().union(*FRAMEWORKS.values())
CORE = sorted((ROOT / "polyamp").rglob("*.py"))
BACKEND_FILES = sorted((ROOT / "backends").rglob("*.py"))


class Import(NamedTuple):
    """One imported module or name, absolute, and where."""

    name: str
    line: int

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]


def imports(source: str) -> Iterator[Import]:
    """Every absolute import in `source`: statements, and calls of __import__ and import_module with a literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function, first = node.func, node.args[0]
            called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if called in ("__import__", "import_module", "importorskip") and isinstance(first, ast.Constant):
                yield Import(str(first.value), node.lineno)


def breaches_of_core(source: str) -> list[Import]:
    """Imports that a module of `polyamp` must not have."""
    return [found for found in imports(source) if found.root in ALL_FRAMEWORKS or found.root.startswith("polyamp_")]


def breaches_of_backend(source: str, own: str, more: frozenset[str] = frozenset()) -> list[Import]:
    """Imports that a module of the backend package `own` must not have, other than of the roots in `more`."""
    foreign = ALL_FRAMEWORKS - FRAMEWORKS[own] - more
    return [
        found
        for found in imports(source)
        if found.root in foreign
        or found.root == "backends"
        or (found.root.startswith("polyamp_") and found.root not in {own, *BASES.get(own, ()), *more})
        or (found.root == "polyamp" and any(part.startswith("_") for part in found.name.split(".")[1:]))
    ]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CORE, ids=name)
def test_the_core_imports_no_framework_and_no_backend(path: Path) -> None:
    assert breaches_of_core(path.read_text()) == []


@pytest.mark.parametrize("path", BACKEND_FILES, ids=name)
def test_a_backend_imports_the_cores_public_names_and_its_own_framework(path: Path) -> None:
    own = path.relative_to(ROOT / "backends").parts[0]
    more = {FORWARDED[name(path)]} if name(path) in FORWARDED else set()
    if name(path) in KERAS_FILES:
        more |= {"keras", "polyamp_keras"}
    if path.parent == ROOT / "backends" / "polyamp_keras" / "engines":
        more |= ENGINES.get(path.stem.partition("_")[0], set())
    assert breaches_of_backend(path.read_text(), own, frozenset(more)) == []


def test_backends_is_no_package() -> None:
    assert not (ROOT / "backends" / "__init__.py").exists()
    packages = {path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists()}
    assert packages == set(BACKENDS)
    for package in ("polyamp", *(f"backends/{name}" for name in BACKENDS)):
        assert (ROOT / package / "py.typed").exists()


def test_nothing_imports_the_folder_of_backends() -> None:
    folders = ("polyamp", "backends", "tests", "examples", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    offenders = [name(path) for path in files if any(found.root == "backends" for found in imports(path.read_text()))]
    assert offenders == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import jax.numpy as jnp",
        "from tensorflow import keras",
        "def f():\n    import optax",
        "class A:\n    def f(self):\n        from flax import nnx",
        "if TYPE_CHECKING:\n    import torch",
        "import importlib\nimportlib.import_module('torch.nn')",
        "__import__('jax')",
        "import polyamp_torch",
        "from polyamp_jax.step import train_step",
    ],
)
def test_a_breach_in_the_core_is_seen(source: str) -> None:
    assert len(breaches_of_core(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import jax",
        "import polyamp_jax",
        "from backends.polyamp_torch import BACKEND",
        "from polyamp._version import __version__",
        "from polyamp.contract.registry import _look",
        "def f():\n    import tensorflow as tf",
    ],
)
def test_a_breach_in_a_backend_is_seen(source: str) -> None:
    assert len(breaches_of_backend(source, "polyamp_torch")) == 1


def test_what_is_allowed_is_not_a_breach() -> None:
    assert breaches_of_core("import numpy, msgspec\nfrom polyamp import Policy\nfrom . import torch") == []
    source = "import torch\nfrom polyamp import Policy\nfrom polyamp_torch.step import f\nfrom polyamp import checks"
    assert breaches_of_backend(source, "polyamp_torch") == []
