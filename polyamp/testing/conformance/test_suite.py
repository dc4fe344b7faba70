"""All tests of `polyamp.conformance`, under the suite's old path."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import pytest

import polyamp.conformance

for found in pkgutil.iter_modules(polyamp.conformance.__path__, "polyamp.conformance."):
    pytest.register_assert_rewrite(found.name)
    if found.name.rpartition(".")[2].startswith("test_"):
        module = import_module(found.name)
        globals().update({name: value for name, value in vars(module).items() if name.startswith("test_")})
