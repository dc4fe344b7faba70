"""Discovery of backends: real installed distributions in a folder on the path of a fresh interpreter."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import BackendError, Policy, framework_detection
from polyamp import backend_lookup as lookup
from polyamp.contract import registry
from polyamp.reference import BACKEND
from polyamp.reference.tensor import Tensor

WORKING = """
    from polyamp.contract.backend import BackendInfo

    class Backend:
        name = "tiny"

        def info(self):
            return BackendInfo("tiny", "2.5", ("abacus:0", "abacus:1"))

    BACKEND = Backend()
"""


class Site:
    """A folder of installed distributions, and interpreters that see it beside polyamp."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, code: str) -> None:
        package = self.folder / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(dedent(code))

    def distribution(
        self, name: str, *, version: str = "1.0", group: str = lookup.ENTRY_POINT_GROUP, **entries: str
    ) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{entry} = {value}" for entry, value in entries.items()]
        if lines:
            (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))

    def run(self, code: str) -> Any:
        """What `code` assigns to `answer`; an exception as (type names, message, cause)."""
        script = (
            "import json, sys\nfrom polyamp.contract import registry\nanswer = None\ntry:\n"
            + indent(dedent(code).strip(), "    ")
            + "\nexcept Exception as error:\n"
            "    kinds = [kind.__name__ for kind in type(error).__mro__]\n"
            "    answer = [kinds, str(error), type(error.__cause__).__name__]\n"
            "print(json.dumps(answer))\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_third_partys_backend_is_found_by_name_and_by_object(site: Site) -> None:
    site.module("polyamp_tiny", WORKING)
    site.module("tiny", "class Array: pass")
    site.module("onlooker", "class Base: pass")
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND", tinynets="polyamp_tiny:BACKEND")
    answer = site.run(
        """
        registry.names()
        lazy = "polyamp_tiny" not in sys.modules
        import tiny, onlooker
        class Mine(onlooker.Base, tiny.Array): pass
        found = registry.get("tiny")
        answer = [
            lazy,
            found.name,
            registry.get("tinynets") is found,
            registry.backend_for(tiny.Array()) is found,
            registry.backend_for(3, {"x": [None, (tiny.Array(),)]}) is found,
            registry.backend_for(Mine()) is found,
            registry.names()["tiny"],
            "tinynets" in registry.names(),
        ]
        """
    )
    assert answer == [True, "tiny", True, True, True, True, "polyamp_tiny:BACKEND", False]


def test_an_object_is_recognised_only_if_its_framework_is_imported(site: Site) -> None:
    site.module("polyamp_tiny", WORKING)
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    answer = site.run(
        """
        class Pretender: pass
        Pretender.__module__ = "tiny.sub"
        answer = registry.backend_for(Pretender()).name
        """
    )
    assert answer[1].startswith("no backend recognises tiny.sub.Pretender. Registered: ")


def test_a_missing_framework_gives_the_install_command(site: Site) -> None:
    site.module("polyamp_tiny", "import tiny.arrays\nBACKEND = None")
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    kinds, message, cause = site.run("registry.get('tiny')")
    assert message == "backend 'tiny' needs tiny, which is not installed. Run: pip install --upgrade polyamp-tiny"
    assert (kinds[0], cause) == ("BackendNotInstalledError", "ModuleNotFoundError")
    assert {"BackendError", "PolyampError", "ImportError"} <= set(kinds)


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [("torch", "torch", "torch"), ("keras", "tensorflow", "tensorflow"), ("flax", "jax", "jax")],
)
def test_polyamps_own_backends_are_extras(site: Site, name: str, missing: str, extra: str) -> None:
    kinds, message, _ = site.run(f"sys.modules[{missing!r}] = None\nregistry.get({name!r})")
    assert kinds[0] == "BackendNotInstalledError"
    assert message == f'backend {name!r} needs {missing}, which is not installed. Run: pip install "polyamp[{extra}]"'


@pytest.mark.parametrize(
    ("code", "said", "cause"),
    [
        ("raise ValueError('bad build')", "ValueError: bad build", "ValueError"),
        ("from json import nonesuch", "ImportError: cannot import name 'nonesuch' from 'json'", "ImportError"),
        ("import polyamp_tiny.gone", "ModuleNotFoundError: No module named 'polyamp_tiny.gone'", "ModuleNotFoundError"),
        ("def", "SyntaxError: invalid syntax", "SyntaxError"),
        ("", "AttributeError: module 'polyamp_tiny' has no attribute 'BACKEND'", "AttributeError"),
    ],
)
def test_a_broken_import_names_the_entry_point_and_its_distribution(
    site: Site, code: str, said: str, cause: str
) -> None:
    site.module("polyamp_tiny", code)
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    kinds, message, chained = site.run("registry.get('tiny')")
    where = "backend 'tiny' (entry point 'polyamp_tiny:BACKEND' of polyamp-tiny)"
    assert message.startswith(f"{where} fails to import: {said}")
    assert message.endswith("Reinstall it: pip install --upgrade polyamp-tiny")
    assert (kinds[0], chained) == ("BackendError", cause)


def test_two_distributions_claiming_one_name_are_both_named(site: Site) -> None:
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    site.distribution("other-tiny", tiny="other_tiny:BACKEND")
    for code in ("registry.get('tiny')", "registry.get('reference')", "registry.backends()"):
        kinds, message, _ = site.run(code)
        assert kinds[0] == "BackendError"
        assert message.startswith("two distributions claim the backend 'tiny': ")
        assert "polyamp-tiny (polyamp_tiny:BACKEND)" in message
        assert "other-tiny (other_tiny:BACKEND)" in message
        assert message.endswith("Uninstall one of them.")


def test_claiming_a_name_of_polyamps_own_is_refused(site: Site) -> None:
    site.distribution("other-torch", torch="other_torch:BACKEND")
    _, message, _ = site.run("registry.names()")
    assert "'torch'" in message
    assert "other-torch (other_torch:BACKEND)" in message
    assert "polyamp (polyamp_torch:BACKEND)" in message


def test_one_backend_listed_twice_is_no_conflict(site: Site) -> None:
    site.module("polyamp_tiny", WORKING)
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    site.distribution("polyamp-tiny-metapackage", tiny="polyamp_tiny:BACKEND")
    assert site.run("answer = registry.get('tiny').name") == "tiny"


def test_backends_tells_what_is_usable_without_importing_it(site: Site) -> None:
    site.module("polyamp_tiny", WORKING)
    site.module("polyamp_lost", WORKING)
    site.module("tiny", "")
    site.distribution("tiny", version="2.4")
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    site.distribution("polyamp-lost", lost="polyamp_lost:BACKEND")
    site.distribution("polyamp-gone", gone="polyamp_gone:BACKEND")
    answer = site.run(
        """
        found = registry.backends()
        frameworks = ["torch", "tensorflow", "keras", "jax", "tiny", "polyamp_tiny", "polyamp_torch", "numpy"]
        answer = [found, [name for name in frameworks if name in sys.modules]]
        """
    )
    assert answer[1] == []
    found = answer[0]
    assert list(found) == sorted(["gone", "jax", "lost", "reference", "tensorflow", "tiny", "torch"])
    assert found["tiny"] == ["tiny", True, "2.4", [], None]
    assert found["lost"][1:] == [False, None, [], "lost is not installed; pip install --upgrade polyamp-lost"]
    assert found["gone"][1:] == [False, None, [], "its package is missing; pip install --upgrade polyamp-gone"]
    assert found["reference"] == ["reference", True, np.__version__, [], None]


def test_backends_lists_devices_of_an_imported_framework_and_survives_a_broken_one(site: Site) -> None:
    site.module("polyamp_tiny", WORKING)
    site.module("polyamp_bad", "raise ValueError('bad build')")
    site.module("tiny", "")
    site.module("bad", "")
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    site.distribution("polyamp-bad", bad="polyamp_bad:BACKEND")
    found = site.run("import tiny, bad\nanswer = registry.backends()")
    assert found["tiny"] == ["tiny", True, "2.5", ["abacus:0", "abacus:1"], None]
    assert found["bad"][:4] == ["bad", False, None, []]
    assert "polyamp_bad:BACKEND' of polyamp-bad) fails to import: ValueError: bad build" in found["bad"][4]


def test_probing_imports_each_backend_in_its_own_interpreter(site: Site) -> None:
    noise = """
    import atexit
    import sys
    print('noise')
    sys.stdout.flush()
    sys.stdout.buffer.write(b'\\xff without an end of line')
    atexit.register(print, 'more noise')
"""
    site.module("polyamp_tiny", WORKING + noise)
    site.module("polyamp_bad", "import bad.engine\nBACKEND = None")
    site.module("polyamp_dying", "import os\nos._exit(7)")
    site.distribution("polyamp-tiny", tiny="polyamp_tiny:BACKEND")
    site.distribution("polyamp-bad", bad="polyamp_bad:BACKEND")
    site.distribution("polyamp-dying", dying="polyamp_dying:BACKEND")
    answer = site.run(
        """
        own = {name: value for name, value in registry.names().items() if name not in ("torch", "tensorflow", "jax")}
        registry.names = lambda: own
        answer = [registry.backends(probe=True), "polyamp_tiny" in sys.modules]
        """
    )
    found, imported = answer
    assert not imported
    assert found["tiny"] == ["tiny", True, "2.5", ["abacus:0", "abacus:1"], None]
    assert found["bad"][:4] == ["bad", False, None, []]
    assert "needs bad, which is not installed. Run: pip install --upgrade polyamp-bad" in found["bad"][4]
    assert found["dying"] == ["dying", False, None, [], "the interpreter ended with status 7"]
    assert found["reference"] == ["reference", True, np.__version__, ["cpu"], None]


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(BackendError) as caught:
        registry.get("tensorlfow")
    message = str(caught.value)
    assert message.startswith("backend must be one of jax, reference, tensorflow, torch")
    assert message.endswith("Received: 'tensorlfow'. Did you mean 'tensorflow'?")
    with pytest.raises(BackendError, match=r"Received: 'qqq'\.$"):
        registry.get("qqq")


def test_own_backends_have_one_name_each() -> None:
    names = registry.names()
    assert {name: names[name] for name in ("torch", "tensorflow", "jax", "reference")} == {
        "torch": "polyamp_torch:BACKEND",
        "tensorflow": "polyamp_tensorflow:BACKEND",
        "jax": "polyamp_jax:BACKEND",
        "reference": "polyamp.reference:BACKEND",
    }
    assert not {"keras", "flax", "numpy", "polyamp"} & set(names)


def test_numpy_goes_to_the_reference() -> None:
    assert registry.backend_for(np.zeros(2)) is BACKEND
    assert registry.backend_for({"x": [1, (np.float32(1.0), "text")]}) is BACKEND
    assert polyamp.backends()["reference"].devices == ("cpu",)


def test_a_module_of_the_users_may_be_called_as_the_reference_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reference", types.ModuleType("reference"))
    model = type("Net", (), {"__module__": "reference.nets"})()
    with pytest.raises(BackendError, match=r"no backend recognises reference\.nets\.Net"):
        registry.backend_for(model)
    assert framework_detection.detect_frameworks(type(model), ["reference"]) == []


def test_an_object_of_no_framework_is_refused() -> None:
    with pytest.raises(BackendError, match=r"no backend recognises builtins\.int, builtins\.dict\. Registered: jax, "):
        registry.backend_for(3, {"x": "text"})


def test_autocast_of_a_plain_function_waits_for_its_arguments() -> None:
    calls: list[str] = []

    @functools.partial(Policy("p=f32,c=f16,o=f32").autocast, backend="reference")
    def double(x: Any) -> Any:
        """Doubles."""
        calls.append(x.dtype.name)
        return x + x

    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    double(np.ones(1, np.float32))
    assert calls == ["float16"]
    waiting = Policy("mixed_float16").autocast(lambda x: x)
    assert waiting(x := Tensor(np.ones(1, np.float32))).data.tolist() == x.data.tolist()
    with pytest.raises(BackendError, match=r"cannot tell which framework .*<lambda> computes with: no argument"):
        waiting("text")


def test_autocast_of_something_uncallable_is_refused() -> None:
    with pytest.raises(BackendError, match=r"no backend recognises builtins\.int"):
        Policy("mixed_float16").autocast(3)  # type: ignore[arg-type]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    lookup.entries.cache_clear()
    yield
    lookup.entries.cache_clear()


@pytest.mark.usefixtures("nothing_installed")
def test_an_uninstalled_source_tree_says_so() -> None:
    with pytest.raises(BackendError, match=r"no backend is registered, .* not installed\. Run `pip install -e \.`"):
        registry.backend_for(np.zeros(2))


CHOICE = """
    import tiny

    def backend_name():
        tiny.asked.append(1)
        return tiny.name
"""


def test_a_framework_that_runs_on_several_has_the_backend_of_the_one_in_use(site: Site) -> None:
    site.module("many", CHOICE)
    site.module("tiny", "name, asked = 'reference', []\nclass Model: __module__ = 'many.models'")
    site.distribution("polyamp-many", group=lookup.CHOICE_GROUP, many="many:backend_name")
    answer = site.run(
        """
        import many, tiny
        known = "many" in registry.entries(), "many" in registry.names(), "many" in [*registry.entries()]
        asked = len(tiny.asked)
        answer = [
            known,
            asked,
            registry.backend_for(tiny.Model()).name,
            registry.get("many") is registry.get("reference"),
            registry.entries()["many"].value,
            registry.check_backend_argument("reference", tiny.Model()),
            len(tiny.asked),
        ]
        """
    )
    assert answer == [[True, False, True], 0, "reference", True, "polyamp.reference:BACKEND", None, 1]


@pytest.mark.parametrize(("code", "kind"), [("lost", "BackendNotInstalledError"), ("tiny", "UnsupportedError")])
def test_a_choice_that_fails_is_no_other_backend(site: Site, code: str, kind: str) -> None:
    raises = "\n    def backend_name():\n        raise UnsupportedError('runs on abaci alone')\n"
    site.module("tiny", "")
    site.module("many", f"    import {code}\n    from polyamp.errors import UnsupportedError{raises}")
    site.distribution("polyamp-many", group=lookup.CHOICE_GROUP, many="many:backend_name")
    kinds, message, _ = site.run("registry.get('many')")
    assert kinds[0] == kind
    assert message == (
        "runs on abaci alone"
        if code == "tiny"
        else "backend 'many' needs lost, which is not installed. Run: pip install --upgrade polyamp-many"
    )
