"""`polyamp doctor`: exit status, table and JSON, over made-up examinations; no framework is needed."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import polyamp
from polyamp import BackendStatus
from polyamp.cli.app import app
from polyamp.doctor import examination
from polyamp.doctor.examination import BackendExamination, ExaminationEvent
from polyamp.doctor.float8_times import Float8Capability, ProductTime
from tests.core.doctor.made_up import capabilities_of_a_gpu

ABSENT = BackendStatus("jax", False, None, (), 'jax is not installed; pip install "polyamp[jax]"')
SEEN = BackendStatus("torch", True, "2.13.0", (), None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets what is found of torch, on a machine without JAX."""

    def install(found: BackendExamination) -> list[Any]:
        asked: list[Any] = []

        def examine(names: list[str], **options: Any) -> dict[str, BackendExamination]:
            asked.append((names, options["all_devices"], options["float8"]))
            options["on_event"](ExaminationEvent("torch", "measure", "cuda:0", 1, 2))
            return dict.fromkeys(names, found)

        monkeypatch.setattr(polyamp, "backends", lambda: {"jax": ABSENT, "torch": SEEN})
        monkeypatch.setattr(examination, "examine", examine)
        return asked

    return install


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_what_was_measured_is_shown_and_a_missing_framework_stops_nothing(machine: Any) -> None:
    asked = machine(BackendExamination("2.13.0", ("cuda:0", "cpu"), (capabilities_of_a_gpu(),)))
    result = invoke()
    assert result.exit_code == 0
    assert asked == [(["torch"], True, False)]
    assert 'pip install "polyamp[jax]"' in result.output
    assert "cuda:0, cpu" in result.output
    assert "torch 2.13.0 on cuda:0 (NVIDIA H100)" in result.output
    assert "bfloat16       native" in result.output
    assert 'Recommended: polyamp.Policy("mixed_bfloat16")' in result.output


def test_a_broken_framework_has_its_line_and_ends_with_1(machine: Any) -> None:
    machine(BackendExamination(problem="OSError: libtorch.so [cut]"))
    result = invoke()
    assert result.exit_code == 1
    assert "broken" in result.output
    assert "libtorch.so [cut]" in result.output


def test_json_is_all_of_standard_output(machine: Any) -> None:
    made_up = capabilities_of_a_gpu()
    machine(BackendExamination("2.13.0", ("cuda:0",), (made_up,)))
    found = json.loads(invoke("--json").stdout)
    assert set(found) == {"polyamp", "python", "platform", "backends"}
    assert found["backends"]["jax"] == {**ABSENT._asdict(), "devices": [], "capabilities": []}
    measured = found["backends"]["torch"]["capabilities"][0]
    assert measured["dtypes"]["bfloat16"]["verdict"] == "native"
    assert measured["dtypes"]["bfloat16"]["operations"]["matmul"]["training_speed"] == pytest.approx(10.0)
    assert measured["recommendation"]["code"] == made_up.recommendation.code


def test_one_framework_alone(machine: Any) -> None:
    asked = machine(BackendExamination("2.13.0", ("cpu",)))
    result = invoke("--backend", "jax")
    assert (result.exit_code, asked) == (0, [([], True, False)])
    assert "torch" not in result.output
    result = invoke("--backend", "torhc")
    assert result.exit_code == 2
    assert "--backend must be one of jax, torch. Received: 'torhc'." in result.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_carries_no_colour_when_piped(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    capabilities_of_a_gpu().print(console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    assert "bfloat16       native   10.0 / 10.0  10.0 / 10.0  10.0 / 10.0  2e-03" in shown
    assert "float8_e5m2    fails              -            -            -" in shown


def test_products_in_8_bits_have_a_table_where_they_are_asked_for(machine: Any) -> None:
    times = [
        ProductTime(rows=1024, inputs=2048, outputs=1024, bfloat16_ms=0.08, float8_ms=0.1),
        ProductTime(rows=4096, inputs=8192, outputs=16384, bfloat16_ms=13.9, float8_ms=10.0),
    ]
    float8 = Float8Capability(verdict="native", compiled=True, times=times)
    asked = machine(
        BackendExamination("2.13.0", ("cuda:0",), (msgspec.structs.replace(capabilities_of_a_gpu(), float8=float8),))
    )
    shown = [line.split() for line in invoke("--float8").output.splitlines()]
    assert asked == [(["torch"], True, True)]
    assert ["1024x2048x1024", "0.08", "0.10", "0.80"] in shown
    assert ["4096x8192x16384", "13.9", "10.0", "1.39"] in shown
    assert ["mixed_float8:", "native;", "faster", "than", "bfloat16", "at", "4096x8192x16384"] in shown
    measured = json.loads(invoke("--float8", "--json").stdout)["backends"]["torch"]["capabilities"][0]["float8"]
    assert measured["verdict"] == "native"
    assert measured["times"][1]["float8_ms"] == 10.0
