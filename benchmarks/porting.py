"""Measures moving a model of transformer blocks in bfloat16, 1 GB of it: file to model, model to file, torch to JAX.

Run by hand and by `make bench`, which needs torch, JAX and flax in this environment; what is missing is named in its
rows. Each way is measured in a process of its own, against a copy by hand, layer by layer through NumPy and float32,
and against reading the file's bytes and writing them to another file. The first call shows the memory that it takes
beyond what was there before, as the system counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).resolve().parents[1])]  # this folder's torch/ and jax/ are not the frameworks

import numpy as np

from benchmarks.common import paired_timing, results
from benchmarks.common.results import Entry, Side

BY_HAND: Final = 0.2
"""polyamp takes at most this share of the copy by hand."""
PLAIN: Final = 2.0
"""And at most this multiple of reading and writing the bytes."""
MEMORY: Final = 0.1
"""And this share of the model, beside one tensor, beyond the two models."""


class Size(NamedTuple):
    """A model: an embedding, blocks of four square layers, an MLP and two norms, a norm and a head."""

    width: int = 2048
    blocks: int = 10
    vocabulary: int = 8192

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        width = self.width
        return 2 * self.vocabulary * width + self.blocks * (12 * width * width + 9 * width + 4 * width) + 2 * width

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return 2 * self.width * max(self.vocabulary, 4 * self.width)


QUICK: Final = Size(256, 4, 1024)


class Way(NamedTuple):
    """One way to move a model.

    Attributes:
        name: as the tables have it.
        needs: what has to be installed.
        prepare: makes what is there before, and returns polyamp's way and the one by hand.
    """

    name: str
    needs: tuple[str, ...]
    prepare: Callable[[Size, Path], tuple[Callable[[], Any], Callable[[], Any]]]


def torch_model(size: Size, *, seed: int | None = 0) -> Any:
    """The model in torch, bfloat16; without a seed, its memory alone."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = size.width
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(size.vocabulary, size.width)
            self.blocks = nn.ModuleList(Block() for _ in range(size.blocks))
            self.norm = nn.LayerNorm(size.width)
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    with torch.device("meta"):
        model = Model().to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator) if seed is not None else parameter.zero_()
    return model


def nnx_model(size: Size) -> Any:
    """The model in flax.nnx, its shapes alone."""
    import jax.numpy as jnp
    from flax import nnx

    given: dict[str, Any] = {"param_dtype": jnp.bfloat16}

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            width = size.width
            self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs, epsilon=1e-5, **given) for _ in range(2))
            self.query, self.key, self.value, self.out = (
                nnx.Linear(width, width, rngs=rngs, **given) for _ in range(4)
            )
            self.up = nnx.Linear(width, 4 * width, rngs=rngs, **given)
            self.down = nnx.Linear(4 * width, width, rngs=rngs, **given)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.table = nnx.Embed(size.vocabulary, size.width, rngs=rngs, **given)
            self.blocks = nnx.List([Block(rngs) for _ in range(size.blocks)])
            self.norm = nnx.LayerNorm(size.width, rngs=rngs, epsilon=1e-5, **given)
            self.head = nnx.Linear(size.width, size.vocabulary, use_bias=False, rngs=rngs, **given)

    return nnx.eval_shape(lambda: Model(nnx.Rngs(0)))


def stored(size: Size, folder: Path) -> Path:
    """The model's file, written once."""
    from polyamp import porting

    path = folder / "model.safetensors"
    if not path.exists():
        porting.save(torch_model(size), path)
    return path


def from_file_to_torch(size: Size, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """porting.open and porting.load, against load_file and copies layer by layer."""
    import torch
    from safetensors.numpy import load_file

    from polyamp import porting

    path, model = stored(size, folder), torch_model(size, seed=None)

    def own() -> Any:
        return porting.load(model, porting.open(path))

    def by_hand() -> None:
        arrays = load_file(path)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                array = _named(arrays, name).astype(np.float32)
                turned = array.T if ".weight" in name and array.ndim == 2 and "table" not in name else array
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(turned)))

    return own, by_hand


def from_torch_to_file(size: Size, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """porting.save, against NumPy arrays layer by layer and save_file."""
    import ml_dtypes
    from safetensors.numpy import save_file

    from polyamp import porting

    model = torch_model(size)

    def own() -> None:
        porting.save(model, folder / "own.safetensors")

    def by_hand() -> None:
        arrays = {}
        for name, parameter in model.named_parameters():
            array = parameter.detach().float().numpy()
            turned = array.T if ".weight" in name and array.ndim == 2 and "table" not in name else array
            arrays[name] = np.ascontiguousarray(turned).astype(ml_dtypes.bfloat16)
        save_file(arrays, folder / "by_hand.safetensors")

    return own, by_hand


def from_torch_to_jax(size: Size, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """polyamp.port, against an array of each parameter."""
    import jax
    import jax.numpy as jnp

    import polyamp

    source, target = torch_model(size), nnx_model(size)

    def own() -> Any:
        return jax.block_until_ready(_leaves(polyamp.port(source, target)[0]))

    def by_hand() -> Any:
        made = {}
        for name, parameter in source.named_parameters():
            array = parameter.detach().float().numpy()
            turned = array.T if ".weight" in name and array.ndim == 2 and "table" not in name else array
            made[name] = jnp.asarray(turned, jnp.bfloat16)
        return jax.block_until_ready(made)

    return own, by_hand


def from_file_to_jax(size: Size, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """porting.open and porting.load, against load_file and an array of each parameter."""
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    from polyamp import porting

    path, target = _written(size, folder), nnx_model(size)

    def own() -> Any:
        return jax.block_until_ready(_leaves(porting.load(target, porting.open(path))[0]))

    def by_hand() -> Any:
        arrays = load_file(path)
        return jax.block_until_ready(
            {name: jnp.asarray(array.astype(np.float32), jnp.bfloat16) for name, array in arrays.items()}
        )

    return own, by_hand


def from_jax_to_file(size: Size, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """porting.save, against NumPy arrays layer by layer and save_file."""
    import jax
    import ml_dtypes
    from safetensors.numpy import save_file

    from polyamp import porting

    model = porting.load(nnx_model(size), porting.open(_written(size, folder)))[0]
    leaves = _leaves(model)

    def own() -> None:
        porting.save(model, folder / "own.safetensors")

    def by_hand() -> None:
        arrays = {
            str(number): np.asarray(jax.numpy.asarray(leaf, np.float32)).astype(ml_dtypes.bfloat16)
            for number, leaf in enumerate(leaves)
        }
        save_file(arrays, folder / "by_hand.safetensors")

    return own, by_hand


WAYS: Final = (
    Way("file to torch", ("torch",), from_file_to_torch),
    Way("torch to file", ("torch",), from_torch_to_file),
    Way("torch to JAX", ("torch", "jax", "flax"), from_torch_to_jax),
    Way("file to JAX", ("torch", "jax", "flax"), from_file_to_jax),
    Way("JAX to file", ("torch", "jax", "flax"), from_jax_to_file),
)


def _leaves(model: Any) -> list[Any]:
    import jax
    from flax import nnx

    return jax.tree.leaves(nnx.state(model))


def _named(arrays: dict[str, Any], name: str) -> Any:
    """The canonical array of a parameter of torch."""
    path, _, last = name.replace(".", "/").rpartition("/")
    for each in ("kernel", "table", "scale") if last == "weight" else ("bias",):
        if f"{path}/{each}" in arrays:
            return arrays[f"{path}/{each}"]
    raise KeyError(name)


def _written(size: Size, folder: Path) -> Path:
    """The model's file, written by a process of its own: its memory is not counted here."""
    path = folder / "model.safetensors"
    if not path.exists():
        _worker({"way": -1, "size": size, "folder": str(folder)})
    return path


def plain(path: Path, copy: Path) -> None:
    """Read a file's bytes and write them to another."""
    copy.write_bytes(path.read_bytes())


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The most bytes that the process holds while the block lasts, beyond those before it, as its one number."""
    found, ended = [0], threading.Event()
    before = _resident()

    def watch() -> None:
        while not ended.wait(0.002):
            found[0] = max(found[0], _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def work(task: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own does: the memory of polyamp's first call, then the times of each round."""
    size, folder = Size(*task["size"]), Path(task["folder"])
    if task["way"] < 0:
        stored(size, folder)
        return {}
    own, by_hand = WAYS[task["way"]].prepare(size, folder)
    with watched_memory() as found:
        kept = own()
    del kept
    source = _written(size, folder)
    sides = {"own": own, "by hand": by_hand, "plain": lambda: plain(source, folder / "copy")}
    times: dict[str, Any] = {"memory": found[0], **{name: [] for name in sides}}
    for number in range(task["rounds"] + 1):
        for name, side in sides.items():
            begin = time.perf_counter()
            made = side()
            if number:
                times[name].append(time.perf_counter() - begin)
            del made  # before the next one's begins
    return times


def _worker(task: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--task", json.dumps(task)]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def entries_of(number: int, size: Size, folder: Path, rounds: int) -> list[Entry]:
    """The rows of one way."""
    way, gigabytes = WAYS[number], 2 * size.parameters / 1e9
    name = f"port, {way.name}, {gigabytes:.2f} GB bfloat16"
    if missing := [each for each in way.needs if find_spec(each) is None]:
        return [Entry(section="targets", name=name, unit="s", own=Side("polyamp", []), note=f"needs {missing[0]}")]
    task = {"way": number, "size": size, "folder": str(folder), "rounds": rounds}
    times = _worker(task)
    own = Side("polyamp", times["own"])
    made = 2 * size.parameters if way.name.endswith("to JAX") else 0  # the target itself; torch's is there before
    allowed = made + MEMORY * 2 * size.parameters + size.largest
    return [
        Entry(section="targets", name=name, unit="s", own=own, base=Side(label, times[side]), target=target)
        for side, label, target in (("by hand", "NumPy, float32", BY_HAND), ("plain", "read + write", PLAIN))
    ] + [
        Entry(
            section="memory",
            name=name,
            unit="MiB",
            own=Side("polyamp", [times["memory"] / 2**20]),
            target=allowed / 2**20,
            note="beyond what was there before; the target's own memory is counted where it is made on the way",
        )
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, help="number of the one way to measure")
    arguments, settings = paired_timing.parse(parser, rounds=5)
    if arguments.task is not None:
        print(json.dumps(work(arguments.task)))
        return
    size, rounds = (QUICK, 1) if arguments.quick else (Size(), settings.rounds)
    environment = results.machine()
    print(results.heading(environment, {"rounds": rounds}) + "\n", flush=True)
    found: list[Entry] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3 if arguments.quick else len(WAYS)) if arguments.only is None else [arguments.only]:
            found += entries_of(number, size, Path(folder), rounds)
    paired_timing.finish(found, environment, settings, __file__, arguments.json)


if __name__ == "__main__":
    main()
