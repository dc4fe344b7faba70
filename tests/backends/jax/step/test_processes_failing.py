"""Rule S32 in JAX: what is said where another process is gone. The words are those of jax 0.10 with two processes."""

from __future__ import annotations

import jax
import pytest

from polyamp.errors import ReplicaError
from polyamp_jax.step import error_hints

CLOSED = (
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:50098"
)


@pytest.mark.parametrize(
    ("count", "begins"),
    [
        (2, "process 1 ended, raised or was killed: a collective of process 0 failed (ValueError: UNKNOWN: Gloo all-"),
        (4, "processes 1, 2 and 3 did not all take part: one ended, raised or died: a collective of process 0 failed"),
    ],
)
def test_s32_the_other_process_is_named(monkeypatch: pytest.MonkeyPatch, count: int, begins: str) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: count)
    error = error_hints.explain_error(ValueError(CLOSED), None)
    assert isinstance(error, ReplicaError)
    assert str(error).startswith(begins)
    assert str(error).endswith("this state is not to be used again.")


def test_s32_one_process_has_nobody_to_blame() -> None:
    assert error_hints.explain_error(ValueError(CLOSED), None) is None
