"""A third party's backend, installed as a distribution of its own, is found and passes the conformance suite."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "tiny_backend"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the fixture is installed beside polyamp."""
    site = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "tiny_backend"
    subprocess.run(["cp", "-r", str(FIXTURE), str(source)], check=True)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, str(source)], check=True, timeout=300)
    return {**os.environ, "PYTHONPATH": str(site)}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def deviations(backend: str) -> list[tuple[str, str, str]]:
    """A backend's rows of the project's own list."""
    listed = runpy.run_path(str(ROOT / "tests" / "conformance" / "deviations.py"))["DEVIATIONS"]
    return [row for row in listed if row[0] == backend]


def test_the_backend_is_found_by_its_entry_point(environment: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import polyamp, tiny; from polyamp.contract import registry; "
        "print(polyamp.backends()['tiny'].usable, registry.backend_for(tiny.Net({})).name)"
    )
    done = run(environment, "-c", code)
    assert done.stdout.split() == ["True", "tiny"], done.stderr


def test_layers_of_a_third_party_move_by_their_entry_point(environment: dict[str, str], tmp_path: Path) -> None:
    """A layer of its own in a torch model goes into a flax model: nothing but the entry point names its form."""
    code = """
import torch, numpy as np
from flax import nnx
import polyamp, tiny

class Oriented(torch.nn.Module):  # what tiny would be, were it written for torch
    __module__, __qualname__ = "tiny.layers", "Oriented"
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 5))
    def forward(self, x):
        return x @ self.weight.T

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = Oriented()
    def forward(self, x):
        return self.dense(x)

class FlaxNet(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(5, 5, use_bias=False, rngs=rngs)
    def __call__(self, x):
        return self.dense(x)

source = Net()
ported, report = polyamp.port(source, FlaxNet(nnx.Rngs(0)), check=np.ones((2, 5), np.float32))
there, here = np.asarray(ported.dense.kernel[...]), source.dense.weight.detach().numpy()
print(report.moved[0].kind, bool((there == here.T).all()))
"""
    done = run(environment, "-c", code)
    assert done.stdout.split() == ["dense", "True"], done.stderr


def test_the_backend_passes_the_suite(environment: dict[str, str], tmp_path: Path) -> None:
    rows = [("tiny", rule, reason) for backend, rule, reason in deviations("reference")]  # whose operations it has
    listed = tmp_path / "deviations.py"
    listed.write_text(f"DEVIATIONS = {rows!r}\n")
    suite = ["-m", "pytest", "--pyargs", "polyamp.conformance", "--polyamp-backend=tiny", "-q"]
    options = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--polyamp-deviations={listed}"]
    done = run(environment, *suite, *options)
    last = done.stdout.strip().splitlines()[-1]
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in last
    assert ", 6 skipped," in last  # its models cannot write to their parameters
    assert "failed" not in last.replace(f"{2 * len(rows)} xfailed", "")  # a row holds for both 16-bit policies


def test_an_unlisted_deviation_and_a_stale_one_both_fail(environment: dict[str, str], tmp_path: Path) -> None:
    stale = tmp_path / "deviations.py"
    stale.write_text("DEVIATIONS = [('tiny', 's11_clip', 'said to be missing, but it passes')]\n")
    suite = ["-m", "pytest", "--pyargs", "polyamp.conformance", "--polyamp-backend=tiny", "-q", "-k", "s11"]
    options = ["-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--polyamp-deviations={stale}"]
    done = run(environment, *suite, *options)
    assert done.returncode == 1
    assert "[XPASS(strict)] said to be missing" in done.stdout


def test_the_suite_needs_a_backend_and_known_rules(environment: dict[str, str], tmp_path: Path) -> None:
    suite = ["-m", "pytest", "--pyargs", "polyamp.conformance", "-q", f"--rootdir={tmp_path}"]
    done = run(environment, *suite)
    assert done.returncode == 4
    assert "needs --polyamp-backend=NAME" in done.stderr + done.stdout
    unknown = tmp_path / "deviations.py"
    unknown.write_text("DEVIATIONS = [('tiny', 's99', 'no such rule')]\n")
    done = run(environment, *suite, "--polyamp-backend=tiny", f"--polyamp-deviations={unknown}")
    assert done.returncode == 4
    assert "names no test of the suite" in done.stderr + done.stdout
