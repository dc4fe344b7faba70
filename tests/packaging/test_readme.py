"""The README tells the truth: every code block in it runs, in every framework, and its links and commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
"""(language, framework or "", text) of every fenced block."""


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {(language, framework) for language, framework, _ in BLOCKS} == {
        ("diff", ""),
        ("sh", ""),
        ("python", ""),
        ("python", "torch"),
        ("python", "tensorflow"),
        ("python", "jax"),
    }


def installed_by(line: str) -> set[str]:
    """What `pip install ...` brings, by the names of distributions: polyamp's requirements as pyproject.toml has them,
    and of those what is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: set[str] = set()
    left = [Requirement(word.strip('"')) for word in line.removeprefix("pip install ").split()]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name == "polyamp":
            texts = [*project["dependencies"], *(t for e in wanted.extras for t in project["optional-dependencies"][e])]
        elif name in found:
            continue
        else:
            try:
                texts = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # of another platform, or of a range that needs no such thing here
                continue
        found.add(name)
        for text in texts:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *wanted.extras)):
                left.append(needed)
    return found


ABSENT = """
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_distributions(context):
        found = PathFinder.find_distributions(context)
        return [one for one in found if one.name.lower().replace("_", "-").replace(".", "-") in {there!r}]

    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {denied!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_python_blocks_run_in_order(framework: str, tmp_path: Path) -> None:
    """With nothing but what the README says to install for that framework."""
    (line,) = [line for _, _, text in BLOCKS for line in text.splitlines() if f"[{framework}]" in line]
    there = installed_by(line)
    denied = {
        module
        for module, distributions in metadata.packages_distributions().items()
        if not module.startswith(("polyamp", "_"))
        and not there & {canonicalize_name(distribution) for distribution in distributions}
    }
    assert "pytest" in denied
    chosen = [text for language, name, text in BLOCKS if language == "python" and name in ("", framework)]
    script = tmp_path / "readme.py"
    script.write_text("\n".join([ABSENT.format(denied=denied, there=there), *chosen]), encoding="utf-8")
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    loss, scale, skipped = line.split()
    assert 0.0 < float(loss) < 10.0
    assert float(scale) in {2.0**exponent for exponent in range(12, 16)}, "three steps halve 2^15 at most three times"
    assert skipped in ("True", "False")


LOOP = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
loader = [(torch.ones(2, 4), torch.ones(2, 3))] * 3
loss_fn = torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
{program}
print(sum(float(p.detach().abs().sum()) for p in model.parameters()))
"""


def test_both_sides_of_the_diff_train_alike() -> None:
    """The loop of one's own has torch's very numbers; on a CPU, where the README has a GPU."""
    (diff,) = [text for language, _, text in BLOCKS if language == "diff"]
    printed = []
    for side in "-+":
        lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", side, "")]
        program = LOOP.format(program="\n".join(lines).replace('"cuda"', '"cpu"'))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        printed.append(float(done.stdout))
    assert printed[0] == printed[1]


def test_shell_commands_are_targets_of_the_makefile() -> None:
    """`make test` is what runs this test; `make demo` runs for real, with few steps."""
    lines = [line.partition("#")[0].strip() for language, _, text in BLOCKS if language == "sh"
             for line in text.splitlines() if not line.startswith("pip install")]  # fmt: skip
    assert lines == ["make demo", "make test"]
    for line in lines:
        done = subprocess.run([*line.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_links_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_it_is_short() -> None:
    assert len(README.split()) <= 900
