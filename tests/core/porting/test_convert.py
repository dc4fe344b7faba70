"""`polyamp port` on the command line, and what a file is; without a framework: the reference's models, and files of
polyamp's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from polyamp import porting
from polyamp.cli.app import app
from polyamp.contract import registry
from polyamp.errors import BackendNotInstalledError, PortError
from polyamp.porting import convert as porting_convert
from polyamp.porting.files import safetensors_file
from polyamp.porting.files.file_formats import detect_framework, file_inventory, framework_from_suffix
from polyamp.reference import MLP

BUILDER = """
from polyamp.reference import MLP
def build():
    return MLP.random([4, 3, 1], seed=1)
def nothing():
    pass
def broken():
    return [3]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a saved model, another of the same form, and a module that builds it; the current one."""
    porting.save(MLP.random([4, 3, 1], seed=0), tmp_path / "source.safetensors")
    porting.save(MLP.random([4, 3, 1], seed=1), tmp_path / "other.safetensors")
    (tmp_path / "builder.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "builder", raising=False)
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["port", *arguments])


def values(path: str) -> dict[str, Any]:
    return {name: array.read().tolist() for name, array in porting.open(path).arrays().items()}


def test_a_file_takes_the_layout_of_another(folder: Path) -> None:
    before = (folder / "other.safetensors").read_bytes()
    result = invoke("source.safetensors", "new.safetensors", "--like", "other.safetensors")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "2 layers moved"
    assert result.stdout.splitlines()[-1] == "wrote new.safetensors"
    assert values("new.safetensors") == values("source.safetensors") != values("other.safetensors")
    assert (folder / "other.safetensors").read_bytes() == before
    result = invoke("source.safetensors", "other.safetensors", "--like", "other.safetensors")  # over itself
    assert result.exit_code == 0, result.output
    assert values("other.safetensors") == values("source.safetensors")


def test_a_model_that_a_function_makes_is_written(folder: Path) -> None:
    result = invoke("source.safetensors", "new.safetensors", "--into", "builder:build", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["moved"][1] == {"source": "dense1", "target": "dense1", "kind": "dense", "told": "alone"}
    assert (report["source"], report["target"], report["written"]) == ("source.safetensors", "new.safetensors", True)
    assert values("new.safetensors") == values("source.safetensors")


def test_a_source_alone_is_written_in_the_canonical_layout(folder: Path) -> None:
    assert invoke("source.safetensors", "new.safetensors").exit_code == 0
    assert values("new.safetensors") == values("source.safetensors")


@pytest.mark.parametrize("options", [[], ["--like", "other.safetensors"], ["--into", "builder:build"]])
def test_a_dry_run_writes_nothing(folder: Path, options: list[str]) -> None:
    before = sorted(folder.iterdir())
    result = invoke("source.safetensors", "new.safetensors", "--dry-run", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "would write new.safetensors"
    assert [path for path in folder.iterdir() if path.suffix == ".safetensors"] == [
        path for path in before if path.suffix == ".safetensors"
    ]


def test_names_and_strictness_reach_the_port(folder: Path) -> None:
    layers = {f"body/{path}x": layer for path, layer in porting.open("source.safetensors").items()}
    porting.save(porting.Canonical(layers, "torch"), folder / "renamed.safetensors")
    options = ["--like", "other.safetensors", "--names", "^body/=", "--names", "x$=", "--json"]
    result = invoke("renamed.safetensors", "new.safetensors", *options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["moved"][0]["source"] == "body/dense0x"
    porting.save(porting.Canonical(dict(list(layers.items())[:1]), "torch"), folder / "less.safetensors")
    result = invoke("less.safetensors", "no.safetensors", "--like", "other.safetensors")
    assert (result.exit_code, (folder / "no.safetensors").exists()) == (1, False)
    assert "error: " in result.stderr
    result = invoke("less.safetensors", "new.safetensors", "--like", "other.safetensors", "--no-strict", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["missing"] == ["dense1"]
    assert values("new.safetensors")["dense1/kernel"] == values("other.safetensors")["dense1/kernel"]


def test_layouts_reach_the_port(folder: Path) -> None:
    """By an existing file, with and without writing; a model that a function makes takes the same way."""
    table = np.arange(32, dtype="float32").reshape(8, 4)
    for name, path, layer in (
        ("table", "bias", porting.Layer("embedding", {"table": porting.Lazy.of(table)})),
        ("turned", "rel", porting.Layer("parameter", {"value": porting.Lazy.of(np.zeros((4, 8), "float32"))})),
    ):
        porting.save(porting.Canonical({path: layer}, "torch"), folder / f"{name}.safetensors")
    options = ["--like", "turned.safetensors", "--forms", "^rel$=ab -> ba"]

    assert invoke("table.safetensors", "new.safetensors", *options[:2]).exit_code == 1
    for more in (["--dry-run"], []):
        result = invoke("table.safetensors", "new.safetensors", *options, *more)
        assert result.exit_code == 0, result.output
    assert values("new.safetensors") == {"rel/value": table.T.tolist()}
    for forms, message in (
        ({"rel": "transpose"}, "matches no path of either model"),
        ({"dense0": "transpose"}, "2 arrays"),
    ):
        with pytest.raises(PortError, match=message):
            porting_convert.convert("source.safetensors", "a.safetensors", into="builder:build", forms=forms)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["source.safetensors", "a.safetensors", "--forms", "x"], 2, "--forms takes REGEX=LAYOUT, such as"),
        (
            ["source.safetensors", "a.safetensors", "--forms", "x=transpose"],
            2,
            "Received: a dict without a target model",
        ),
        (
            ["source.safetensors", "a.safetensors", "--names", "x=y"],
            2,
            "--names says how the source corresponds to the target",
        ),
        (["source.safetensors", "a.safetensors", "--rows", "x=none"], 2, "--rows says how the source corresponds"),
        (["source.safetensor", "new.safetensors"], 2, "error: source.safetensor: there is no such file in"),
        (["source.safetensor", "new.pt"], 2, "error: source.safetensor: there is no such file in"),  # A before B
        (["builder.py", "new.safetensors"], 1, "whose file builder.py is cannot be told"),
        (["source.safetensors", "new.pt"], 2, "Give --like FILE, an existing file of the target model, or --into"),
        (["source.safetensors", "new.tar"], 1, "cannot be told from its suffix '.tar'"),
        (["source.safetensors", "a", "--like", "b", "--into", "c:d"], 2, "Give one of them"),
        (["source.safetensors", "a.safetensors", "--into", "builder"], 2, "--into takes package.module:build"),
        (["source.safetensors", "a.safetensors", "--into", "bilder:build"], 2, "there is no module 'bilder' here"),
        (["source.safetensors", "a.safetensors", "--into", "builder:built"], 2, "Did you mean 'build'?"),
        (["source.safetensors", "a.safetensors", "--into", "builder:nothing"], 1, "nothing() returned None"),
        (["source.safetensors", "a.safetensors", "--names", "x"], 2, "--names takes REGEX=REPLACEMENT"),
        (["source.safetensors", "a.safetensors", "--from", "torhc"], 1, "Did you mean 'torch'?"),
        (["source.safetensors", "a/b.safetensors"], 2, "Make it: pathlib.Path('a').mkdir(parents=True)"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, arguments: list[str], status: int, message: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert "error: " in result.stderr
    assert message in result.stderr
    assert sorted(path.name for path in folder.glob("*safetensors*")) == ["other.safetensors", "source.safetensors"]


def test_a_damaged_source_leaves_the_older_target(folder: Path) -> None:
    content, before = (folder / "source.safetensors").read_bytes(), (folder / "other.safetensors").read_bytes()
    (folder / "source.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for options in (["--like", "other.safetensors"], ["--into", "builder:build"], []):
        result = invoke("source.safetensors", "other.safetensors", *options)
        assert result.exit_code == 1
        assert "do not match their digest" in result.stderr
    assert (folder / "other.safetensors").read_bytes() == before
    assert not list(folder.glob(".*"))


SLOW = """
import sys, time
from polyamp import porting
from polyamp.cli.app import app
from polyamp.porting import convert as porting_convert
from polyamp.porting.files import safetensors_file
real = safetensors_file._array_bytes
def slow(array):
    print("writing", flush=True)
    time.sleep(60)
    yield from real(array)
safetensors_file._array_bytes = slow
sys.argv = ["polyamp", "port", "source.safetensors", "other.safetensors"]
app()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_no_partial_file_and_the_older_target(folder: Path, number: int, status: int) -> None:
    before = (folder / "other.safetensors").read_bytes()
    command = [sys.executable, "-c", SLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        partial = list(folder.glob(".other.safetensors.*.partial"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, len(partial), list(folder.glob(".*"))) == (status, 1, []), errors
    assert (folder / "other.safetensors").read_bytes() == before
    assert "Traceback" not in errors


def test_what_a_file_is(tmp_path: Path) -> None:
    def put(name: str, content: bytes = b"") -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    def archive(name: str, *members: str) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            for member in members:
                file.writestr(member, "")
        return tmp_path / name

    def stored(name: str, said: str | None, *names: str) -> Path:
        save_file({each: np.zeros(2) for each in names}, tmp_path / name, said and {"format": said})
        return tmp_path / name

    for path, framework in (
        (archive("model.pt", "archive/data.pkl", "archive/data/0"), "torch"),
        (put("old.pth", b"\x80\x02\x8a"), "torch"),
        (archive("model.keras", "config.json", "model.weights.h5"), "tensorflow"),
        (put("model.weights.h5", b"\x89HDF\r\n\x1a\n"), "tensorflow"),
        (stored("pt.safetensors", "pt", "a.b"), "torch"),
        (stored("none.safetensors", None, "h.0.weight"), "torch"),
        (stored("names", None, "h.0.kernel"), "jax"),
        (stored("flax.safetensors", "flax", "a"), "jax"),
        (put("orbax/_METADATA").parent, "jax"),
        (put("items/params/_METADATA").parents[1], "jax"),
        (put("steps/12/file").parents[1], "jax"),
    ):
        assert detect_framework(path) == framework
    for path, said in (
        (stored("state.safetensors", "polyamp-checkpoint-1", "a"), "is a training state that polyamp.save wrote"),
        (stored("later", "polyamp-canonical-2", "a"), "this version of polyamp reads 'polyamp-canonical-1'"),
        (stored("unknown", None, "a"), "the names in it are neither torch's nor flax's"),
        (archive("arrays.npz", "a.npy"), "it is a zip archive, and neither torch's nor Keras's"),
        (put("cut.pt", b"PK\x03\x04 and no more"), "is a damaged zip archive"),
        (put("empty"), "it is empty"),
        (put("saved/saved_model.pb").parent, "Save the model as .keras"),
        (put("hub/pytorch_model.bin").parent, "Name the file pytorch_model.bin in it"),
        (put("nothing/file").parent, "it is a folder, and none of orbax"),
    ):
        with pytest.raises(PortError) as caught:
            detect_framework(path)
        assert said in str(caught.value)
    assert [framework_from_suffix(Path(name)) for name in ("a.bin", "a.keras", "a.safetensors", "a")] == [
        "torch",
        "tensorflow",
        "canonical",
        "jax",
    ]


@pytest.mark.parametrize("length", [0x180, 0x280])
def test_a_headers_length_is_not_taken_for_another_formats_mark(tmp_path: Path, length: int) -> None:
    header = b'{"a.weight":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(length)
    (tmp_path / "model").write_bytes(length.to_bytes(8, "little") + header + b"\x07")
    assert detect_framework(tmp_path / "model") == "torch"
    assert safetensors_file.is_safetensors(tmp_path / "model")
    (tmp_path / "model").write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(PortError, match="its arrays take 1 bytes, and 0 are there"):
        safetensors_file.read(tmp_path / "model")


def test_files_with_an_index_are_one(tmp_path: Path) -> None:
    for number in range(2):
        name = f"h.{number}.weight"
        save_file({name: np.full(2, number)}, tmp_path / f"model-{number}.safetensors", {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    places: dict[str, Any] = {f"h.{number}.weight": f"model-{number}.safetensors" for number in range(2)}
    index.write_text(json.dumps({"weight_map": places}))
    assert detect_framework(index) == "torch"
    assert {name: array.read().tolist() for name, array in safetensors_file.read(index).arrays.items()} == {
        "h.0.weight": [0, 0],
        "h.1.weight": [1, 1],
    }
    for change, said in (
        ({"h.2.weight": "model-1.safetensors"}, "'h.2.weight' should be in model-1.safetensors, and is not"),
        ({"h.2.weight": "../model-1.safetensors"}, "it names what is no safetensors file beside it"),
        ({"h.2.weight": 3}, "TypeError"),
    ):
        index.write_text(json.dumps({"weight_map": {**places, **change}}))
        with pytest.raises(PortError) as caught:
            safetensors_file.read(index)
        assert said in str(caught.value)


def test_a_framework_that_is_not_there_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(name: str) -> Any:
        raise BackendNotInstalledError(f'{name} is not installed. Run: pip install "polyamp[{name}]"')

    monkeypatch.setattr(registry, "get", get)
    save_file({"a.weight": np.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BackendNotInstalledError, match=r"polyamp\[torch\]"):
        file_inventory(tmp_path / "model.safetensors")
    result = invoke(os.fspath(tmp_path / "model.safetensors"), os.fspath(tmp_path / "new.safetensors"))
    assert result.exit_code == 2
    assert 'pip install "polyamp[torch]"' in result.stderr
