"""What `import polyamp` brings with it, in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyamp

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "jaxlib", "flax", "optax", "equinox", "haiku"}
HEAVY = {
    *("numpy", "ml_dtypes", "safetensors", "importlib.metadata", "tomllib", "tomli_w", "json", "difflib", "subprocess"),
    *("inspect", "dataclasses", "dis", "ast", "copy", "uuid", "decimal", "datetime", "platform", "tokenize"),
    *("matplotlib", "rich", "typer", "jinja2", "sklearn", "pytest", "pathlib", "unittest", "asyncio", "logging"),
}


def modules_after(code: str) -> set[str]:
    """Names in sys.modules after `code` in a new interpreter, less those that are there without it."""
    script = f"import sys; bare = set(sys.modules); {code}; found = set(sys.modules) - bare; import json; "
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script + "print(json.dumps(sorted(found)))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def imported() -> set[str]:
    names = ("init", "train_step", "value_and_grad", "Recipe", "Policy", "LossScaler", "adamw", "backends", "schedules")
    return modules_after(f"import polyamp; {'; '.join(f'polyamp.{name}' for name in names)}")


def test_no_framework_and_nothing_heavy_is_imported(imported: set[str]) -> None:
    assert "polyamp.recipe.policy" in imported
    assert imported & (FRAMEWORKS | HEAVY) == set()
    late = re.compile(r"polyamp_|polyamp\.(testing|cli|reference|checkpoint|losses)")
    assert [name for name in imported if late.match(name)] == []


def test_the_import_alone_brings_nothing() -> None:
    """pytest does it in every session of an environment that has polyamp, for the plugins."""
    brought = modules_after("import pytest; bare |= set(sys.modules); import polyamp")
    assert brought == {"polyamp", "polyamp._version"}


def test_no_other_distribution_is_imported(imported: set[str]) -> None:
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"polyamp"}


@pytest.mark.parametrize(
    "code",
    [
        "from polyamp import *",
        "import polyamp; polyamp.losses.huber; polyamp.save; polyamp.restore",
        "import polyamp; polyamp.Recipe(policy='mixed_float16', scaler='megatron').to_toml()",
        "import polyamp; polyamp.backends()",
        "import polyamp; hash(polyamp.Policy('O2', overrides={'a/*': 'f32'}).spelled)",
        "import polyamp.contract.harness, polyamp.demo.digits",
        "import polyamp.cli",
    ],
)
def test_no_framework_is_imported_by_using_the_core(code: str) -> None:
    assert modules_after(code) & FRAMEWORKS == set()


def test_recipes_policies_and_scalers_need_no_numpy() -> None:
    code = "import polyamp; polyamp.Recipe(policy='fp16').replace(clip_norm=1.0); polyamp.schedules.cosine(1.0, 10)(3)"
    assert "numpy" not in modules_after(code)


def test_public_names() -> None:
    assert sorted(polyamp.__all__) == list(polyamp.__all__)
    for name in polyamp.__all__:
        assert getattr(polyamp, name) is not None
    with pytest.raises(AttributeError, match="module 'polyamp' has no attribute 'nonesuch'"):
        polyamp.nonesuch  # noqa: B018  # the access is the test


ROOT = Path(polyamp.__file__).parents[1]
PUBLIC_MODULES = {"losses", "parity", "porting", "schedules", "accelerate", "lightning"}
"""Modules that users import by these names."""


@pytest.mark.parametrize(
    "package",
    [
        "polyamp",
        "polyamp/losses",
        "polyamp/parity",
        "polyamp/porting",
        *(f"backends/polyamp_{each}" for each in ("torch", "tensorflow", "jax")),
    ],
)
def test_no_submodule_has_the_name_of_something_public(package: str) -> None:
    """Importing the submodule would put it in the place of the function: a package has one attribute of a name."""
    if package == "polyamp":
        public = set(polyamp.__all__)
    else:
        source = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
        lists = [
            node.value
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        public = {name for value in lists for name in ast.literal_eval(value)}
    submodules = {
        path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert public
    assert public & submodules <= PUBLIC_MODULES


def test_a_comparison_in_one_process_leaves_the_one_of_several_callable() -> None:
    code = "import polyamp.parity, polyamp.parity.compare; from polyamp.parity import run"
    assert modules_after(f"{code}; assert callable(run); assert polyamp.parity.run is run")


def test_version_is_written_once() -> None:
    from importlib.metadata import version

    assert version("polyamp") == polyamp.__version__
    source = (Path(polyamp.__file__).parent / "_version.py").read_text()
    assert f'__version__ = "{polyamp.__version__}"' in source
