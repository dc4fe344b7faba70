"""The doctor's operations in torch on the CPU, and the traps of this version, reproduced."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import polyamp
from polyamp_torch.observe import capabilities
from polyamp_torch.observe.capabilities import PROBE
from polyamp_torch.observe.known_traps import TRAPS
from tests.core.doctor.backend_checks import check_operations, measure_small

CPU = PROBE.devices()[-1]
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "doctor.md"


def test_the_block_of_the_guide_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a measurement of small sizes in the place of one that takes seconds."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "polyamp.capabilities" in block]
    asked: list[str] = []
    monkeypatch.setattr(polyamp, "capabilities", lambda name: asked.append(name) or measure_small(PROBE, CPU))
    names: dict[str, Any] = {}
    exec(compile(block, "docs/guides/doctor.md", "exec"), names)
    assert asked == ["torch"]
    assert names["found"].recommendation.code.startswith("polyamp.Policy(")
    assert "\nbfloat16 " in capsys.readouterr().out


def test_every_dtype_is_measured() -> None:
    found = measure_small(PROBE, CPU)
    assert found.dtypes["bfloat16"].accumulation_error == pytest.approx(1.63e-3, rel=0.1)
    for name in ("float8_e4m3fn", "float8_e5m2"):
        narrow = found.dtypes[name]
        if narrow.operations:  # else the small product was too slow
            assert narrow.operations["matmul"].forward_ms is not None
            assert "convolution" in narrow.operations
        assert narrow.accumulation_error == pytest.approx(1.65e-3, rel=0.1)  # rounded to bfloat16
    assert CPU.kind == "cpu"


def test_inputs_have_the_dtype() -> None:
    check_operations(PROBE, CPU)


def test_the_switches_of_tf32_are_set_and_put_back() -> None:
    switches = capabilities._tf32_switches()
    before = [getattr(owner, name) for owner, name, _, _ in switches]
    for dtype, column in (("tf32", 2), ("float32", 3), ("bfloat16", 3)):
        with capabilities._tf32(dtype):
            assert [getattr(row[0], row[1]) for row in switches] == [row[column] for row in switches]
    assert [getattr(owner, name) for owner, name, _, _ in switches] == before


def test_the_traps_are_those_of_this_version() -> None:
    assert len([trap for trap in TRAPS if trap.holds_for(torch.__version__, "cpu")]) == 4


def test_autocast_on_a_cpu_sums_in_16_bits() -> None:
    with torch.autocast("cpu", torch.float16):
        assert torch.full((2000,), 64.0, dtype=torch.float16).sum() == torch.inf


def test_a_block_around_a_loop_trains_on_old_weights() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=1.0), torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        before.float().sum().backward()
        optimizer.step()
        assert torch.equal(layer(x), before)


def test_grad_scaler_reaches_zero_and_writes_nan() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=0.1)
    for overflow in [True] * 170 + [False]:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad = torch.full_like(weight, torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 0.0
    assert torch.isnan(weight).all()


def test_fused_sgd_leaves_16_bit_parameters_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    assert torch.equal(weight, torch.ones_like(weight))
