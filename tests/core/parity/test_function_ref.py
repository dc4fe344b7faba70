"""How functions and arrays reach other processes: what is named, what is refused, and that arrays come back as they
were."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import parity_sides
import pytest

from polyamp import ArgumentError
from polyamp.parity.execution.function_ref import (
    FunctionRef,
    add_import_paths,
    import_paths,
    load_module_file,
    make_function_ref,
)
from polyamp.parity.execution.memory_mapped_arrays import ArrayStore, batch_digest, load_batch, memory_map
from polyamp.porting import Batch


def here() -> int:
    return 7


class Model:
    def make(self) -> int:
        return 8

    @staticmethod
    def made() -> int:
        return 9


def test_a_function_is_named_by_its_module_and_found_again() -> None:
    found = make_function_ref(parity_sides.plain, "build")
    assert found == FunctionRef(module="parity_sides", name="plain", file=str(Path(parity_sides.__file__).resolve()))
    assert found.load() is parity_sides.plain
    assert make_function_ref(here, "build").load() is here
    assert make_function_ref(Model.made, "build").load()() == 9
    assert make_function_ref(Model, "build").load() is Model


def test_what_no_other_process_can_import_is_refused_with_what_to_do() -> None:
    def inner() -> None: ...

    @functools.wraps(here)
    def other() -> None: ...

    nowhere = eval("lambda: 1")
    nowhere.__qualname__, nowhere.__module__ = "f", "no_such_module"
    for value, message in {
        nowhere: "f of no_such_module, which has no file. Put it into a file and import that.",
        inner: "inner, which is made inside of test_what_no_other_process_can_import_is_refused_with_what_to_do. Write",
        other: "here, and tests.core.parity.test_function_ref.here is another object. Give what the module has there.",
        (lambda: 1): "Received: a lambda. Write a function with a name, at the top level of a file, and give that.",
        functools.partial(here): "Received: a functools.partial. Write a function with a name, at the top level of a "
        "file, and give that: it calls the other one with its arguments.",
        Model().make: "Received: the method Model.make of an object. Write a function",
        3: "build['one'] must be a function that another process can import: it is called in one. Received: 3.",
    }.items():
        with pytest.raises(ArgumentError) as caught:
            make_function_ref(value, "build['one']")
        assert message in str(caught.value)


def test_a_file_is_imported_by_its_name_only_where_that_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, value in ((first, 1), (second, 2)):
        folder.mkdir()
        (folder / "my_models.py").write_text(f"VALUE = {value}\ndef make():\n    return VALUE\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(first)])
    try:
        assert load_module_file("my_models", second / "my_models.py").VALUE == 2
        assert sys.modules["my_models"].VALUE == 2
        del sys.modules["my_models"]
        assert load_module_file("my_models", first / "my_models.py").VALUE == 1
        assert load_module_file("my_models", first / "my_models.py") is sys.modules["my_models"]
        missing = FunctionRef(module="my_models", name="make.it", file=str(first / "my_models.py"))
        with pytest.raises(ArgumentError, match=r"my_models.py has no make.it where it is imported: is it made under"):
            missing.load()
    finally:
        sys.modules.pop("my_models", None)


def test_folders_of_the_interpreter_are_not_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", *sys.path])
    found = import_paths()
    assert found[:2] == [str(tmp_path.resolve()), str(Path.cwd())]
    assert not any("site-packages" in each or each.endswith(("lib-dynload", ".zip")) for each in found)
    monkeypatch.setattr(sys, "path", ["/usr/lib/somewhere"])
    add_import_paths([str(tmp_path), "/usr/lib/somewhere"])
    assert sys.path == [str(tmp_path), "/usr/lib/somewhere"]


def test_a_batch_comes_back_as_it_was(tmp_path: Path) -> None:
    half = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    tree = {
        "x": [np.arange(12.0).reshape(3, 4).T, np.float16(3.0), np.zeros((0, 3), np.int64)],
        "y": (half, "text", None, True),
        "z": Batch(np.array(["a", "bc"]), {1: np.array(5)}),
    }
    with ArrayStore(tmp_path / "data.bin") as store:
        kept = store.put_tree(tree, "data")
    back = load_batch(tmp_path / "data.bin", kept)
    assert batch_digest(back) == batch_digest(tree)
    assert back["y"][1:] == ("text", None, True)
    assert back["y"][0].dtype == ml_dtypes.bfloat16
    assert back["z"].source.tolist() == ["a", "bc"]
    assert back["z"].target[1].shape == ()
    back["x"][0][:] = 0.0
    assert load_batch(tmp_path / "data.bin", kept)["x"][0][1, 2] == 9.0
    place = kept.children[1].children[0].place
    assert place is not None
    assert memory_map(tmp_path / "data.bin", place).tolist() == half.tolist()


@pytest.mark.parametrize("other", [{"x": np.ones(2)}, {"x": np.ones(3, "f4")}, {"y": np.ones(3)}, [np.ones(3)]])
def test_batches_that_differ_have_other_digests(other: Any) -> None:
    assert batch_digest({"x": np.ones(3)}) == batch_digest({"x": np.ones(3)})
    assert batch_digest(other) != batch_digest({"x": np.ones(3)})
