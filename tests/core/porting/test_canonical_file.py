"""`porting.save` and `porting.open`: what is in the file, what is refused, and what a save that dies leaves."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from polyamp import porting
from polyamp.errors import ArgumentError, PortError
from polyamp.porting import progress as progress_module
from polyamp.porting.files import canonical_file
from polyamp.porting.progress import progress_bar, track_reads
from polyamp.train.checkpoint_tensors import content_digest

RANDOM = np.random.default_rng(0)


def lazy(*shape: int, dtype: Any = "float32") -> porting.Lazy:
    return porting.Lazy.of(RANDOM.standard_normal(shape).astype(dtype))


def example() -> porting.Canonical:
    """An embedding, a dense layer tied to it, a norm, and what else a file has to keep."""
    table = RANDOM.standard_normal((7, 4)).astype(ml_dtypes.bfloat16)
    layers = {
        "wte": porting.Layer(
            "embedding", {"table": porting.Lazy.of(table)}, {"scale": 2.0}, module="torch.nn.Embedding"
        ),
        "h/0/bn": porting.Layer(
            "batch_norm", {"scale": lazy(4), "mean": lazy(4)}, {"epsilon": 1e-5}, fixed=frozenset({"mean"})
        ),
        "flat": porting.Layer("flatten", {}, {"channels": "first"}),
        "conv": porting.Layer("conv", {"kernel": lazy(3, 3, 2, 5)}, {"strides": (2, 2), "padding": "same"}),
        "token": porting.Layer("parameter", {"value": lazy(dtype="float64")}),
        "head": porting.Layer("dense", {"kernel": porting.Lazy.of(table.T)}, tied={"kernel": "wte/table"}),
        "count": porting.Layer("parameter", {"value": porting.Lazy.of(np.array([3, 4], "uint8"))}),
    }
    return porting.Canonical(layers, "torch", ordered=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    porting.save(example(), path)
    return path


def read_all(path: Path) -> None:
    for array in porting.open(path).arrays().values():
        array.read()


def refused(path: Path, *, read: bool = False) -> str:
    """What `open` says, or an array when it is read."""
    if not read:
        with pytest.raises(PortError) as caught:
            porting.open(path)
        return str(caught.value)
    with pytest.raises(PortError) as caught:
        read_all(path)
    return str(caught.value)


def test_everything_comes_back(tmp_path: Path) -> None:
    model = example()
    path = tmp_path / "model.safetensors"
    porting.save(model, path)
    opened = porting.open(os.fspath(path))
    assert (list(opened), opened.framework, opened.ordered) == (list(model), "torch", False)
    for name, layer in model.items():
        other = opened[name]
        assert (other.kind, other.module, other.tied, other.fixed) == (
            layer.kind,
            layer.module,
            layer.tied,
            layer.fixed,
        )
        assert other.attributes == {key: list(v) if type(v) is tuple else v for key, v in layer.attributes.items()}
        assert list(other.arrays) == list(layer.arrays)
        for key, array in layer.arrays.items():
            values = other.arrays[key].read()
            assert (values.dtype, values.shape) == (array.dtype, array.shape)
            assert values.tobytes() == array.read().tobytes()
            assert not values.flags.writeable
    assert "head/kernel" not in opened.arrays()
    assert opened["head"].arrays["kernel"].read().base is not None


def test_the_public_library_reads_it(saved: Path) -> None:
    model = example()
    with safe_open(saved, framework="numpy") as file:
        assert set(file.keys()) == set(model.arrays())
        assert file.metadata()["format"] == "polyamp-canonical-1"
        assert json.loads(file.metadata()["layers"])[3]["attributes"] == {"strides": [2, 2], "padding": "same"}
        table = file.get_tensor("wte/table")
        assert table.dtype == ml_dtypes.bfloat16
        opened = porting.open(saved)
        for name in file.keys():  # noqa: SIM118  # no mapping
            assert file.get_tensor(name).tobytes() == np.asarray(opened.arrays()[name]).tobytes()


def test_arrays_lie_at_multiples_of_their_size(saved: Path) -> None:
    assert all(array.read().flags.aligned for array in porting.open(saved).arrays().values())


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    reads: list[str] = []

    def array(name: str) -> porting.Lazy:
        return porting.Lazy((2,), "float32", lambda: reads.append(name) or np.zeros(2, "float32"))  # type: ignore[func-returns-value]

    layers = {name: porting.Layer("parameter", {"value": array(name)}) for name in "ab"}
    porting.save(porting.Canonical(layers, "torch"), tmp_path / "model")
    assert reads == ["a", "b"]
    (tmp_path / "model").write_bytes(flipped((tmp_path / "model").read_bytes(), -1))
    opened = porting.open(tmp_path / "model")  # which cannot know it
    assert opened["a"].arrays["value"].read().tolist() == [0, 0]
    with pytest.raises(PortError, match="the values of 'b/value' do not match their digest"):
        opened["b"].arrays["value"].read()


def test_a_tie_that_is_no_copy_is_stored_by_itself(tmp_path: Path) -> None:
    table, kernel = lazy(3, 3), lazy(3, 3)
    layers = {
        "a": porting.Layer("embedding", {"table": table}),
        "b": porting.Layer("dense", {"kernel": kernel}, tied={"kernel": "a/table"}),
        "c": porting.Layer("dense", {"kernel": porting.Lazy.of(table.read().T.copy())}, tied={"kernel": "a/table"}),
    }
    porting.save(porting.Canonical(layers, "keras"), tmp_path / "model")
    opened = porting.open(tmp_path / "model")
    assert opened["b"].tied == opened["c"].tied == {"kernel": "a/table"}
    assert np.array_equal(opened["b"].arrays["kernel"], kernel)
    assert np.array_equal(opened["c"].arrays["kernel"], table.read().T)
    with safe_open(tmp_path / "model", framework="numpy") as file:
        assert sorted(file.keys()) == ["a/table", "b/kernel"]


def flipped(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 16
    return bytes(changed)


def test_every_flipped_byte_is_noticed(saved: Path) -> None:
    content = saved.read_bytes()
    for position in [*range(8), *range(8, len(content), 7), len(content) - 1]:
        saved.write_bytes(flipped(content, position))
        assert "model.safetensors is" in refused(saved, read=True)


def test_every_truncation_is_noticed_at_once(saved: Path) -> None:
    content = saved.read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        saved.write_bytes(content[:length])
        said = refused(saved)
        assert said.startswith(f"{saved} is no model that porting.save wrote (")
        assert said.endswith("It is truncated, damaged or another program's; save it again, or restore an older one.")
    saved.write_bytes(content + b"\0")
    assert "bytes, and" in refused(saved)


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The file with another header and a digest that matches it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    blank = "polyamp-digest".ljust(64, "-")
    if "polyamp.digest" in header.get("__metadata__", ()):
        header["__metadata__"]["polyamp.digest"] = blank
    text = json.dumps(header).encode()
    text = text.replace(blank.encode(), content_digest(text, blank).encode())
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_headers_that_lie_are_refused(saved: Path) -> None:
    content = saved.read_bytes()

    def entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
        return lambda header: header[name].update(changes)

    for change, said in (
        (
            entry("conv/kernel", data_offsets=[0, 360]),
            "'conv/kernel' begins at byte 0, and what lies before it ends at 8",
        ),
        (entry("conv/kernel", data_offsets=[8, 364]), "'conv/kernel', F32[3, 3, 2, 5], lies from byte 8 to 364"),
        (entry("conv/kernel", shape=[-1, -90]), "'conv/kernel' has a shape or offsets that are no sizes"),
        (entry("count/value", shape=[2, 0, 1 << 60], data_offsets=[0, 0]), "no sizes"),
        (entry("conv/kernel", dtype="F4"), "dtype 'F4' is unknown"),
        (entry("conv/kernel", shape=None), "TypeError"),
        (lambda header: header.pop("count/value"), "its arrays take"),
        (lambda header: header.update(more={}), "KeyError: 'data_offsets'"),
    ):
        saved.write_bytes(content)
        rewritten(saved, change)
        assert said in refused(saved)
    for header in (b"[]", b"null", b'"text"', b'{"__metadata__": 3}', b'{"a": 1, "a": 2}', b"[" * 100_000, b"\xff"):
        saved.write_bytes(len(header).to_bytes(8, "little") + header)
        assert "is no model that porting.save wrote (" in refused(saved)
    one = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    twice = b"{" + one + b", " + one + b"}"
    saved.write_bytes(len(twice).to_bytes(8, "little") + twice + b"\0" * 4)
    assert "a name stands in its header twice" in refused(saved)
    saved.write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    assert "its header claims 1,152,921,504,606,846,976 bytes" in refused(saved)


def test_layers_that_contradict_their_arrays_are_refused(saved: Path) -> None:
    content = saved.read_bytes()

    def layers(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], None]:
        def apply(header: dict[str, Any]) -> None:
            found = json.loads(header["__metadata__"]["layers"])
            changed = change(found)
            found = changed if isinstance(changed, list) else found
            header["__metadata__"]["layers"] = json.dumps(found)

        return apply

    def text(value: str | None) -> Callable[[dict[str, Any]], None]:
        return lambda header: header["__metadata__"].update(layers=value)

    for change, said in (
        (text("{no json"), "Expecting property name"),
        (text("[3]"), "not subscriptable"),
        (text('[{"path": 3}]'), "'path' of a layer is no str: 3"),
        (layers(lambda found: found[0].update(path=None)), "'path' of a layer is no str: None"),
        (layers(lambda found: found[0].pop("kind")), "'kind' is missing"),
        (layers(lambda found: found[0].update(attributes=[])), "'attributes' of a layer is no dict: a list of 0"),
        (layers(lambda found: found[1:]), "'wte/table' belongs to no layer"),
        (layers(lambda found: found[:2]), "belongs to no layer"),
        (layers(lambda found: [*found, found[0]]), "the layer 'wte' is there twice"),
        (layers(lambda found: found[1].update(fixed=["variance"])), "the arrays of 'h/0/bn' contradict each other"),
        (layers(lambda found: found[5].update(tied={"kernel": ["wte/table", [0, 0]]})), "[0, 0] is no order of 2 axes"),
        (layers(lambda found: found[5].update(tied={"kernel": 3})), "unpack"),
        (
            layers(lambda found: found[5].update(tied={"kernel": ["wpe/table", None]})),
            "the array 'head/kernel' is missing",
        ),
        (lambda header: header["__metadata__"].pop("layers"), "'layers' is missing"),
        (lambda header: header["__metadata__"].pop("framework"), "'framework' is missing"),
    ):
        saved.write_bytes(content)
        rewritten(saved, change)
        found = refused(saved)
        assert found.startswith(f"{saved} is damaged: what it says of its layers cannot be used (")
        assert said in found


def test_other_files_are_named(tmp_path: Path, saved: Path) -> None:
    other = tmp_path / "other"
    for content, said in (
        (b"", "it is empty"),
        (b"PK\x03\x04" + bytes(90), "it is a zip archive, as torch.save, .keras and .npz files are"),
        (b"\x89HDF\r\n\x1a\n" + bytes(90), "it is an HDF5 file, as Keras weights are"),
    ):
        other.write_bytes(content)
        assert said in refused(other)
    save_file({"w": np.zeros(2)}, other, {"format": "pt"})
    assert "holds a framework's own tensors, and no model that porting.save wrote" in refused(other)
    save_file({"w": np.zeros(2)}, other, {"format": "polyamp-checkpoint-1"})
    assert "is a training state that polyamp.save wrote" in refused(other)
    save_file({"w": np.zeros(2)}, other, {"format": "polyamp-canonical-9"})
    assert "'polyamp-canonical-9'; this version of polyamp reads 'polyamp-canonical-1'" in refused(other)
    with pytest.raises(FileNotFoundError, match=r"Did you mean 'model.safetensors'"):
        porting.open(tmp_path / "model.safetensor")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        porting.open(tmp_path)
    with pytest.raises(ArgumentError, match="path must be a file's path"):
        porting.open(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="path must be a file's path"):
        porting.save(example(), None)  # type: ignore[arg-type]


def test_an_attribute_that_is_nested_too_deeply_is_an_error_with_its_name(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    model = porting.Canonical({"a": porting.Layer("parameter", {"value": lazy(2)}, {"limits": nested})}, "torch")
    with pytest.raises(PortError, match=r"the attribute 'limits' of 'a' .* is nested deeper than 32 levels"):
        porting.save(model, saved)
    with monkeypatch.context() as patch:
        patch.setattr(canonical_file, "_MAX_DEPTH", 1000)
        porting.save(model, saved)
    with pytest.raises(PortError, match=r"is damaged: .*'limits' is nested deeper than 32 levels"):
        porting.open(saved)


def test_what_no_file_can_hold_is_refused_before_anything_is_written(saved: Path) -> None:
    content = saved.read_bytes()
    value = {"value": lazy(2)}
    for layers, said in (
        (
            {"a": porting.Layer("parameter", value, {"function": print})},
            "the attribute 'function' of 'a' (parameter) is",
        ),
        ({"a": porting.Layer("parameter", value, {"limit": float("nan")})}, "is no JSON data"),
        ({"a": porting.Layer("parameter", {"value": lazy(2, dtype="complex128")})}, "'a/value' is complex128, which a"),
        (
            {"a": porting.Layer("parameter", value, tied={"value": "b/value"})},
            "'a/value' is tied to 'b/value', which is",
        ),
        (
            {"a/b": porting.Layer("x", {"c": lazy(2)}), "a": porting.Layer("x", {"b/c": lazy(2)})},
            "two arrays of the model have the same name",
        ),
    ):
        with pytest.raises(PortError) as caught:
            porting.save(porting.Canonical(layers, "torch"), saved)
        assert said in str(caught.value)
    assert saved.read_bytes() == content
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def failing() -> porting.Canonical:
    def read() -> Any:
        raise PortError("cannot be read")

    layers = {
        "a": porting.Layer("parameter", {"value": lazy(1000)}),
        "b": porting.Layer("parameter", {"value": porting.Lazy((2,), "float32", read)}),
    }
    return porting.Canonical(layers, "torch")


def test_an_array_that_fails_half_way_leaves_the_older_file(saved: Path) -> None:
    content = saved.read_bytes()
    with pytest.raises(PortError, match="cannot be read"):
        porting.save(failing(), saved)
    assert saved.read_bytes() == content
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def _save_slowly(path: Path, ready: Any) -> None:
    def read() -> Any:
        ready.send(None)
        ready.recv()

    layers = {name: porting.Layer("parameter", {"value": lazy(1000)}) for name in "ab"}
    layers["c"] = porting.Layer("parameter", {"value": porting.Lazy((2,), "float32", read)})
    porting.save(porting.Canonical(layers, "torch"), path)


def test_a_killed_save_leaves_the_older_file(saved: Path) -> None:
    content = saved.read_bytes()
    ours, theirs = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(target=_save_slowly, args=(saved, theirs))
    writer.start()
    ours.recv()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    assert saved.read_bytes() == content
    assert len(list(saved.parent.iterdir())) == 2
    porting.save(example(), saved)  # which removes what the killed one left
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_an_open_model_stays_as_it_was_when_its_file_is_replaced(saved: Path) -> None:
    opened = porting.open(saved)
    before = np.array(example()["h/0/bn"].arrays["scale"].read())
    porting.save(opened, saved)  # over itself
    assert opened["h/0/bn"].arrays["scale"].shape == before.shape
    assert (
        porting.open(saved)["conv"].arrays["kernel"].read().tobytes()
        == opened["conv"].arrays["kernel"].read().tobytes()
    )


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "after", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_a_bar_is_shown_on_a_terminal_after_a_while(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, after: float, shown: bool
) -> None:
    stream = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(progress_module, "SHOW_AFTER_SECONDS", after)
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stderr(stream):
        with progress_bar("writing [a] file", 10) as advance:
            advance(4)
            advance(100)
        with track_reads("filling", {"a": lazy(3)}) as arrays:
            arrays["a"].read()
    assert ("writing [a] file" in stream.getvalue() and "filling" in stream.getvalue()) is shown
    assert shown or not stream.getvalue()


def test_the_bar_of_a_file_moves_on_with_what_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = _Terminal()
    monkeypatch.setattr(progress_module, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with contextlib.redirect_stderr(stream):
        porting.save(example(), tmp_path / "model.safetensors")
    assert re.search(r"writing model\.safetensors .*(\d+)/\1 bytes", stream.getvalue())
