"""What the wheel and the sdist hold, and that polyamp runs from an installed wheel."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import polyamp

ROOT = Path(__file__).parents[2]
PACKAGES = ("polyamp", "polyamp_jax", "polyamp_keras", "polyamp_tensorflow", "polyamp_torch")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was built from it; `make release` gives its own."""
    if "POLYAMP_DIST" in os.environ:
        return Path(os.environ["POLYAMP_DIST"])
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    assert found.name == f"polyamp-{polyamp.__version__}-py3-none-any.whl"
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist()))
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed without its dependencies."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    return site


def source_files() -> set[str]:
    """Every module of the source tree, by its path in a wheel."""
    core = {str(path.relative_to(ROOT)) for path in (ROOT / "polyamp").rglob("*.py")}
    return core | {str(path.relative_to(ROOT / "backends")) for path in (ROOT / "backends").rglob("*.py")}


def test_the_wheel_holds_every_module_and_nothing_else(names: set[str]) -> None:
    assert {name for name in names if name.endswith(".py")} == source_files()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"polyamp-{polyamp.__version__}.dist-info"}


def test_the_wheel_holds_type_markers_and_data(names: set[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "polyamp/demo/digits.toml" in names
    assert {f"polyamp_{name}/observe/known_traps.toml" for name in ("torch", "tensorflow", "jax")} <= names
    assert {f"polyamp/parity/report/template/report.{kind}" for kind in ("html", "css", "js")} <= names
    assert {f"polyamp/report_page/template/page.{kind}" for kind in ("html", "css")} <= names


def test_the_wheel_holds_no_settings_tests_or_litter(names: set[str]) -> None:
    assert not {name for name in names if name.endswith(("ruff.toml", ".pyc", ".partial", ".orig"))}
    assert not {name for name in names if name.startswith(("tests/", "backends/", "examples/", "benchmarks/"))}


def test_metadata_agrees_with_pyproject(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = f"polyamp-{polyamp.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        parser = configparser.ConfigParser(delimiters=("=",))
        parser.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = archive.read(f"{info}/METADATA").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert dict(parser["polyamp.backends"]) == project["entry-points"]["polyamp.backends"]
    assert dict(parser["pytest11"]) == project["entry-points"]["pytest11"]
    assert dict(parser["console_scripts"]) == project["scripts"]
    assert f"\nVersion: {polyamp.__version__}\n" in metadata
    header, _, readme = metadata.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in header
    assert "pip install" in readme
    assert re.findall(r"\]\((?!https?://)", readme) == [], "on a package index a relative link leads nowhere"
    for extra in project["optional-dependencies"]:
        assert f"\nProvides-Extra: {extra}\n" in metadata


def test_the_sdist_holds_what_a_build_needs(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "polyamp/__init__.py"} <= found
    assert {f"backends/{package}/__init__.py" for package in PACKAGES[1:]} <= found
    assert {"docs/semantics.md", "docs/images/digits.png", "examples/basic_loop.py", "CONTRIBUTING.md"} <= found
    assert not {name for name in found if name.startswith("tests") or name.endswith(".pyc")}
    assert {name for name in found if name.endswith(".json")} == {
        "docs/reference/parity_report.schema.json",
        "docs/measurements/downstream.json",
    }


def test_polyamp_runs_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    script = f"""
import importlib.util, json
import polyamp
from polyamp.contract import registry
from polyamp.reference import MLP
from polyamp.demo import runner
places = [polyamp.__file__] + [importlib.util.find_spec(name).origin for name in {PACKAGES[1:]}]
polyamp.init(MLP.random([2, 2], seed=0), polyamp.Recipe(policy="mixed_float16"))
entry = registry.entries()["torch"]
print(json.dumps([places, sorted(polyamp.backends()), str(entry.dist.locate_file("")), str(runner.__file__)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    places, backends, distribution, demo = json.loads(done.stdout)
    assert places == [str(installed / package / "__init__.py") for package in PACKAGES]
    assert backends == ["jax", "reference", "tensorflow", "torch"]
    assert Path(distribution) == installed
    assert Path(demo).is_relative_to(installed)
    assert (installed / "bin" / "polyamp").exists()


def test_the_rules_that_docstrings_cite_can_be_read_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyamp", "rules", "S12"]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("S12 Skipped steps\n\n")
    assert (installed / "polyamp/cli/semantics.md").read_bytes() == (ROOT / "docs/semantics.md").read_bytes()


def test_the_recipe_of_the_demo_can_be_read_from_the_wheel(installed: Path) -> None:
    recipe = polyamp.Recipe.load(installed / "polyamp" / "demo" / "digits.toml")
    assert recipe == polyamp.Recipe.load(ROOT / "polyamp" / "demo" / "digits.toml")
