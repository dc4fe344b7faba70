"""S22: atomic saves, detected damage, refused strangers. The state is `array_state`, a dict of NumPy arrays."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from array_state import Array, ArrayBackend, ArrayState, example
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyamp
from polyamp import CheckpointError, Recipe
from polyamp.reference import MLP
from polyamp.train import checkpoint

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
    ml_dtypes.bfloat16,
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "state.safetensors"
    checkpoint.save(example(1), path)
    return path


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Any bits of any dtype in any shape, empty and 0-dimensional ones and NaN payloads included."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape, dtype=int))
    content = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if dtype == np.bool_:
        content = bytes(byte & 1 for byte in content)
    array = np.frombuffer(content, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@given(st.dictionaries(st.text(min_size=1, max_size=8), arrays(), max_size=5))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_s22_arrays_round_trip_bit_for_bit(tmp_path: Path, given_arrays: dict[str, Array]) -> None:
    state = ArrayState(given_arrays)
    path = tmp_path / "state.safetensors"
    polyamp.save(state, path)
    restored = polyamp.restore(ArrayState({name: np.zeros_like(array) for name, array in given_arrays.items()}), path)
    assert state.same_as(restored.arrays)
    assert all(array.flags.writeable and array.flags.owndata for array in restored.arrays.values())


def test_s22_every_kind_of_array_round_trips(saved: Path) -> None:
    restored = checkpoint.restore(example(2), saved)
    assert example(1).same_as(restored.arrays)
    kernel = example(1).arrays["model/dense/bias"]
    assert restored.arrays["model/dense/bias"].dtype == kernel.dtype == ml_dtypes.bfloat16
    assert restored.arrays["step"].shape == ()
    assert restored.arrays["empty"].shape == (0, 4)


def test_s22_metadata(saved: Path) -> None:
    meta, _ = checkpoint.read(str(saved))
    assert meta["format"] == "polyamp-checkpoint-1"
    assert meta["backend"] == "arrays"
    assert meta["polyamp"] == polyamp.__version__
    assert Recipe.from_json(meta["recipe"]) == example(1).recipe
    assert "digest" not in meta


def test_s22_a_state_with_a_native_optimizer_is_saved(tmp_path: Path) -> None:
    state = example(1)
    state.recipe = Recipe(optimizer=object())  # stands for a framework's own
    checkpoint.save(state, tmp_path / "state")
    meta, arrays_ = checkpoint.read(tmp_path / "state")
    assert meta["recipe"] == ""
    assert state.same_as(arrays_)


def test_s22_the_file_is_plain_safetensors_and_readable_by_others(saved: Path) -> None:
    from safetensors.numpy import load_file

    found = load_file(saved)
    np.testing.assert_array_equal(found["model/dense/kernel"], example(1).arrays["model/dense/kernel"])
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o666 & ~mask


def test_s22_no_leftovers_after_a_save(saved: Path) -> None:
    checkpoint.save(example(2), saved)
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_s22_sigkill_at_every_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "fixtures" / "killed_save.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *killed, unharmed = json.loads(done.stdout)
    assert unharmed[1:] == [0, "new", None, "new", 0]
    assert len(killed) > 60
    assert {status for _, status, *_ in killed} == {-9}
    found = [content for _, _, content, *_ in killed]
    renamed = found.index("new")
    assert found == ["old"] * renamed + ["new"] * (len(found) - renamed)
    assert renamed >= 40
    assert len(found) - renamed >= 5, "some died between the rename and the end"
    sizes = {partial for _, _, _, partial, *_ in killed if partial is not None}
    assert len(sizes) >= 20, "killed after that many different numbers of bytes"
    assert {retried for *_, retried, _ in killed} == {"new"}, "leftovers do not confuse the next save"
    assert {litter for *_, litter in killed} == {0}, "and it takes them away"


class _DiskFull:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_s22_a_failing_save_leaves_the_older_one_and_no_litter(
    saved: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(call, _DiskFull)
        with pytest.raises(OSError, match="No space left on device"):
            checkpoint.save(example(2), saved)
    assert example(1).same_as(checkpoint.read(saved)[1])
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_s22_missing_files_and_folders(tmp_path: Path) -> None:
    for call in (lambda: checkpoint.read(tmp_path / "none"), lambda: checkpoint.restore(example(1), tmp_path / "none")):
        with pytest.raises(FileNotFoundError):
            call()
    with pytest.raises(FileNotFoundError):
        checkpoint.save(example(1), tmp_path / "no" / "such" / "folder")


def damaged(path: Path, content: bytes | None = None) -> None:
    """Assert that the file, or `content` in its place, is refused."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError):
        checkpoint.read(path)


@contextlib.contextmanager
def editing(path: Path) -> Iterator[Callable[[int, int], None]]:
    """Gives `put(position, byte)`, which changes the file in place: truncating it each time is slow on some disks."""
    with path.open("r+b", buffering=0) as file:

        def put(position: int, byte: int) -> None:
            file.seek(position)
            file.write(bytes([byte]))

        yield put


def test_s22_every_flipped_bit_is_detected(saved: Path) -> None:
    with editing(saved) as put:
        for position, byte in enumerate(saved.read_bytes()):
            for bit in range(8):
                put(position, byte ^ 1 << bit)
                damaged(saved)
            put(position, byte)
    assert example(1).same_as(checkpoint.read(saved)[1])


@pytest.mark.parametrize("byte", [0x00, 0x09, 0x0A, 0x0D, 0x20, 0x30, 0x31, 0x7F, 0xFF])
def test_s22_every_replaced_byte_is_detected(saved: Path, byte: int) -> None:
    with editing(saved) as put:
        for position, original in enumerate(saved.read_bytes()):
            if original != byte:
                put(position, byte)
                damaged(saved)
                put(position, original)
    assert example(1).same_as(checkpoint.read(saved)[1])


def test_s22_every_truncation_and_any_surplus_is_detected(saved: Path) -> None:
    content = saved.read_bytes()
    for length in reversed(range(len(content))):
        os.truncate(saved, length)
        damaged(saved)
    for surplus in (b"\0", b" ", content):
        damaged(saved, content + surplus)


def test_s22_swapped_halves_of_two_checkpoints_are_detected(saved: Path) -> None:
    one = saved.read_bytes()
    checkpoint.save(example(2), saved)
    other = saved.read_bytes()
    assert len(one) == len(other)
    for cut in range(1, len(one), 7):
        mixed = one[:cut] + other[cut:]
        if mixed not in (one, other):
            damaged(saved, mixed)


def framed(header: bytes, body: bytes = b"") -> bytes:
    """Bytes laid out as a safetensors file is."""
    return len(header).to_bytes(8, "little") + header + body


HEADERS = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["F32", "polyamp-checkpoint-1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["__metadata__", "digest", "format", "w", "dtype", "shape"]), inner, max_size=4
        )
    ),
)


@given(
    st.binary(max_size=200)
    | st.builds(framed, st.binary(max_size=80), st.binary())
    | st.builds(framed, HEADERS.map(lambda tree: json.dumps(tree).encode()), st.binary(max_size=20))
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_s22_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    damaged(tmp_path / "state", content)


def test_s22_deeply_nested_headers_are_refused(tmp_path: Path) -> None:
    damaged(tmp_path / "state", framed(b"[" * 200_000))


class _Bomb:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("exploded",)


def test_s22_loading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "state"
    path.write_bytes(pickle.dumps({"model": _Bomb()}))
    with pytest.raises(CheckpointError, match=r"state is not a whole polyamp checkpoint \(.*\)\. It is trunc"):
        checkpoint.restore(example(1), path)
    np.save(tmp_path / "objects.npy", np.array([_Bomb()], object), allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"objects\.npy is not a whole polyamp checkpoint"):
        checkpoint.read(tmp_path / "objects.npy")
    assert not (tmp_path / "exploded").exists()


def test_s22_another_programs_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    for metadata in (None, {"format": "pt"}, {"format": checkpoint.FORMAT, "digest": "0" * 64}):
        save_file({"w": np.zeros(3, "f4")}, tmp_path / "state", metadata=metadata)
        with pytest.raises(CheckpointError, match=r"state (is not a whole polyamp checkpoint|is damaged)"):
            checkpoint.read(tmp_path / "state")


def test_s22_a_newer_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", "polyamp-checkpoint-9")
        checkpoint.save(example(1), tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"has format 'polyamp-checkpoint-9'; .* reads 'polyamp-checkpoint-1'\."):
        checkpoint.read(tmp_path / "state")


def refused(state: ArrayState, path: Path) -> str:
    """The message with which `restore` refuses, after asserting that the state is as it was."""
    before = ArrayState({name: array.copy() for name, array in state.arrays.items()})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(state, path)
    assert before.same_as(state.arrays)
    return str(caught.value)


def changed(**changes: Array | None) -> ArrayState:
    """The example with some arrays replaced, added or (None) left out."""
    kept = {**example(2).arrays, **changes}
    return ArrayState({name: array for name, array in kept.items() if array is not None})


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (changed(extra=np.zeros(2)), "missing: extra. Build the state"),
        (changed(step=None), "not in this state: step. Build the state"),
        (changed(step=np.zeros(2, np.int32)), "step: int32[] in the file, int32[2] in the state."),
        (changed(step=np.zeros((), np.int64)), "step: int32[] in the file, int64[] in the state."),
        (changed(empty=np.zeros((4, 0), "f2")), "empty: float16[0, 4] in the file, float16[4, 0] in the state."),
    ],
)
def test_s22_another_models_checkpoint_is_refused_by_name(saved: Path, state: ArrayState, said: str) -> None:
    message = refused(state, saved)
    assert message.startswith(f"{saved} belongs to another model, optimizer or scaler. ")
    assert said in message
    assert message.endswith("Build the state from the model and recipe that were saved.")


def test_s22_many_differences_are_counted(saved: Path) -> None:
    assert "; and 4 more. Build" in refused(ArrayState({"only": np.zeros(2)}), saved)


def test_s22_another_backends_checkpoint_is_refused(saved: Path) -> None:
    other = ArrayState(example(2).arrays, ArrayBackend("other"))
    assert "was saved by the arrays backend and cannot be restored into a other state" in refused(other, saved)


def test_s22_damage_leaves_the_state_alone(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    assert "is damaged: its contents do not match its digest. Restore an older one." in refused(example(2), saved)


def test_s22_a_reference_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    recipe = Recipe(
        policy=polyamp.Policy("mixed_float16"),
        scaler=polyamp.LossScaler(init_scale=2.0**24, growth_interval=2),
        optimizer=polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, 2, 10)),
        clip_norm=1.0,
    )

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.mean_squared_error(model(batch["x"]), batch["y"])

    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(8, 4)).astype("f4"), "y": rng.normal(size=(8, 2)).astype("f4")} for _ in range(20)
    ]
    step = polyamp.train_step(loss_fn, recipe)
    straight = polyamp.init(MLP.random([4, 6, 2], seed=0), recipe)
    skipped = []
    for number, batch in enumerate(batches):
        straight, result = step(straight, batch)
        skipped.append(bool(result.skipped))
        if number == 9:
            polyamp.save(straight, tmp_path / "state")
    assert any(skipped)
    assert not all(skipped)
    resumed = polyamp.restore(polyamp.init(MLP.random([4, 6, 2], seed=1), recipe), tmp_path / "state")
    for batch in batches[10:]:
        resumed, _ = polyamp.train_step(loss_fn, recipe)(resumed, batch)
    expected = straight.backend.export_state(straight)
    assert ArrayState(expected).same_as(resumed.backend.export_state(resumed))
    assert int(expected["step"]) == len(skipped) - sum(skipped)


def test_s22_damage_far_into_a_large_file_is_detected(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        return polyamp.init(MLP.random([64, 64, 64], seed=seed), polyamp.Recipe())

    path = tmp_path / "big"
    polyamp.save(made(0), path)
    whole = path.read_bytes()
    for at in np.linspace(8, len(whole) - 1, 50).astype(int):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            polyamp.restore(made(1), path)
