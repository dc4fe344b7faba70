"""`polyamp_torch.GradScaler` in the place of torch's: constructors, type checks, saved states, and the same numbers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import polyamp
from polyamp.errors import LossScaleStuckError
from polyamp_torch.own_loop import native_scaler
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.own_loop.torch_only import scaler_state
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError
from polyamp_torch.precision.autocast import autocast

INF = float("inf")
FIVE = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def loop(scaler: Any, region: Any, make: Any, *, clip: bool, iterations: int = 12) -> tuple[list[torch.Tensor], Any]:
    """A loop as torch's documentation writes it."""
    model = network()
    optimizer = make(model.parameters())
    random = torch.Generator().manual_seed(1)
    for _ in range(iterations):
        x, y = torch.randn(8, 6, generator=random), torch.randint(0, 3, (8,), generator=random)
        optimizer.zero_grad()
        with region():
            loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    state = [value for slots in optimizer.state.values() for value in slots.values() if isinstance(value, torch.Tensor)]
    return [p.detach() for p in model.parameters()] + state, scaler.state_dict()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "SGD-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
}


@pytest.mark.parametrize("growth_factor", [2.0, 1.7])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("reading", ["is free", "waits"])
def test_a_loop_for_torch_gives_the_same_bits(
    make: Any, clip: bool, growth_factor: float, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the two constructors are replaced. The scale grows, by a factor that is exact or one that is not."""
    if reading == "waits":
        monkeypatch.setattr(native_scaler, "can_read_without_sync", lambda device: False)
        monkeypatch.setattr(scaler_state, "can_read_without_sync", lambda device: False)
    settings: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 5, "growth_factor": growth_factor}
    policy = polyamp.Policy("mixed_float16", op_list="native")
    expected, their_state = loop(
        torch.amp.GradScaler("cpu", **settings), lambda: torch.autocast("cpu", torch.float16), make, clip=clip
    )
    for scaler in (GradScaler("cpu", **settings), GradScaler(polyamp.LossScaler(max_scale=2.0**30, **settings))):
        found, our_state = loop(scaler, lambda: autocast(policy, "cpu"), make, clip=clip)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert {key: our_state[key] for key in FIVE} == their_state


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # torch forgot it in __all__
    yield
    dist.destroy_process_group()


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**-14])
def test_distributed_modules(wrap: Any, fused: bool, init_scale: float, process_group: None) -> None:
    """DDP and FSDP2 as torch's scaler runs them: gradients in buckets, gradients that are DTensors."""
    made = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=init_scale), GradScaler("cpu", init_scale=init_scale)):
        torch.manual_seed(0)
        model = wrap(nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=fused)
        for gain in (1.0, INF, 1.0):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(2, 4) * gain) ** 2).mean()).backward()
            scaler.step(optimizer)
            if gain != 1.0 and isinstance(scaler, GradScaler):
                assert {row.shape: row.inf + row.nan for row in scaler.report()} == {(2, 4): 8, (2,): 2}
            scaler.update()
        made.append([p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_it_is_one_of_torchs() -> None:
    scaler = GradScaler(polyamp.LossScaler())
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(scaler, torch.cuda.amp.GradScaler)
    for name, method in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
        theirs = [p for p in inspect.signature(method).parameters if p not in ("self", "outputs")]
        ours = list(inspect.signature(getattr(GradScaler, name)).parameters)
        if name != "__init__":
            assert [p for p in theirs if p not in ours] == [], name


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("cpu",), {}),
        ((), {"device": "cpu"}),
        (("cpu", 1024.0, 4.0, 0.25, 10), {}),
        (("cpu",), {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 10}),
    ],
)
def test_torchs_own_arguments(args: Any, kwargs: Any) -> None:
    theirs, ours = torch.amp.GradScaler(*args, **kwargs), GradScaler(*args, **kwargs)
    state = ours.state_dict()
    assert {key: state[key] for key in FIVE} == theirs.state_dict()
    assert (ours._device, ours._init_scale, ours._init_growth_tracker) == ("cpu", theirs._init_scale, 0)
    assert (ours._scale, ours._growth_tracker, ours._get_growth_tracker()) == (None, None, 0)


def test_torchs_defaults_have_polyamps_floor() -> None:
    assert GradScaler().loss_scaler == GradScaler("cuda").loss_scaler == polyamp.LossScaler.like("torch")
    assert GradScaler().loss_scaler.min_scale == 2.0**-14


def test_contradictory_arguments_are_refused() -> None:
    with pytest.raises(GradScalerError, match=r"must be a polyamp.LossScaler or, .* Received: 1024.0"):
        GradScaler(1024.0)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(GradScalerError, match="init_scale must be set in the LossScaler"):
        GradScaler(polyamp.LossScaler(), init_scale=8.0)
    with pytest.raises(GradScalerError, match="device is given twice"):
        GradScaler("cpu", device="cuda")
    with pytest.raises(GradScalerError, match="skip must be 'all' or 'each'"):
        GradScaler(skip="some")  # type: ignore[arg-type]  # what is refused


def advanced(scaler: Any, gains: list[float]) -> Any:
    """The scaler after iterations with these gradients."""
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 0.0)
    for gain in gains:
        optimizer.zero_grad()
        scaler.scale((p * gain).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


GAINS = [1.0, INF, 1.0, 1.0]


@pytest.mark.parametrize("started", [False, True])
def test_states_are_exchanged_with_torch(started: bool) -> None:
    settings: dict[str, Any] = {"init_scale": 512.0, "growth_interval": 3}
    for source, target in (
        (GradScaler("cpu", **settings), torch.amp.GradScaler("cpu")),
        (torch.amp.GradScaler("cpu", **settings), GradScaler("cpu")),
    ):
        advanced(source, GAINS)
        if started:
            advanced(target, [1.0])
        target.load_state_dict(source.state_dict())
        for gains in ([], [1.0], [float("nan"), 1.0]):
            ours, theirs = advanced(target, gains).state_dict(), advanced(source, gains).state_dict()
            assert {key: ours[key] for key in FIVE} == {key: theirs[key] for key in FIVE}


@pytest.mark.parametrize("settings", [{"growth_delay": "always"}, {"growth_delay": "after_overflow"}, {}])
def test_torch_grows_from_every_state(settings: dict[str, Any]) -> None:
    """torch compares its count with the interval by `==`: a count that is beyond would never grow again."""
    for good in range(6):
        source = GradScaler(polyamp.LossScaler(init_scale=16.0, growth_interval=4, **settings))
        advanced(source, [1.0] * good)
        if not settings:
            source.set_growth_interval(3)
        theirs, own = torch.amp.GradScaler("cpu"), GradScaler()
        for target in (theirs, own):
            target.load_state_dict(source.state_dict())
        assert advanced(theirs, [1.0] * 4).get_scale() > source.get_scale()
        assert own.state_dict() == source.state_dict()
        for _ in range(5):
            assert advanced(own, [1.0]).get_scale() == advanced(source, [1.0]).get_scale()


def test_a_count_that_was_written_into_a_state_counts() -> None:
    source = advanced(GradScaler(polyamp.LossScaler(growth_interval=4, growth_delay="always")), [1.0] * 4)
    state = {**source.state_dict(), "_growth_tracker": 1}
    target = GradScaler()
    target.load_state_dict(state)
    assert target.state_dict()["_growth_tracker"] == 1


def test_a_static_scale_stays_where_it_is_in_torch() -> None:
    theirs = torch.amp.GradScaler("cpu", growth_interval=1)
    theirs.load_state_dict(GradScaler(polyamp.LossScaler.static(64.0, growth_interval=1)).state_dict())
    assert advanced(theirs, GAINS).get_scale() == 64.0


def test_our_own_state_is_whole() -> None:
    settings = polyamp.LossScaler(init_scale=16.0, growth_interval=7, hysteresis=3, min_scale=0.25, max_scale=64.0)
    source = advanced(GradScaler(settings), GAINS)
    for target in (GradScaler(), GradScaler(polyamp.LossScaler.static(2.0)), advanced(GradScaler("cpu"), [1.0])):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file, weights_only=True))
        assert target.loss_scaler == settings
        assert target.state_dict() == source.state_dict()
        assert target.state_dict()["polyamp"]["hysteresis"] == 2
        assert target.state_dict()["polyamp"]["skipped"] == 1


def test_a_resumed_run_is_as_stuck_as_before() -> None:
    """Two skips at the floor before the checkpoint, three after it, when the host looks."""
    settings = polyamp.LossScaler(init_scale=1.0, min_scale=1.0, patience=3)
    resumed = GradScaler(settings)
    resumed.load_state_dict(advanced(GradScaler(settings), [INF, INF]).state_dict())
    assert resumed.state_dict()["polyamp"]["stuck"] == 2
    with pytest.raises(LossScaleStuckError, match="5 steps in a row were skipped"):
        advanced(resumed, [INF, INF, INF])


@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies(copied: Any) -> None:
    source = advanced(GradScaler(polyamp.LossScaler(hysteresis=2), skip="each"), GAINS)
    twin = copied(source)
    assert (twin.skip, twin.loss_scaler, twin.state_dict()) == ("each", source.loss_scaler, source.state_dict())
    assert advanced(twin, GAINS).state_dict() == advanced(source, GAINS).state_dict()
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 0.1)
    twin.scale(p.sum()).backward()
    twin.unscale_(optimizer)
    with pytest.raises(GradScalerError, match="only between iterations"):
        copied(twin)


@pytest.mark.parametrize("scale", [0.0, INF, float("nan"), 2.0**-20, 2.0**30])
def test_a_collapsed_state_is_refused_and_nothing_changes(scale: float) -> None:
    scaler = GradScaler(polyamp.LossScaler())
    before = scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu", init_scale=scale, growth_factor=4.0).state_dict()
    with pytest.raises(GradScalerError, match=r'state_dict\["scale"\] must lie between min_scale=6.1.*max_scale=1.6'):
        scaler.load_state_dict(theirs)
    assert scaler.state_dict() == before
    with pytest.raises(GradScalerError, match="Missing: scale, growth_factor"):
        scaler.load_state_dict({})


def test_what_libraries_read_and_write() -> None:
    scaler = GradScaler(device="cpu")
    scaler._lazy_init_scale_growth_tracker("cpu")
    assert (scaler._get_scale_async().item(), scaler._growth_tracker.item()) == (65536.0, 0)  # type: ignore[union-attr]  # made above
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 1)
    assert scaler.loss_scaler == polyamp.LossScaler.like(
        "torch", growth_factor=4.0, backoff_factor=0.25, growth_interval=1
    )
    scaler._scale = torch.tensor(8.0)
    assert advanced(scaler, [1.0]).get_scale() == 32.0
    scaler._growth_interval = 5
    scaler._growth_tracker = torch.tensor(4, dtype=torch.int32)
    assert advanced(scaler, [1.0]).get_scale() == 128.0
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 1.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    assert [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()] == [0.0]
    assert list(scaler._per_optimizer_states) == [id(optimizer)]
    fresh = GradScaler("cuda")
    fresh._init_scale, fresh._init_growth_tracker, fresh._device = 32.0, 2, "mps"
    assert (fresh.get_scale(), fresh._init_growth_tracker, fresh._device) == (32.0, 2, "mps")
    fresh._lazy_init_scale_growth_tracker("cpu")
    assert (fresh._scale.item(), fresh._growth_tracker.item(), fresh._device) == (32.0, 2, "cpu")  # type: ignore[union-attr]  # made above
    with pytest.raises(GradScalerError, match=r"_init_scale must lie between .* Received: 0"):
        fresh._init_scale = 0.0
    with pytest.raises(GradScalerError, match="growth_factor cannot change"):
        GradScaler(polyamp.LossScaler.static(2.0)).set_growth_factor(3.0)


DOCUMENT = Path(__file__).parents[4] / "docs" / "guides" / "torch_grad_scaler.md"


def test_the_document_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "text"}
    script = "\n".join(text for language, text in blocks if language == "python")
    exec(compile(script, str(DOCUMENT), "exec"), {})
    printed = capsys.readouterr().out
    assert [text for language, text in blocks if language == "text" and text not in printed] == []


def test_s15_the_scale_grows_beyond_a_smaller_growth_interval() -> None:
    """torch's own scaler compares with `==`, and never grows again."""
    scaler, parameter = (
        GradScaler(polyamp.LossScaler(init_scale=16.0, growth_interval=1000)),
        nn.Parameter(torch.ones(1)),
    )
    optimizer = torch.optim.SGD([parameter], 0.1)
    scales = []
    for step in range(8):
        if step == 5:
            scaler.set_growth_interval(2)
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [16.0] * 5 + [32.0, 32.0, 64.0]
