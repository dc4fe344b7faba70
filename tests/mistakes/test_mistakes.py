"""The commonest mistakes in one framework: what is said, and that the state is bit for bit as it was (S20).

pytest tests/mistakes --framework=jax
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import polyamp
from tests.mistakes import rows_files
from tests.mistakes.bench import Bench, loss_fn, message, typed
from tests.mistakes.table import Row


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("mistakes")
    rows_files.files(folder)
    made = Bench(request.config.getoption("--framework"), folder)
    polyamp.save(made.state, folder / "saved")
    made.names["saved"] = folder / "saved"
    return made


@pytest.mark.filterwarnings("ignore")  # a mistake may have a framework warn as well
def test_s20_a_mistake_is_said(row: Row, bench: Bench) -> None:
    error = typed(row, bench.names)
    assert error is not None, "nothing was said"
    assert row.error in {kind.__name__ for kind in type(error).__mro__}, repr(error)
    assert re.search(row.said, message(error), re.DOTALL), message(error)
    assert bench.unharmed(), "the state is another one"


def test_s20_the_state_trains_on_as_if_nothing_had_been(bench: Bench) -> None:
    """After all of them: the state's next step is that of a state of the same model that saw no mistake."""

    def trained(state: Any) -> dict[str, Any]:
        state, result = polyamp.train_step(loss_fn, bench.recipe)(state, bench.batch)
        return {**state.backend.export_state(state), "loss": np.asarray(state.backend.to_numpy(result.loss))}

    after, expected = trained(bench.state), trained(bench.fresh())
    assert {name for name in expected if after[name].tobytes() != expected[name].tobytes()} <= {"rng/cpu"}


def test_s20_a_run_can_be_tried_before_it_is_saved(bench: Bench, tmp_path: Any) -> None:
    path = tmp_path / "state"
    polyamp.save(bench.fresh(), path, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"an older one")
    polyamp.save(bench.fresh(), path, dry_run=True)
    assert path.read_bytes() == b"an older one"
    assert list(tmp_path.iterdir()) == [path]
