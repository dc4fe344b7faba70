"""A framework that is older than a backend needs is named, with both versions, before anything of it is imported."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import polyamp
from polyamp import backend_lookup as lookup
from polyamp.contract import registry
from polyamp.errors import BackendError, ModelError

REAL = importlib.metadata.version
ASKED = {"torch": ("torch", "2.7"), "tensorflow": ("keras", "3.9"), "jax": ("optax", "0.2.5")}
"""Backend -> one of the distributions that its extra asks for, and the oldest version of it."""


@pytest.mark.parametrize(("backend", "distribution", "oldest"), [(name, *asked) for name, asked in ASKED.items()])
@pytest.mark.parametrize("old", ["0.1.2", "0.2.4+cpu"])
def test_s20_a_framework_that_is_too_old_is_named(
    backend: str, distribution: str, oldest: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old if name == distribution else REAL(name))
    short = ".".join(old.split(".")[:2])
    needed = re.escape(
        f"needs {distribution} {oldest} or newer. Received: {distribution} {old}, and {short} is below {oldest}."
    )
    lookup.get.cache_clear()
    loaded = set(sys.modules)
    with pytest.raises(BackendError, match=rf"^backend '{backend}' {needed} Run: pip install .*polyamp\[{backend}\]"):
        registry.get(backend)
    assert {name for name in set(sys.modules) - loaded if name.partition(".")[0] in registry.entries()} == set()
    status = polyamp.backends()[backend]
    assert not status.usable
    assert re.match(needed, status.problem or "")


def entry(*requires: str, name: str = "polyamp", value: str = "polyamp_torch:BACKEND") -> Any:
    """Stands for an entry point of a distribution with these requirements."""
    found = importlib.metadata.EntryPoint("torch", value, lookup.ENTRY_POINT_GROUP)
    vars(found).update(dist=SimpleNamespace(name=name, requires=list(requires)))
    return found


@pytest.mark.parametrize(
    ("requires", "installed", "old"),
    [
        ('torch>=2.7; extra == "torch"', "2.1.2", True),
        ("torch >= 2.7 ; extra == 'torch'", "2.6.9", True),
        ("torch>=2.7; extra == 'torch'", "2.7", False),
        ("torch>=2.7; extra == 'torch'", "2.7.0", False),
        ("torch>=2.7; extra == 'torch'", "2.10.0+cu128", False),
        ("torch>=2.7; extra == 'torch'", "2.8.0a0", False),
        ("torch>=2.7; extra == 'torch'", "2.14.0a0+git1234", False),
        ("torch>=2.7; extra == 'torch'", "2.7.0.dev20260101", False),
        ("torch>=2.7; extra == 'torch'", "0+unknown", False),
        ("torch>=2.7; extra == 'torch'", "unknown", False),
        ("torch>=2.7; extra == 'torch'", "3", False),
        ("torch<3,>=2.7; extra == 'torch'", "2.1", True),
        ("torch>=9; extra == 'examples'", "2.7", False),
        ("torch", "0.1", False),
        ("other>=9; extra == 'torch'", "2.7", False),
    ],
)
def test_versions_are_compared_by_their_numbers(
    requires: str, installed: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "installed_version", lambda name: installed if name == "torch" else None)
    said = lookup.outdated_requirement(entry(requires))
    assert (said is not None) == old
    third_party = entry("torch>=2.7", name="mine", value="mine:BACKEND")
    assert (lookup.outdated_requirement(third_party) is None) == (installed not in ("2.1.2", "2.6.9", "2.1", "0.1"))


def test_s20_a_model_that_shows_its_framework_is_not_given_to_another() -> None:
    model = type("Linear", (), {"__module__": "torch.nn"})()
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as if the program had imported it
    try:
        with pytest.raises(
            ModelError, match=r"^model is of the torch backend\. Received: backend='jax'\. Drop backend="
        ):
            registry.check_backend_argument("jax", model)
        registry.check_backend_argument("torch", model)
        registry.check_backend_argument("mine", model)
    finally:
        if sys.modules.get("torch", True) is None:
            del sys.modules["torch"]
