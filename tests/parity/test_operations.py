"""A formula between two modules is narrowed down to the operation, with its line on both sides."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import polyamp
from polyamp.parity.report_data import Divergence
from tests import xla

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

import operation_programs as programs

xla.quick()  # before the first program is compiled


def _first(report: Any) -> Divergence:
    assert report.first is not None
    assert (report.first.stage, report.first.module, report.first.what) == ("forward", "head", "input")
    return report.first


def _codes(report: Any) -> list[str]:
    sites = _first(report).sites.values()
    assert {site.file for site in sites} == {programs.__file__}
    return [site.code for site in sites]


@pytest.mark.parametrize(
    ("second", "codes"),
    [
        ({"epsilon": 1e-3}, ["mixed = mixed * torch.rsqrt(variance + epsilon)"] * 2),
        ({"scale": 0.3}, ["query, key = self.query(x) * scale, self.key(x)"] * 2),
        ({"adds": False}, ["mixed = mixed + x", "variance = mixed.pow(2).mean(-1, keepdim=True)"]),
    ],
    ids=["epsilon", "scale", "residual"],
)
def test_between_two_torch_models(second: dict[str, Any], codes: list[str]) -> None:
    report = polyamp.compare(programs.in_torch(), programs.in_torch(**second), programs.batch())
    assert _codes(report) == codes
    line = next(line for line in str(report).splitlines() if line.startswith("  lines"))
    assert f"torch a operation_programs.py:{report.first.sites['torch a'].line}, " in line
    assert f'in "{codes[0]}"' in line


def test_between_torch_and_flax_which_write_it_in_other_ways() -> None:
    same = polyamp.compare(programs.in_torch(), programs.in_flax(), programs.batch())
    assert same.agrees, str(same)
    report = polyamp.compare(programs.in_torch(), programs.in_flax(scale=0.3), programs.batch())
    assert _codes(report) == ["query, key = self.query(x) * scale, self.key(x)", SCORES]
    report = polyamp.compare(programs.in_torch(), programs.in_flax(epsilon=1e-3), programs.batch())
    torch, jax = _first(report).sites.values()
    assert (torch.operation, jax.operation) == ("add", "add")
    assert jax.code == "root = jnp.sqrt(jnp.mean(mixed**2, -1, keepdims=True) + epsilon)"


SCORES = 'scores = jnp.einsum("btc,bsc->bts", self.query(x), self.key(x))'
"""flax scales the scores, torch the queries: already their products differ."""


def test_between_torch_and_keras_in_processes_of_their_own(tmp_path: Path) -> None:
    sides = {"torch": programs.in_torch, "keras": programs.in_keras}
    report = polyamp.parity.run(sides, data=programs.batch(), out=tmp_path)
    assert report.failures == []
    assert _codes(report) == ["mixed = mixed * torch.rsqrt(variance + epsilon)", "square = square + 1e-3"]
    assert polyamp.parity.Report.from_json((tmp_path / "report.json").read_text()).first == report.first
