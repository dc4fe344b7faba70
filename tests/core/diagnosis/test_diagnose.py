"""`polyamp.diagnose` on the reference: outcomes, report, files and arguments. Planted faults: `tests/backends`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import polyamp
from polyamp.cli import app as cli
from polyamp.diagnosis.diagnose_page import diagnose_page
from polyamp.errors import ArgumentError
from polyamp.reference import MLP
from polyamp.report_page.html_page import render_html

RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(8, 4)).astype(np.float32) for _ in range(4)]
RECIPE = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
FILE = """
import numpy as np
import polyamp
from polyamp.reference import MLP

model = MLP.random([4, 8, 1], seed=0)
batches = list(np.random.default_rng(0).normal(size=(3, 8, 4)).astype("f4"))
recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))


def loss_fn(model, x):
    return polyamp.losses.mean_squared_error(model(x), x[:, :1])
"""


def loss_fn(model: Any, x: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(x), x[:, :1])


def test_a_model_that_fits() -> None:
    calls: list[tuple[int, int | None]] = []
    model = MLP.random([4, 8, 1], seed=0)
    before = {name: np.array(value) for name, value in model.parameters.items()}
    report = polyamp.diagnose(model, loss_fn, BATCHES, RECIPE, on_trial=lambda *call: calls.append(call))
    assert (report.outcome, report.sensitive, report.overrides) == ("fits", [], {})
    assert [trial.float32 for trial in report.trials] == [[]]
    assert report.trials[0].updates == len(report.losses) == 4
    assert len(calls) == 3
    assert all(np.array_equal(before[name], value) for name, value in model.parameters.items())
    scaled = report.largest_gradient * report.loss_scale
    assert 65504 / 16 < scaled <= 65504 / 8
    assert str(report).startswith("float16 fits: the losses follow those of float32 without overrides.")
    assert report.recipe(RECIPE) == RECIPE


def test_a_training_that_fails_in_float32_too_is_not_blamed_on_precision() -> None:
    recipe = RECIPE.replace(optimizer=polyamp.sgd(1e30))
    with np.errstate(all="ignore"):
        report = polyamp.diagnose(MLP.random([4, 8, 1], seed=0), loss_fn, BATCHES, recipe)
        bad = polyamp.diagnose(MLP.random([4, 8, 1], seed=0), loss_fn, [BATCHES[0] * np.nan], RECIPE)
    for found in (report, bad):
        assert (found.outcome, found.trials, found.overrides) == ("float32", [], {})
        assert "no precision policy mends it" in str(found)
        assert "float32 fails" in render_html(diagnose_page(found))


def test_a_trial_ends_at_a_loss_that_no_smaller_scale_mends() -> None:
    """A forward pass that overflows is not repeated until the scale is at its least."""
    losses: list[float] = []

    def counting_loss_fn(model: Any, x: Any) -> Any:
        loss = loss_fn(model, x)
        losses.append(float(loss))
        return loss

    recipe = RECIPE.replace(optimizer=polyamp.sgd(1e-20))
    with np.errstate(all="ignore"):
        report = polyamp.diagnose(MLP.random([4, 8, 1], seed=0), counting_loss_fn, [BATCHES[0] * 1e6], recipe)
    assert (report.trials[0].agrees, report.trials[0].updates) == (False, 0)
    assert report.outcome != "float32"
    assert sum(not np.isfinite(loss) for loss in losses) <= len(report.trials)


def test_the_report_as_files(tmp_path: Path) -> None:
    report = polyamp.diagnose(MLP.random([4, 8, 1], seed=0), loss_fn, BATCHES, RECIPE)
    data = json.loads(report.save(tmp_path / "a.json").read_text())
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(polyamp.ArgumentError, match=r"path must be one that can be written to\. .*folder\.json"):
        report.save(tmp_path / "folder.json")
    with pytest.raises(polyamp.ArgumentError, match=r"path must end in \.json, \.html or \.png"):
        report.save(tmp_path / "a.txt")
    assert (data["outcome"], data["overrides"], len(data["losses"])) == ("fits", {}, 4)
    text = report.save(tmp_path / "a.html").read_text()
    for words in ("float16 fits", "Activations", "Gradients of parameters", "Trials", "below: zero in float16"):
        assert words in text
    assert report.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": []}, "batches must be a list of at least one batch"),
        ({"batches": "abc"}, "batches must be a list of at least one batch"),
        ({"recipe": "mixed_float16"}, r"recipe must be a polyamp\.Recipe"),
        ({"recipe": RECIPE.replace(policy="float32")}, "recipe must have a policy that computes in 16 bits"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    given = {"model": MLP.random([4, 1], seed=0), "loss_fn": loss_fn, "batches": BATCHES, "recipe": RECIPE, **changes}
    with pytest.raises(ArgumentError, match=message):
        polyamp.diagnose(**given)


def test_the_command_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    written = tmp_path / "recipe.toml"
    arguments = ["diagnose", str(file), "--save", str(tmp_path / "a.html"), "--write", str(written)]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "float16 fits: the losses follow those of float32" in shown.output
    assert (tmp_path / "a.html").is_file()
    assert polyamp.Recipe.load(written).policy == polyamp.Policy("mixed_float16")
    data = json.loads(CliRunner().invoke(cli.app, ["diagnose", str(file), "--json"]).stdout)
    assert data["outcome"] == "fits"
    file.write_text("model = 1\n")
    missing = CliRunner().invoke(cli.app, ["diagnose", str(file)])
    assert missing.exit_code == 2
    assert "must define model, loss_fn, batches, recipe" in " ".join(missing.output.split())
    assert CliRunner().invoke(cli.app, ["diagnose", str(tmp_path / "none.py")]).exit_code == 2
