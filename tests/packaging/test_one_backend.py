"""`examples/one_backend`, a backend written from the contract alone: installed by itself, it passes the whole suite."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "one_backend"
SOURCES = sorted((EXAMPLE / "polyamp_mlx").rglob("*.py"))
DEVIATIONS = runpy.run_path(str(EXAMPLE / "deviations.py"))["DEVIATIONS"]
PAGE = (ROOT / "docs" / "guides" / "a_backend_of_your_own.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the example is installed beside polyamp."""
    site = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "one_backend")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*install, str(source)], check=True, timeout=300)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}


def passed(environment: dict[str, str], folder: Path, *arguments: str) -> str:
    """The last line of a pytest run that must succeed, without this repository's settings, as a third party has it."""
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", f"--rootdir={folder}"]
    done = subprocess.run(
        [*pytest_, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_it_passes_the_suite_but_for_its_deviations(environment: dict[str, str], tmp_path: Path) -> None:
    suite = ["--pyargs", "polyamp.conformance", "--polyamp-backend=mlx"]
    last = passed(environment, tmp_path, *suite, f"--polyamp-deviations={EXAMPLE / 'deviations.py'}")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    assert counts.keys() == {"passed", "skipped", "xfailed"}, last
    assert counts["skipped"] == 1  # selections by boolean arrays
    assert counts["passed"] > 200
    assert [row[1] for row in DEVIATIONS] == [
        "s09_replicas_take_the_same_decision",
        "s03_the_policy_that_loss_fn_puts_around_something_decides_for_it[cast",
        "s12_what_the_forward_pass_writes",
        "s12_a_skipped_step_takes_back",
        "s34",
        "s01_float64",
    ]
    assert counts["xfailed"] == 41  # a second policy 2, replicas 1, writes 6, averages 14, and the float64 tests


def test_its_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    assert " passed" in passed(environment, tmp_path, str(EXAMPLE / "tests"))


def test_it_is_written_from_the_contract_alone() -> None:
    """Of polyamp it imports neither the reference nor another backend, nor anything private."""
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    own = {name for name in imported if name.startswith("polyamp")}
    assert [name for name in sorted(own) if name.startswith("polyamp.reference") or "._" in name] == []
    assert {name.partition(".")[0] for name in own} == {"polyamp", "polyamp_mlx"}


def flush_left(text: str) -> str:
    """The lines of some code without their indentation and without empty ones."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_page_shows_its_code_as_it_is() -> None:
    """Each Python block of the guide is an excerpt of one of its files; "..." stands for lines left out."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    sources = [flush_left(path.read_text(encoding="utf-8")) for path in SOURCES]
    for block in blocks:
        parts = flush_left(block).split("\n...\n")
        assert any(all(part in source for part in parts) for source in sources), block


def test_the_page_names_every_file() -> None:
    for path in SOURCES:
        if path.name != "__init__.py":
            assert f"`{path.relative_to(EXAMPLE / 'polyamp_mlx')}`" in PAGE, path
