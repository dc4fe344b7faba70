"""Files that polyamp writes and reads again: replaced in one moment, permissions and links kept."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from array_state import example

import polyamp
from polyamp import Policy, Recipe, RecipeError, adamw, schedules, sgd
from polyamp.files import write_atomically
from polyamp.recipe.scaler import LossScaler
from polyamp.reference import MLP
from polyamp.train import checkpoint

WRITERS: list[Callable[[Path], None]] = [
    lambda path: checkpoint.save(example(2), path),
    lambda path: Recipe(policy=Policy("mixed_float16")).dump(path),
    lambda path: write_atomically(path, b"new"),
]
NAMES = ["save", "dump", "write_atomically"]


def files(folder: Path) -> list[str]:
    """The names in a folder, hidden ones included."""
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("write", WRITERS, ids=NAMES)
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_replaced_file_keeps_its_permissions(tmp_path: Path, write: Callable[[Path], None], mode: int) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    path.chmod(mode)
    write(path)
    assert path.read_bytes() != b"old"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert files(tmp_path) == ["file.json"]


@pytest.mark.parametrize("write", WRITERS, ids=NAMES)
@pytest.mark.parametrize("exists", [True, False], ids=["", "dangling"])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, write: Callable[[Path], None], exists: bool) -> None:
    (tmp_path / "store").mkdir()
    target, link = tmp_path / "store" / "target.json", tmp_path / "latest.json"
    if exists:
        target.write_text("old")
        target.chmod(0o600)
    link.symlink_to(Path("store") / "target.json")
    write(link)
    assert link.is_symlink()
    assert link.readlink() == Path("store") / "target.json"
    assert target.read_bytes() == link.read_bytes() != b"old"
    if exists:
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert files(tmp_path) == ["latest.json", "store"]
    assert files(target.parent) == ["target.json"]


def test_a_private_file_is_private_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, modes = tmp_path / "file", []
    path.write_text("old")
    path.chmod(0o600)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, b"new")
    assert modes[0] == 0o600


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(path, b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"new")


def abandoned(path: Path, mark: str = "0123456789abcdef") -> Path:
    """A partial file as a killed writer leaves it."""
    partial = path.with_name(f".{path.name}.{mark}.partial")
    partial.write_bytes(b"half")
    return partial


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    left = [abandoned(path, f"{number:016x}") for number in range(3)]
    others = [
        abandoned(tmp_path / "other"),
        abandoned(tmp_path / "xfile"),
        abandoned(path, "0123"),
        tmp_path / ".file.0123456789abcdef.partial.bak",
    ]
    others[-1].write_text("mine")
    write_atomically(path, b"new")
    assert not any(partial.exists() for partial in left)
    assert all(other.exists() for other in others)


def _hold(path: Path, ready: Any) -> None:
    """A writer that stops in the middle of its write, and goes on when it is told to."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        ready.send(None)
        ready.recv()
        real(descriptor)
        os.fsync = real

    os.fsync = fsync
    write_atomically(path, b"slow")


def test_a_living_writers_partial_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ours, theirs = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(target=_hold, args=(path, theirs))
    writer.start()
    ours.recv()
    partials = [entry for entry in files(tmp_path) if entry.endswith(".partial")]
    assert len(partials) == 1
    write_atomically(path, b"fast")
    assert path.read_bytes() == b"fast"
    assert (tmp_path / partials[0]).exists()
    ours.send(None)
    writer.join(30)
    assert (writer.exitcode, path.read_bytes(), files(tmp_path)) == (0, b"slow", ["file"])


def test_a_killed_writers_partial_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ours, theirs = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(target=_hold, args=(path, theirs))
    writer.start()
    ours.recv()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    assert len(files(tmp_path)) == 1
    write_atomically(path, b"new")
    assert files(tmp_path) == ["file"]


def test_two_writers_never_take_each_other_for_dead(tmp_path: Path) -> None:
    """Between making its partial file and locking it, a writer looks dead to the others."""
    code = "import sys; from polyamp.files import write_atomically as w\nfor _ in range(100): w(sys.argv[1], b'x' * 9)"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "file")]) for _ in range(4)]
    assert [writer.wait(120) for writer in writers] == [0] * 4
    assert files(tmp_path) == ["file"]


RECIPES = [
    Recipe(policy=Policy("mixed_float16")),
    Recipe(policy=Policy("float32"), scaler="megatron", optimizer=adamw(schedules.warmup_cosine(0.1, 3, 30))),
    Recipe(
        policy=Policy("mixed_bfloat16", overrides={"a/norm*": "float32"}, op_rules={"exp": "compute"}, mode="cast"),
        optimizer=sgd(0.1, momentum=0.9),
        clip_norm=1.0,
        accumulate_steps=4,
    ),
    Recipe(policy=Policy("O2", float32_matmul="high"), scaler=LossScaler.static(8.0)),
]


@pytest.mark.parametrize(
    ("recipe", "suffix"), [*((recipe, ".toml") for recipe in RECIPES), (RECIPES[0], ".json")], ids=range(5)
)
def test_a_cut_off_recipe_file_is_no_recipe(tmp_path: Path, recipe: Recipe, suffix: str) -> None:
    """Every length of a file: a whole recipe, or an error; never another recipe."""
    path = tmp_path / f"recipe{suffix}"
    recipe.dump(path)
    content = path.read_bytes()
    whole = 0
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        try:
            found = Recipe.load(path)
        except RecipeError:
            continue
        assert found == recipe
        whole += 1
    assert 1 <= whole <= 2, "with and without the last line's end"


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_an_empty_recipe_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"recipe{suffix}"
    path.write_text("{}" if suffix == ".json" else "# nothing\n")
    with pytest.raises(RecipeError, match=r"recipe\.\w+: no policy is named\..*Received the keys: none\."):
        Recipe.load(path)
    path.write_text('{"clip_norm": 1.0}' if suffix == ".json" else "clip_norm = 1.0\n")
    with pytest.raises(RecipeError, match=r"no policy is named\..*Received the keys: clip_norm\."):
        Recipe.load(path)
    path.write_text('{"policy": {"param": "float32"}}' if suffix == ".json" else "[policy]\nparam = 'float32'\n")
    with pytest.raises(RecipeError, match=r"in which dtype it computes: .*Received the keys: param - at `\$\.policy`"):
        Recipe.load(path)
    path.write_text("")
    with pytest.raises(RecipeError, match=str(path)):
        Recipe.load(path)


def test_a_failing_dump_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.toml"
    RECIPES[0].dump(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        RECIPES[1].dump(path)
    assert Recipe.load(path) == RECIPES[0]
    assert files(tmp_path) == ["recipe.toml"]


def test_file_and_folder_are_flushed_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[bool] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        folders.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    polyamp.save(polyamp.init(MLP.random([3, 2], seed=0), polyamp.Recipe()), tmp_path / "checkpoint")
    assert folders == [False, True]
