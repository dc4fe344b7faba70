"""Rule S33 in torch: what several processes save under DDP, FSDP2, HSDP and tensor parallelism goes on anywhere."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp.errors import CheckpointError, ReplicaError
from polyamp.rules import resume_rng_seeds
from tests import ranks

ENGINES = ("ddp", "fsdp2", "hsdp", "tensor_parallel", "fsdp2+tensor_parallel")
ROWS = 8
RECIPE = polyamp.Recipe(
    policy="mixed_bfloat16",
    optimizer=polyamp.adamw(polyamp.schedules.cosine(1e-2, 100)),
    scaler=polyamp.LossScaler(init_scale=2.0**10, growth_interval=3),
    clip_norm=1.0,
)
FILES = {"ddp": 1, "fsdp2": 4, "hsdp": 2, "tensor_parallel": 4, "fsdp2+tensor_parallel": 4}
"""How many ranks of four have something to write: what several hold alike is written once."""
Arrays = dict[str, np.ndarray[Any, Any]]


class Net(nn.Module):
    """With rows that four ranks do not share evenly, frozen ones too, running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.25)
        self.five = nn.Parameter(torch.rand(5, 6), requires_grad=False)
        self.table: torch.Tensor
        self.register_buffer("table", torch.rand(6).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.down(self.drop(torch.relu(self.up(x))))) * self.table
        return y + self.five.sum(0)


def network(engine: str | None, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model, world = Net(), dist.get_world_size() if dist.is_initialized() else 1
    if engine == "ddp":
        model = DistributedDataParallel(model)  # type: ignore[assignment]
    elif engine == "fsdp2":
        for part in (model.up, model.down, model):
            fully_shard(part)
    elif engine == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "parts")))
    elif engine == "tensor_parallel":
        parallelize_module(model, init_device_mesh("cpu", (world,)), PLAN)
    elif engine == "fsdp2+tensor_parallel":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], PLAN)
        fully_shard(model, mesh=mesh["data"])
    return model


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def fresh(engine: str | None, seed: int, recipe: polyamp.Recipe = RECIPE) -> Any:
    state = polyamp.init(network(engine, seed), recipe)
    torch.manual_seed(seed * 100 + (dist.get_rank() if dist.is_initialized() else 0))
    return state


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    x, y = batch
    return polyamp.losses.mean_squared_error(model(x), y)


def advance(state: Any, first: int, last: int) -> Any:
    """Steps on this rank's rows; the second of all overflows."""
    step = polyamp.train_step(loss_fn, state.recipe)
    replicas = state.replicas
    for number in range(first, last):
        drawn = torch.Generator().manual_seed(number)
        x, y = torch.randn(ROWS, 4, generator=drawn), torch.randn(ROWS, 6, generator=drawn)
        if number == 1:
            x[-1] = torch.inf
        rows = ROWS // replicas.count
        mine = slice(rows * replicas.rank, rows * (replicas.rank + 1))
        state, _ = step(state, (x[mine], y[mine]))
    return state


def whole(state: Any) -> Arrays:
    exported: Arrays = state.backend.export_state(state)
    return exported


def differences(one: Arrays, other: Arrays, *, streams_too: bool = False) -> list[str]:
    """Names of arrays that are not the same, bit for bit."""
    names = {name for name in {*one, *other} if streams_too or not name.startswith("rng/")}
    return sorted(n for n in names if n not in one or n not in other or one[n].tobytes() != other[n].tobytes())


def close(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether floating arrays differ by their last digits at most."""
    return one.dtype == np.float32 and np.allclose(one, other, rtol=1e-6, atol=1e-7)


def saved(rank: int, folder: str, engines: tuple[str, ...]) -> dict[str, tuple[Arrays, list[str]]]:
    """Train, save both forms and go on; begin anew from the folder and go on: what was saved, and where they part."""
    found = {}
    for engine in engines:
        state = advance(fresh(engine, 0), 0, 3)
        polyamp.save(state, f"{folder}/{engine}", sharded=True)
        polyamp.save(state, f"{folder}/{engine}.file", sharded=False)
        exported = whole(state)
        straight = whole(advance(state, 3, 5))
        again = polyamp.restore(fresh(engine, 1), f"{folder}/{engine}")
        parted = differences(exported, whole(again), streams_too=True)
        ended = whole(advance(again, 3, 5))
        if engine == "ddp":  # which sums over four ranks in another order once it has seen a backward pass
            ended = {name: straight[name] if close(straight[name], array) else array for name, array in ended.items()}
        parted += differences(straight, ended, streams_too=True)
        found[engine] = exported, parted
    return found


def resumed(rank: int, folder: str, pairs: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], tuple[Arrays, Arrays]]:
    """Restore what the first engine saved into the second, from a folder and a file, and train on."""
    found = {}
    for saved_by, engine in pairs:
        first = whole(polyamp.restore(fresh(engine, 2), f"{folder}/{saved_by}.file"))
        state = polyamp.restore(fresh(engine, 1), f"{folder}/{saved_by}")
        exported = whole(state)
        assert differences(first, exported) == []
        found[saved_by, engine] = exported, whole(advance(state, 3, 4))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def of_four(folder: Path) -> list[dict[str, tuple[Arrays, list[str]]]]:
    return ranks.run(saved, 4, str(folder), ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_s33_the_same_number_of_ranks_goes_on_bit_identically(of_four: Any, folder: Path, engine: str) -> None:
    for rank, found in enumerate(of_four):
        assert found[engine][1] == [], f"rank {rank}"
        assert differences(found[engine][0], of_four[0][engine][0]) == []
    said = json.loads((folder / engine / "polyamp.json").read_text())
    assert (said["processes"], said["own"]) == (4, ["rng/cpu"])
    assert all(name.endswith(".safetensors") for name in said["files"])
    assert len(said["files"]) == FILES[engine]


def test_s33_two_ranks_and_other_engines_take_what_four_saved(of_four: Any, folder: Path) -> None:
    pairs = (("ddp", "ddp"), ("fsdp2", "fsdp2"), ("ddp", "fsdp2"), ("hsdp", "ddp"))
    found = ranks.run(resumed, 2, str(folder), pairs)
    for pair in pairs:
        before = of_four[0][pair[0]][0]
        assert differences(before, found[0][pair][0]) == [], pair
        assert differences(found[0][pair][1], found[1][pair][1]) == [], pair
        drawn = [each[pair][0]["rng/cpu"] for each in found]
        every = [each[pair[0]][0]["rng/cpu"].tobytes() for each in of_four]
        for rank, stream in enumerate(drawn):
            seeded = torch.Generator().manual_seed(resume_rng_seeds.stream_seed(every, rank, 2)).get_state().numpy()
            assert np.array_equal(stream, seeded), pair


@pytest.mark.parametrize("engine", ENGINES)
def test_s33_a_process_alone_takes_what_four_saved(of_four: Any, folder: Path, engine: str) -> None:
    assert not dist.is_initialized()
    before = of_four[0][engine][0]
    for name in (engine, f"{engine}.file"):
        state = polyamp.restore(fresh(None, 1), folder / name)
        assert differences(before, whole(state)) == []
    assert int(advance(state, 3, 4).step) == int(before["step"]) + 1


def native(engine: str, seed: int) -> Any:
    """A state with an optimizer of torch's own, which makes its arrays at its first step."""
    model = network(engine, seed)
    made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return polyamp.init(model, RECIPE.replace(optimizer=made))


def natively(rank: int, folder: str) -> list[str]:
    state = advance(native("fsdp2", 0), 0, 3)
    polyamp.save(state, f"{folder}/native")
    straight = whole(advance(state, 3, 4))
    other = polyamp.restore(native("fsdp2", 1), f"{folder}/native")
    return differences(straight, whole(advance(other, 3, 4)), streams_too=True)


def refused(rank: int, folder: str) -> list[str]:
    """What three ranks say of checkpoints that none of them may take, and whether one took something."""
    state = fresh("fsdp2", 3)
    before, said = whole(state), []
    other = fresh("fsdp2", 3, RECIPE.replace(clip_norm=None))
    places = ("damaged", state), ("fsdp2", other), ("nowhere" if rank == 1 else "fsdp2", state), ("short", state)
    for path, into in (*places, ("nowhere", state)):
        try:
            polyamp.restore(into, f"{folder}/{path}")
        except (CheckpointError, FileNotFoundError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return [*said, *differences(before, whole(state))]


def test_s33_every_rank_refuses_what_one_refuses(of_four: Any, folder: Path, tmp_path: Path) -> None:
    parted = ranks.run(natively, 2, str(tmp_path))
    assert parted == [[], []]
    said = json.loads((folder / "fsdp2" / "polyamp.json").read_text())
    for path in (folder / "damaged", folder / "short"):
        (path / said["data"]).mkdir(parents=True)
        os.link(folder / "fsdp2" / "polyamp.json", path / "polyamp.json")
    lost = sorted(said["files"])[1]  # which rank 1 looks at
    for name in said["files"]:
        content = (folder / "fsdp2" / said["data"] / name).read_bytes()
        changed = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:] if "00003" in name else content
        (folder / "damaged" / said["data"] / name).write_bytes(changed)
        if name != lost:
            (folder / "short" / said["data"] / name).write_bytes(content)
    found = ranks.run(refused, 3, str(folder))
    assert [len(each) for each in found] == [5, 5, 5]
    nothing = f"CheckpointError: rank 1 finds nothing at {folder}/nowhere, and rank 0 a folder at {folder}/fsdp2. All "
    for _, _, nowhere, short, absent in found:
        assert nowhere.startswith(nothing)
        assert short.startswith("CheckpointError: ")
        assert f" is not whole: {lost} is missing. Restore an older one." in short
        assert absent.startswith("FileNotFoundError: ")
    for rank, (damaged, recipe, *_) in enumerate(found):
        assert "shard-00003-model-00001-of-00001.safetensors is damaged: its digest is another" in damaged
        assert damaged.startswith("CheckpointError: rank 2 found damage") == (rank != 2)
        assert "clip_norm: 1.0 -> None" in recipe


def as_the_guide_says(rank: int, folder: str) -> int:
    guide = Path(__file__).parents[4] / "docs" / "guides" / "sharded_checkpoints.md"
    os.chdir(folder)
    found: dict[str, Any] = {}
    exec(guide.read_text(encoding="utf-8").split("```python torch\n")[1].split("```")[0], found)
    return int(found["state"].step)


def test_s33_the_guides_program_resumes(tmp_path: Path) -> None:
    assert ranks.run(as_the_guide_says, 2, str(tmp_path)) == [2, 2]
    assert ranks.run(as_the_guide_says, 3, str(tmp_path)) == [4, 4, 4]


def killed(rank: int, folder: str, when: str) -> str:
    """Save over an older checkpoint; rank 1, or 0 around the manifest, is killed at a moment of its own."""
    from polyamp.train import sharded_checkpoint
    from polyamp_torch.distributed.torch_only import checkpoint_io

    polyamp.save(fresh("fsdp2", 0), f"{folder}/{when}")
    state = fresh("fsdp2", 7)
    dist.barrier()

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and when == "before writing":
        checkpoint_io.write_tensors = die
    if rank == 1 and when == "while the others write":
        inner = checkpoint_io.save
        checkpoint_io.save = lambda given, **options: (inner, die())  # the others are in a collective meanwhile
    if rank == 1 and when == "after writing":
        sharded_checkpoint._sync_and_digest = die  # type: ignore[assignment]
    if rank == 0 and when == "before the manifest":
        sharded_checkpoint.write_atomically = die
    if rank == 0 and when == "after the manifest":
        sharded_checkpoint._remove_old_data = lambda path, keep: die() if _moved(path) else None
    try:
        polyamp.save(state, f"{folder}/{when}")
    except ReplicaError as error:
        return str(error)
    return "saved"


def _moved(path: Path) -> bool:
    """Whether the manifest names the newest data."""
    current = json.loads((path / "polyamp.json").read_text())["data"] if (path / "polyamp.json").exists() else ""
    newest = max(path.glob("data-*"), key=lambda each: each.stat().st_mtime_ns, default=Path())
    return len(list(path.glob("data-*"))) == 2 and newest.name == current


@pytest.mark.parametrize(
    ("when", "victim"),
    [
        ("before writing", 1),
        ("while the others write", 1),
        ("after writing", 1),
        ("before the manifest", 0),
        ("after the manifest", 0),
    ],
)
def test_s33_a_killed_rank_leaves_the_last_checkpoint_whole(tmp_path: Path, when: str, victim: int) -> None:
    found = ranks.outcomes(killed, 2, str(tmp_path), when, collective_timeout=5.0, leave=False)
    assert found[victim].exitcode == -signal.SIGKILL
    words = found[1 - victim].value
    assert words.startswith(f"rank {victim} is no longer running: killed, or ended without a word."), found[1 - victim]
    assert f"(The collective of rank {1 - victim} failed in polyamp.save after step 0: " in words
    assert "The last complete checkpoint is whole" in words
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = polyamp.restore(fresh(None, 1), tmp_path / when)
    expected = 7 if when == "after the manifest" else 0
    assert differences(whole(fresh(None, expected)), whole(state)) == []
    polyamp.save(state, tmp_path / when, sharded=True)
    assert len(list((tmp_path / when).iterdir())) == 2, "and the next save takes the rest away"
