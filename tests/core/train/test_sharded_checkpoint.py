"""S33: the folder form, of one process and of several; what is left of killed saves; what is refused.

The several processes are threads (`divided_state`), each with rows of its own. The backends' own tests use real ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_state import ArrayBackend, ArrayState, example
from divided_state import DIVIDED, Threads, ranks
from divided_state import example as part

import polyamp
from polyamp import ArgumentError, CheckpointError
from polyamp.contract.sharded_state import ShardedState
from polyamp.errors import ReplicaError
from polyamp.files import exclusive_writer
from polyamp.rules import resume_rng_seeds
from polyamp.train import checkpoint, checkpoint_tensors, sharded_checkpoint
from polyamp.train.checkpoint_processes import UnshardedState


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    polyamp.save(example(1), path, sharded=True)
    return path


def data_of(path: Path) -> Path:
    """The folder of the data."""
    return path / json.loads((path / "polyamp.json").read_text())["data"]


def test_s33_the_guides_example_runs() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "sharded_checkpoints.md").read_text(encoding="utf-8")
    code = guide.split("```python\n")[1].split("```")[0]
    found: dict[str, Any] = {}
    exec(compile(code, "guide", "exec"), found)  # the page's own lines
    parameters = [found[name].model.parameters for name in ("state", "other")]
    assert all(np.array_equal(parameters[0][name], array) for name, array in parameters[1].items())


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, with a digest that is right."""
    said = json.loads((path / "polyamp.json").read_text())
    change(said)
    content = json.dumps({**said, "digest": checkpoint_tensors.BLANK_DIGEST}).encode()
    (path / "polyamp.json").write_bytes(checkpoint_tensors.seal_content(content))


def test_s33_a_folder_of_one_process_round_trips(saved: Path) -> None:
    assert example(1).same_as(polyamp.restore(example(2), saved).arrays)
    polyamp.save(example(2), saved, sharded=True)
    assert example(2).same_as(polyamp.restore(example(1), saved).arrays)
    assert {each.name for each in saved.iterdir()} == {"polyamp.json", data_of(saved).name}


def test_s33_the_manifest_says_what_the_folder_holds(saved: Path) -> None:
    said = json.loads((saved / "polyamp.json").read_text())
    content = (data_of(saved) / "state.safetensors").read_bytes()
    assert said["format"] == "polyamp-checkpoint-folder-1"
    assert (said["backend"], said["polyamp"], said["processes"], said["own"]) == ("arrays", polyamp.__version__, 1, [])
    assert polyamp.Recipe.from_json(said["recipe"]) == example(1).recipe
    assert said["files"] == {"state.safetensors": [len(content), hashlib.sha256(content).hexdigest()]}
    assert said["arrays"]["model/dense/bias"] == ["bfloat16", [3]]
    assert said["arrays"]["step"] == ["int32", []]
    assert sorted(said["arrays"]) == sorted(example(1).arrays)


def test_s33_sigkill_at_every_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "fixtures" / "killed_folder.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *killed, unharmed = json.loads(done.stdout)
    assert unharmed == [0, "new", 1, "new", 2]
    assert {status for status, *_ in killed} == {-9}
    found = [content for _, content, *_ in killed]
    moved = found.index("new")
    assert found == ["old"] * moved + ["new"] * (len(found) - moved)
    assert moved >= 60
    assert len(found) - moved >= 10, "some died after the manifest was replaced"
    assert {data for *_, data, _, _ in killed} == {1, 2}
    assert {(retried, names) for *_, retried, names in killed} == {("new", 2)}, "the next save takes leftovers away"


def test_s33_a_dry_run_leaves_what_was_there(saved: Path, tmp_path: Path) -> None:
    before = {each: each.read_bytes() for each in saved.rglob("*") if each.is_file()}
    polyamp.save(example(2), saved, sharded=True, dry_run=True)
    assert {each: each.read_bytes() for each in saved.rglob("*") if each.is_file()} == before
    polyamp.save(example(2), tmp_path / "new", sharded=True, dry_run=True)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_s33_what_a_folder_may_not_replace(saved: Path, tmp_path: Path) -> None:
    polyamp.save(example(1), tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.jpg").touch()
    for name, message in (("file", "is a file, and this checkpoint is a folder"), ("other", r"photo\.jpg")):
        with pytest.raises(ArgumentError, match=message):
            polyamp.save(example(2), tmp_path / name, sharded=True)
    assert example(1).same_as(polyamp.restore(example(2), tmp_path / "file").arrays)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        polyamp.save(example(2), tmp_path / "none" / "checkpoint", sharded=True)
    with pytest.raises(IsADirectoryError):
        polyamp.save(example(2), saved)
    with pytest.raises(IsADirectoryError, match=r"its own framework reads it: restore it in one process, and save one"):
        checkpoint.read(saved)
    with pytest.raises(IsADirectoryError, match=r"without polyamp\.json: no save into it came to its end"):
        polyamp.restore(example(2), tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"sharded must be True, False or None\. Received: sharded='yes'"):
        polyamp.save(example(2), saved, sharded="yes")  # type: ignore[arg-type]
    with exclusive_writer(saved), pytest.raises(CheckpointError, match=r"another save into .* is under way"):
        polyamp.save(example(2), saved, sharded=True)


def test_s33_links_and_what_is_private_stay(saved: Path, tmp_path: Path) -> None:
    data_of(saved).chmod(0o700)
    (tmp_path / "link").symlink_to(saved)
    polyamp.save(example(2), tmp_path / "link", sharded=True)
    assert (tmp_path / "link").is_symlink()
    assert data_of(saved).stat().st_mode & 0o777 == 0o700
    assert example(2).same_as(polyamp.restore(example(1), saved).arrays)


def test_s33_a_failing_save_leaves_the_older_one_and_no_litter(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in (
        (sharded_checkpoint, "sync_to_disk"),
        (sharded_checkpoint, "write_atomically"),
        (Path, "replace"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(OSError, match="No space left"):
                polyamp.save(example(2), saved, sharded=True)
        assert sorted(each.name for each in saved.iterdir()) == [data_of(saved).name, "polyamp.json"]
    assert example(1).same_as(polyamp.restore(example(2), saved).arrays)


def test_s33_every_damaged_byte_is_found(saved: Path) -> None:
    for file in (saved / "polyamp.json", data_of(saved) / "state.safetensors"):
        whole = file.read_bytes()
        for position in range(0, len(whole), 7):
            file.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
            with pytest.raises(CheckpointError, match=r"damaged|not a manifest|has format"):
                polyamp.restore(example(2), saved)
        for damaged in (whole[:-1], whole + b" ", b""):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                polyamp.restore(example(2), saved)
        file.write_bytes(whole)
    (data_of(saved) / "more.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"more\.safetensors is none of its files"):
        polyamp.restore(example(2), saved)
    shutil.rmtree(data_of(saved))
    with pytest.raises(CheckpointError, match=r"is not whole: state\.safetensors is missing"):
        polyamp.restore(example(2), saved)


def test_s22_another_thread_steps_on_while_one_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    class Watched(ArrayBackend):
        @contextlib.contextmanager
        def sharded_state(self, state: ArrayState) -> Iterator[ShardedState]:
            held.append("the turn")
            yield UnshardedState(state)
            held.remove("the turn")

    inner, seen = checkpoint.write_atomically, list[list[str]]()

    def noting(*args: Any, **kwargs: Any) -> None:
        seen.append(list(held))
        inner(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_atomically", noting)
    polyamp.save(ArrayState(example(1).arrays, Watched()), tmp_path / "file")
    assert seen == [[]]


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "outside": (lambda said: said["files"].update({"../polyamp.json": [1, ""]}), "a file lies outside"),
    "elsewhere": (lambda said: said.update(data="../../etc"), "names no folder of data"),
    "processes": (lambda said: said.update(own=["step"]), "not every process has its own"),
    "another version": (
        lambda said: said.update(format="polyamp-checkpoint-folder-9"),
        "this version of polyamp reads",
    ),
    "dtype": (lambda said: said["arrays"].update(step=["int64", []]), r"step: int64\[\] in the file, int32\[\]"),
    "text": (lambda said: said.update(recipe=7), "a field is no text"),
}


@pytest.mark.parametrize("name", FORGED)
def test_s33_a_forged_manifest_is_refused(saved: Path, name: str) -> None:
    forge, message = FORGED[name]
    rewritten(saved, forge)
    with pytest.raises(CheckpointError, match=message):
        polyamp.restore(example(2), saved)


def test_s33_data_that_the_manifest_describes_otherwise_are_refused(saved: Path) -> None:
    def alike(said: dict[str, Any]) -> None:
        said["arrays"]["running/seen"] = ["bool", [5]]

    rewritten(saved, alike)
    state = example(2)
    state.arrays["running/seen"] = np.zeros(5, np.bool_)
    with pytest.raises(CheckpointError, match=r"running/seen is bool\[4\] in the data and bool\[5\] in the manifest"):
        polyamp.restore(state, saved)


@pytest.mark.parametrize("form", [None, False], ids=["folder", "file"])
@pytest.mark.parametrize("count", [4, 2, 1])
def test_s33_four_processes_go_on_as_any_number(tmp_path: Path, form: bool | None, count: int) -> None:
    path = tmp_path / "checkpoint"
    assert ranks(4, lambda threads: polyamp.save(part(threads, 1), path, sharded=form)) == [None] * 4
    assert path.is_dir() == (form is None)
    found = ranks(count, lambda threads: polyamp.restore(part(threads, 2), path))
    expected = ranks(count, lambda threads: part(threads, 1))
    saved_streams = [np.asarray([1, rank], np.uint64).tobytes() for rank in range(4 if form is None else 1)]
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in (*DIVIDED, "step"))
        own = count == len(saved_streams)
        drawn = other.arrays["rng"] if own else [resume_rng_seeds.stream_seed(saved_streams, rank, count)] * 2
        assert one.arrays["rng"].tolist() == list(drawn)


def refusing(threads: Threads, path: Path) -> Any:
    """A restore that rank 2 alone must refuse."""
    state = part(threads, 2)
    if threads.rank == 2:
        state.arrays["step"] = np.zeros(3, np.int32)
    before = ArrayState(state.arrays)
    try:
        return polyamp.restore(state, path)
    except CheckpointError as error:
        assert before.same_as(state.arrays)
        return error


def test_s33_a_rank_that_refuses_is_named_by_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    ranks(4, lambda threads: polyamp.save(part(threads, 1), path))
    found = ranks(4, lambda threads: refusing(threads, path))
    assert all(isinstance(error, CheckpointError) for error in found)
    assert "step: int32[] in the file, int32[3] in the state" in str(found[2])
    for rank in (0, 1, 3):
        assert str(found[rank]).startswith(f"rank 2 cannot take {path}: CheckpointError: ")
    paths = ranks(2, lambda threads: polyamp.save(part(threads, 2), tmp_path / str(threads.rank)))
    assert [str(error) for error in paths] == [
        f"all ranks must have the same path. Rank 0 has {tmp_path / '0'}, rank 1 {tmp_path / '1'}."
    ] * 2
    (data_of(path) / "3.safetensors").write_bytes(b"damaged")
    found = ranks(2, lambda threads: polyamp.restore(part(threads, 2), path))
    assert all("3.safetensors is damaged" in str(error) for error in found)
    assert str(found[0]).startswith("rank 1 found damage")


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("after", ["nothing", "writing"])
def test_s33_a_rank_that_ends_leaves_the_older_one(tmp_path: Path, rank: int, after: str) -> None:
    path = tmp_path / "checkpoint"
    ranks(3, lambda threads: polyamp.save(part(threads, 1), path))

    def work(threads: Threads) -> Any:
        if threads.rank != rank:
            return polyamp.save(part(threads, 2), path)
        state = part(threads, 2)
        if after == "writing":
            meetings = iter(range(100))
            ended = threads.gather

            def gather(said: bytes) -> list[bytes]:
                if next(meetings) == 4:
                    threads.leave()
                    raise SystemError("gone")
                return ended(said)

            threads.gather = gather  # type: ignore[method-assign]
            return polyamp.save(state, path)
        threads.leave()
        return None

    found = ranks(3, work)
    assert [type(each) for number, each in enumerate(found) if number != rank] == [ReplicaError] * 2
    restored = ranks(3, lambda threads: polyamp.restore(part(threads, 2), path))
    assert [int(each.arrays["step"]) for each in restored] == [1] * 3
    assert len(list(path.iterdir())) == 2
