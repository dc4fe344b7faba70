"""The tool's own tests: the faults that it makes, what it runs for them, and that a copy of a repository is enough."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.mutants.__main__ import Draw, failing_anyway, main, shown, tried
from tests.mutants.operators import mutants
from tests.mutants.sandbox import Sandbox
from tests.mutants.selection import FRAMEWORKS, ROOT, Stage, library, stages

SOURCE = '''"""A docstring with 1 < 2."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os


class Größe:
    """Ä: the offsets are bytes."""

    __slots__ = ("a",)

    def size(self, n: int | None = None) -> float | None:
        """More than 1."""
        assert n is not None, 5
        if not n or (n) >= 2:
            raise ValueError(f"{n + 1} ä {2}", 3)
        ä = [x * 0.5 for x in range(n)]; self.a = 4
        for _ in zip(ä, ä, strict=True):
            break
        return max(ä, key=abs, default=-1.5) if n is not True else None
'''


def edits(kind: str) -> set[tuple[str, str]]:
    """The text before and after each fault of a kind."""
    data = SOURCE.encode()
    found = [mutant for mutant in mutants(SOURCE) if mutant.kind == kind]
    return {(data[mutant.start : mutant.end].decode(), mutant.after) for mutant in found}


def test_the_faults_are_small_edits_of_the_text() -> None:
    assert edits("comparison") == {(">=", ">"), (">=", "<"), ("is not", "is")}
    assert edits("logic") == {("or", "and")}
    assert edits("arithmetic") == {("*", "/")}
    assert edits("number") == {
        *((str(n), str(other)) for n in (2, 4) for other in (n - 1, n + 1)),
        *(("False", "True"), ("True", "False"), ("0.5", "1.0"), ("1.5", "3.0")),
    }
    assert edits("condition") == {
        ("not n", "(n)"),
        ("not n or (n) >= 2", "not (not n or (n) >= 2)"),
        ("n is not True", "not (n is not True)"),
    }
    assert edits("argument") == {(", key=abs", ""), (", default=-1.5", "")}
    assert {before.split("\n")[0] for before, after in edits("statement") if after == "pass"} == {
        "TYPE_CHECKING = False",
        'raise ValueError(f"{n + 1} ä {2}", 3)',
        "ä = [x * 0.5 for x in range(n)]",
        "self.a = 4",
        "break",
    }


def test_a_list_of_names_loses_one_of_them() -> None:
    source = "A = 'exp log1p soft_max pow'; B = 'all of these words'; C = 'two_names more'"
    assert [mutant.applied(source)[:26] for mutant in mutants(source) if mutant.kind == "word"] == [
        "A = 'exp soft_max pow'; B ",
        "A = 'exp log1p pow'; B = '",
        "A = 'exp log1p soft_max'; ",
    ]


def test_every_fault_parses_and_is_another_program_at_its_line() -> None:
    for source in (
        SOURCE,
        (ROOT / "polyamp/recipe/scaler.py").read_text(),
        (ROOT / "polyamp/losses/classification.py").read_text(),
    ):
        for mutant in mutants(source):
            changed = mutant.applied(source)
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
            lines = zip(source.split("\n"), changed.split("\n"), strict=False)
            assert next(number for number, (before, after) in enumerate(lines, 1) if before != after) == mutant.line
            assert {line[0] for line in mutant.diff(source).split("\n")} <= {"+", "-"}


def test_a_seed_draws_the_same_fault_again(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert main(["--seeds", "0-4,9", "--only", "polyamp/rules/*", "--list"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].count("seed ") == 5
    assert len({mutant for seed in range(20) for mutant in [Draw("polyamp/rules/*")(seed)]}) > 15
    with pytest.raises(SystemExit, match="--only must be a glob of paths"):
        Draw("polyamp/nonesuch/*")


def names(path: str, *, whole: bool = False) -> list[str]:
    return [stage.name for stage in stages(path, whole=whole)]


def test_what_ought_to_notice_is_run_from_the_nearest_on() -> None:
    assert names("polyamp/rules/parameter_kinds.py") == ["doctest", "near", "room", "conformance-reference"]
    near = stages("polyamp/rules/parameter_kinds.py")[1].arguments
    assert near == ("tests/core/rules/test_group_members.py", "tests/core/rules/test_parameter_kinds.py")
    rest = stages("polyamp/rules/parameter_kinds.py")[2].arguments
    assert rest == ("tests/core/rules", *(f"--ignore={path}" for path in near))
    assert names("backends/polyamp_jax/step/grad_stats.py")[2:] == ["room", "conformance-jax"]
    assert names("backends/polyamp_torch/porting/inventory.py")[-1] == "tests/porting"
    assert names("backends/polyamp_torch/arrays.py")[-1] == "backend-torch", "it is in no room"
    assert names("polyamp/rules/clip.py", whole=True)[-4:] == ["core", *(f"conformance-{name}" for name in FRAMEWORKS)]
    assert names("backends/polyamp_jax/step/grad_stats.py", whole=True)[-2:] == ["backend-jax", "distributed-jax"]


def test_every_file_of_the_library_has_tests_that_are_there_in_one_framework() -> None:
    files = library()
    assert "polyamp/recipe/scaler.py" in files
    assert not any(path.startswith(("polyamp/conformance", "tests")) for path in files)
    for path in files:
        backend = path.split("/")[1].removeprefix("polyamp_") if path.startswith("backends") else "reference"
        for stage in stages(path, whole=True):
            given = [each for each in stage.arguments if each.startswith(("tests/", "backends/", "polyamp/"))]
            assert all((ROOT / each).exists() for each in given), stage
            mine = [each for each in given if each.startswith("tests/backends/")]
            assert all(each.startswith(f"tests/backends/{backend}") for each in mine), stage


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One module, one test that looks at half of it, and one that fails anyway."""
    texts = {
        "half.py": "def half(n: int) -> int:\n    if n < 0:\n        return 0\n    return n // 2\n",
        "test_half.py": "from half import half\n\n\ndef test_half() -> None:\n    assert half(6) == 3\n",
        "test_broken.py": "def test_broken() -> None:\n    assert False\n",
        "tests/xla.py": "",
        ".gitignore": "ignored\n",
        "ignored": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def test_a_fault_is_tried_in_a_copy_and_the_log_says_who_noticed(repository: Path) -> None:
    text = (repository / "half.py").read_text()
    arithmetic, comparison = (
        next(mutant for mutant in mutants(text) if mutant.kind == kind and mutant.after in ("*", "<="))
        for kind in ("arithmetic", "comparison")
    )
    plan = [Stage("near", ("test_half.py",))]
    with Sandbox(repository) as sandbox:
        assert not (sandbox.root / "ignored").exists()
        killed = tried(sandbox, 1, "half.py", text, arithmetic, plan)
        survived = tried(sandbox, 2, "half.py", text, comparison, plan)
        broken = {"stage": "near", "test": "test_broken.py::test_broken"}
        assert (sandbox.root / "half.py").read_text() == text
        assert failing_anyway(sandbox, [survived, broken]) == {"test_broken.py::test_broken"}
    assert not sandbox.root.exists()
    assert (repository / "half.py").read_text() == text
    assert (killed["verdict"], killed["stage"], killed["test"]) == ("killed", "near", "test_half.py::test_half")
    assert shown(survived) == ("survived seed 2 half.py:2 comparison\n    -     if n < 0:\n    +     if n <= 0:")


def test_the_test_that_failed_is_not_one_of_a_pytest_inside_it(repository: Path) -> None:
    inside = """def test_outer() -> None:
    print("= short test summary info =\\nFAILED test_inner.py::test_inner")
    assert False
"""
    (repository / "test_outer.py").write_text(inside)
    with Sandbox(repository) as sandbox:
        assert sandbox.pytest("test_outer.py").test == "test_outer.py::test_outer"


def test_a_run_that_is_stopped_ends_with_all_that_it_started(repository: Path) -> None:
    child = """import pathlib, subprocess, sys

def test_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("pid").write_text(f"{child.pid} ")
    child.wait()
"""
    (repository / "test_child.py").write_text(child)
    with Sandbox(repository) as sandbox, ThreadPoolExecutor(1) as pool:
        assert sandbox.pytest("test_half.py", seconds=0.01).status is None
        run = pool.submit(sandbox.pytest, "test_child.py")
        said = sandbox.root / "pid"
        while not (said.exists() and said.read_text().endswith(" ")):
            assert not run.done(), run.result().output
            time.sleep(0.05)
        pid = int(said.read_text())
        sandbox.close()
        assert run.result().failed
    for _ in range(200):  # a signal takes a moment
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.05)
                continue
        return
    pytest.fail("the child of a run that was stopped lives")
