"""A policy's spelling is taken wherever polyamp_torch takes a policy: one row for each public function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyamp
import polyamp_torch
from polyamp.errors import PolicyError
from tests.fixtures.spellings import taking_a_policy


def _product(policy: Any) -> torch.dtype:
    with polyamp_torch.autocast(policy, "cpu"):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


ROWS: dict[str, Any] = {"autocast": _product}


def test_every_function_has_a_row() -> None:
    assert taking_a_policy(polyamp_torch) == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_spelling_is_taken_and_a_slip_is_named(name: str) -> None:
    assert ROWS[name]("fp16") == ROWS[name](polyamp.Policy("fp16"))
    with pytest.raises(PolicyError, match="mixed_float16"):
        ROWS[name]("mixed_flaot16")
