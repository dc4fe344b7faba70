"""polyamp's plugin in sessions of pytest: a process for each framework, what pytest then reports, what is selected and
what is missing. The frameworks are two empty modules, "alpha" and "beta", and "ghost", which is not installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
NAMES = ("alpha", "beta", "ghost")
PLUGIN = ("-p", "polyamp.parity.plugin")
QUIET = (*PLUGIN, "-p", "no:cacheprovider")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """An empty folder whose sessions find the three frameworks and no plugin but those that are named."""
    path = pytester.mkdir("installed")
    metadata = path / "stand_ins-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-ins\nVersion: 1\n")
    entries = "".join(f"{name} = polyamp_{name}:BACKEND\n" for name in NAMES)
    (metadata / "entry_points.txt").write_text(f"[polyamp.backends]\n{entries}")
    for name in NAMES:
        (path / f"polyamp_{name}.py").write_text("BACKEND = object()\n")
        if name != "ghost":
            (path / f"{name}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (path, ROOT, ROOT / "backends"))), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-o junit_family=xunit1")  # as pytest has it for record_property
    return pytester


def properties(file: Path) -> dict[str, dict[str, str]]:
    """Test -> what it recorded, from a junit file."""
    cases = ElementTree.parse(file).iter("testcase")
    return {case.attrib["name"]: {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")} for case in cases}


MANY = """
    import importlib, os, sys, warnings
    import pytest

    @pytest.fixture(scope="module")
    def framework(polyamp_backend):
        print("built", polyamp_backend)
        return importlib.import_module(polyamp_backend)

    @pytest.fixture(autouse=True)
    def process(record_property):
        record_property("process", os.getpid())

    both = pytest.mark.backends("alpha", "beta")

    @both
    def test_name(polyamp_backend, framework):
        assert type(polyamp_backend.name) is str
        assert framework.__name__ == polyamp_backend.name == polyamp_backend

    def test_of_no_framework():
        pass

    @both
    def test_fails(polyamp_backend, framework):
        warnings.warn("careful")
        print("said")
        assert polyamp_backend == "alpha", "not for beta"

    @both
    @pytest.mark.xfail(strict=True)
    def test_expected(polyamp_backend):
        assert False

    @pytest.mark.backends("beta")
    def test_of_one():
        import beta

    @both
    def test_skips(polyamp_backend):
        pytest.skip("because")

    @both
    def test_alone(polyamp_backend):
        assert len({"alpha", "beta"} & set(sys.modules)) <= 1
"""


def test_each_framework_has_a_process_and_pytest_reports_as_ever(project: pytest.Pytester) -> None:
    project.makepyfile(MANY)
    done = project.runpytest_subprocess(
        *PLUGIN, "-rA", "--durations=0", "-vv", "--junitxml=junit.xml", "--strict-markers"
    )
    done.assert_outcomes(passed=7, failed=1, skipped=2, xfailed=2, warnings=2)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    text = done.stdout.str()
    assert "polyamp: a process for each of alpha (5), beta (6)" in text
    done.stdout.fnmatch_lines(
        [
            "*::test_name[[]alpha] PASSED*",
            "*::test_fails[[]beta] FAILED*",
            "E       AssertionError: not for beta",
            "*Captured stdout call*",
            "said",
            "*UserWarning: careful",
            "*s call     *::test_fails[[]beta]",
            "SKIPPED [[]2] test_*.py:*: because",
            "FAILED *::test_fails[[]beta] - AssertionError: not for beta*",
        ]
    )
    assert text.count("built alpha") == text.count("built beta") == 1  # a module's fixture lives in its process
    processes = {name: found["process"] for name, found in properties(project.path / "junit.xml").items()}
    by_home = {
        home: {process for name, process in processes.items() if re.search(pattern, name)}
        for home, pattern in {"alpha": r"\[alpha", "beta": r"\[beta|of_one", "session": "of_no_framework"}.items()
    }
    assert [len(found) for found in by_home.values()] == [1, 1, 1]
    assert len(set().union(*by_home.values())) == 3

    again = project.runpytest_subprocess(*PLUGIN, "--lf", "-q")  # one framework is left: no other process
    again.assert_outcomes(failed=1, warnings=1)
    assert "a process for each" not in again.stdout.str()
    first = project.runpytest_subprocess(*QUIET, "-x", "-q", "-k", "fails or alone")
    first.assert_outcomes(passed=2, failed=1, warnings=2)
    listed = project.runpytest_subprocess(*QUIET, "--collect-only", "-q")
    assert "<" not in listed.stdout.str()
    assert listed.stdout.str().count("::") == 12


def test_a_process_that_dies_fails_its_test_and_the_next_test_gets_a_new_one(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import os, sys
        import pytest

        both = pytest.mark.backends("alpha", "beta")

        @pytest.fixture
        def broken(polyamp_backend):
            if polyamp_backend == "alpha":
                os._exit(5)

        @both
        def test_dies(polyamp_backend):
            if polyamp_backend == "alpha":
                os.abort()

        @both
        def test_dies_early(broken):
            pass

        @both
        def test_lives(polyamp_backend):
            pass

        @both
        def test_quits(polyamp_backend):
            pytest.exit("enough", returncode=7)
        """
    )
    done = project.runpytest_subprocess(*QUIET, "-k", "not quits")
    done.assert_outcomes(passed=4, failed=2)
    done.stdout.fnmatch_lines(
        [
            "the process of alpha ended by SIGABRT. The last lines that it wrote:",
            "Fatal Python error: Aborted",
            "*test_*.py*in test_dies",
            "the process of alpha ended with status 5.*",
        ]
    )
    done = project.runpytest_subprocess(*QUIET, "-k", "quits or lives")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["*Exit: enough*"])
    assert done.ret == 7


def test_ctrl_c_leaves_no_process(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import os, time
        import pytest

        @pytest.mark.backends("alpha", "beta")
        def test_long(polyamp_backend):
            with open("process", "w") as file:
                file.write(str(os.getpid()))
            time.sleep(60)
        """
    )
    command = [sys.executable, "-m", "pytest", *QUIET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=project.path, text=True) as process:
        file = project.path / "process"
        for _ in range(300):
            if file.exists() and file.read_text():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in out
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_selection(project: pytest.Pytester) -> None:
    project.makepyfile(MANY)
    done = project.runpytest_subprocess(*QUIET, "--polyamp-backends=beta", "-q", "-k", "name or fails or of_one")
    done.assert_outcomes(passed=2, failed=1, deselected=9, warnings=1)
    wrong = project.runpytest_subprocess(*QUIET, "--polyamp-backends", "alpha,betta")
    assert wrong.ret == pytest.ExitCode.USAGE_ERROR
    wrong.stderr.fnmatch_lines(
        ["ERROR: --polyamp-backends: backends are alpha, beta, *. Received: 'betta'. Did you mean 'beta'?"]
    )
    project.makepyfile(test_other="def test_unmarked(polyamp_backend):\n    assert polyamp_backend == 'alpha'\n")
    done = project.runpytest_subprocess(*QUIET, "test_other.py")
    done.stdout.fnmatch_lines(["*::test_unmarked asks for polyamp_backend and nothing says which: mark it*"])
    assert done.ret == pytest.ExitCode.INTERRUPTED
    project.makeini("[pytest]\npolyamp_backends = alpha\n")
    project.runpytest_subprocess(*QUIET, "test_other.py").assert_outcomes(passed=1)
    project.makepyfile(test_other="import pytest\n@pytest.mark.backends('keras')\ndef test(): pass\n")
    done = project.runpytest_subprocess(*QUIET, "test_other.py")
    done.stderr.fnmatch_lines(["*Received: 'keras'. Did you mean 'tensorflow'?*"])
    project.makepyfile(test_other="import pytest\n@pytest.mark.backends('keras')\ndef test(polyamp_backend): pass\n")
    done = project.runpytest_subprocess(*QUIET, "test_other.py")
    done.stdout.fnmatch_lines(["*::test: @pytest.mark.backends: backends are *. Received: 'keras'. Did you mean*"])
    done.stdout.no_fnmatch_line("*in_pytest*")
    done.stdout.no_fnmatch_line("*Traceback*")


def test_a_missing_framework_fails_unless_a_skip_is_asked_for(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.backends("alpha", "ghost")
        def test_it(polyamp_backend):
            pass

        @pytest.mark.backends("alpha", "ghost")
        def test_pair(assert_parity):
            assert_parity(build={"alpha": None, "ghost": None})
        """
    )
    done = project.runpytest_subprocess(*QUIET)
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        [
            "ghost cannot be used here: ghost is not installed; pip install --upgrade stand-ins",
            "--polyamp-skip-missing makes this a skip.",
        ]
    )
    done = project.runpytest_subprocess(*QUIET, "--polyamp-skip-missing", "-rs")
    done.assert_outcomes(passed=1, skipped=2)
    done.stdout.fnmatch_lines(["SKIPPED*ghost is not installed; pip install --upgrade stand-ins"])
    chosen = project.runpytest_subprocess(*QUIET, "--polyamp-backends=alpha")
    chosen.assert_outcomes(passed=1, deselected=2)


def test_xdist_keeps_a_frameworks_tests_in_one_process(project: pytest.Pytester) -> None:
    project.makepyfile(MANY)
    xdist = (*QUIET, "-p", "xdist", "-n", "2", "--junitxml=junit.xml", "-k", "not fails")
    done = project.runpytest_subprocess(*xdist, "--dist=loadgroup")
    done.assert_outcomes(passed=6, skipped=2, xfailed=2)
    found = properties(project.path / "junit.xml")
    homes = {name: {v["process"] for test, v in found.items() if f"[{name}]" in test} for name in ("alpha", "beta")}
    assert [len(processes) for processes in homes.values()] == [1, 1]
    done = project.runpytest_subprocess(*xdist)  # by load: each worker has a process for each
    done.assert_outcomes(passed=6, skipped=2, xfailed=2)


def test_a_session_that_does_not_use_it_imports_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_plain():
            brought = sorted(name for name in sys.modules if name.startswith("polyamp"))
            names = ("", "._version", ".parity", ".parity.plugin")
            assert brought == [f"polyamp{name}" for name in names]
            assert not {"numpy", "msgspec", "torch", "jax", "tensorflow"} & set(sys.modules)
        """
    )
    project.runpytest_subprocess(*QUIET).assert_outcomes(passed=1)
    metadata = project.mkdir("first") / "polyamp-9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: polyamp\nVersion: 9\n")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert list(entries) == ["polyamp", "polyamp_conformance"]
    lines = [f"{name} = {module}" for name, module in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]))
    project.makeconftest("import sys\nprint('conformance' if 'polyamp.conformance.plugin' in sys.modules else 'none')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(metadata.parent), prepend=os.pathsep)
        patch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        shown = project.runpytest_subprocess("-p", "no:hypothesispytest", "--markers")
        assert "@pytest.mark.backends(*names)" in shown.stdout.str()
        without = project.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:polyamp", "--markers")
    assert without.ret == 0
    assert "backends" not in without.stdout.str()
