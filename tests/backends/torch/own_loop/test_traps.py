"""Measured defects of `torch.amp.GradScaler`, each shown on torch's and absent from polyamp's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.own_loop import native_scaler
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.own_loop.torch_only import scaler_state
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError

INF, NAN = float("inf"), float("nan")


def theirs(**settings: Any) -> Any:
    return torch.amp.GradScaler("cpu", **settings)


def ours(**settings: Any) -> GradScaler:
    return GradScaler(polyamp.LossScaler(on_stuck="ignore", **settings))


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0,)))


def run(scaler: Any, p: nn.Parameter, optimizer: Any, gain: float = 1.0) -> None:
    """One iteration whose gradient is `gain`."""
    optimizer.zero_grad()
    scaler.scale((p * gain).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_trap_the_scale_falls_to_zero_and_nan_is_written(fused: bool, host: str) -> None:
    for scaler, scale, healthy in ((theirs(init_scale=16.0), 0.0, False), (ours(init_scale=16.0), 2.0**-14, True)):
        p = parameter(1.0)
        optimizer = torch.optim.SGD([p], 0.25, fused=fused)
        for gain in [INF] * 200 + [2.0]:
            run(scaler, p, optimizer, gain)
        assert scaler.get_scale() == scale
        assert (p.item() == 0.5) is healthy


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_trap_gradients_that_only_unscaling_makes_infinite(fused: bool, unscale: bool, host: str) -> None:
    """torch tests before it unscales; below a scale of 1 a finite gradient then becomes an infinite update."""
    settings = {"init_scale": 2.0**-14}
    for scaler, skips in ((theirs(**settings), False), (ours(**settings), True)):
        p = parameter(1.0)
        optimizer = torch.optim.SGD([p], 1.0, fused=fused)
        scaler.scale(p.sum()).backward()
        p.grad = torch.tensor([1e36])
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert (p.item() == 1.0) is skips
        assert torch.isfinite(p).item() is skips


def test_trap_the_scale_has_a_ceiling(host: str) -> None:
    """torch's grows as far as float32 goes, past every scale that a loss survives."""
    for scaler, highest in ((theirs(growth_interval=1), 2.0**127), (ours(growth_interval=1), 2.0**24)):
        p = parameter(1.0)
        optimizer = torch.optim.SGD([p], 0.0)
        for _ in range(130):
            run(scaler, p, optimizer, gain=0.0)
        assert scaler.get_scale() == highest
    unbounded = GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    for _ in range(4):
        run(unbounded, p, optimizer, gain=0.0)
    assert unbounded.get_scale() == 2.0**127


def test_trap_a_smaller_growth_interval_ends_all_growth() -> None:
    """torch compares the count of good steps with the interval by `==`."""
    for scaler, scales in ((theirs(init_scale=16.0), [16.0] * 4), (ours(init_scale=16.0), [32.0, 32.0, 32.0, 64.0])):
        p = parameter(1.0)
        optimizer = torch.optim.SGD([p], 0.25)
        for _ in range(5):
            run(scaler, p, optimizer)
        scaler.set_growth_interval(3)
        seen = []
        for _ in range(4):
            run(scaler, p, optimizer)
            seen.append(scaler.get_scale())
        assert seen == scales


def test_trap_a_16_bit_loss_of_one_element_is_infinite() -> None:
    loss = torch.tensor([1.0], dtype=torch.float16)
    assert torch.isinf(theirs().scale(loss)).all()
    assert GradScaler("cpu").scale(loss).tolist() == [65536.0]


def test_trap_a_forgotten_scale_shrinks_the_update(host: str) -> None:
    plain, p = parameter(1.0), parameter(1.0)
    for scaler, q in ((theirs(init_scale=1024.0), plain), (ours(init_scale=1024.0), p)):
        optimizer = torch.optim.SGD([q], 0.5)
        run(scaler, q, optimizer)
        optimizer.zero_grad()
        loss: Any = q.sum()
        loss.backward()
        if q is plain:
            scaler.step(optimizer)
        else:
            for call in (scaler.step, scaler.unscale_):
                with pytest.raises(
                    GradScalerError, match=r"scale\(\) was not since the last step .*scaler.scale\(loss"
                ):
                    call(optimizer)
    assert plain.item() == 0.5 - 0.5 / 1024.0


@pytest.mark.parametrize("fused", [False, True])
def test_trap_backward_after_unscale_mixes_scales(fused: bool) -> None:
    plain, p, other = parameter(1.0), parameter(1.0), parameter(1.0)
    for scaler, q in ((theirs(init_scale=8.0), plain), (ours(init_scale=8.0), p)):
        optimizer = torch.optim.SGD([q, other], 1.0, fused=fused)
        scaler.scale(q.sum() + other.sum()).backward()
        scaler.unscale_(optimizer)
        scaler.scale(q.sum()).backward()
        if q is plain:
            scaler.step(optimizer)
            assert plain.item() == 1.0 - (1.0 + 8.0)
        else:
            with pytest.raises(GradScalerError, match=r"unscaled ones, in: group 0, parameter 0\. Call unscale_ after"):
                scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update()
            run(scaler, p, optimizer)
            assert p.item() == 0.0


def test_backward_after_unscale_that_mixes_nothing_is_legal() -> None:
    """Another optimizer's backward pass, gradients taken without accumulating, a regulariser without a scale."""
    p, q = parameter(1.0), parameter(1.0)
    first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([q], 1.0)
    scaler = ours(init_scale=8.0)
    scaler.scale(p.sum() * 4.0).backward()
    scaler.unscale_(first)
    torch.autograd.grad(scaler.scale((p * p).sum()), [p])
    scaler.scale(q.sum() * 2.0).backward()
    nn.utils.clip_grad_norm_([p], 2.0)
    regulariser: Any = (p * 0.5).sum()
    regulariser.backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    torch.testing.assert_close(p.detach(), torch.tensor([1.0 - 2.5]), rtol=1e-6, atol=0.0)
    assert q.item() == -1.0


def test_trap_a_closure_by_position_is_accepted() -> None:
    calls: list[int] = []

    def closure() -> torch.Tensor:
        calls.append(1)
        return torch.zeros(())

    for scaler in (theirs(), ours()):
        p = parameter(1.0)
        optimizer = torch.optim.SGD([p], 1.0)
        scaler.scale(p.sum()).backward()
        if isinstance(scaler, GradScaler):
            with pytest.raises(UnsupportedError, match="takes no closure"):
                scaler.step(optimizer, closure)
        else:
            scaler.step(optimizer, closure)
    assert calls == [1]


def test_trap_lbfgs_evaluates_its_closure_without_the_scaler() -> None:
    for scaler in (theirs(), ours()):
        p = parameter(1.0)
        optimizer = torch.optim.LBFGS([p])
        scaler.scale(p.sum()).backward()

        def closure(p: nn.Parameter = p) -> torch.Tensor:
            return (p * p).sum()

        if isinstance(scaler, GradScaler):
            with pytest.raises(UnsupportedError, match="LBFGS evaluates the loss several times"):
                scaler.step(optimizer, closure)
            with pytest.raises(UnsupportedError, match="LBFGS"):
                scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer, closure)
            assert p.item() != 1.0


Loop = Callable[[Any, Any, Any, float, float], None]


def steps(scaler: Any, first: Any, second: Any) -> None:
    scaler.step(first)
    scaler.step(second)
    scaler.update()


def two_losses(scaler: Any, first: Any, second: Any, a: float, b: float) -> None:
    for optimizer, gain in ((first, a), (second, b)):
        optimizer.zero_grad()
        scaler.scale((optimizer.param_groups[0]["params"][0] * gain).sum()).backward()
    steps(scaler, first, second)


def one_loss(scaler: Any, first: Any, second: Any, a: float, b: float) -> None:
    p, q = (optimizer.param_groups[0]["params"][0] for optimizer in (first, second))
    first.zero_grad()
    second.zero_grad()
    scaler.scale((p * a + q * b).sum()).backward()
    steps(scaler, first, second)


def unscaled_first(scaler: Any, first: Any, second: Any, a: float, b: float) -> None:
    p, q = (optimizer.param_groups[0]["params"][0] for optimizer in (first, second))
    first.zero_grad()
    second.zero_grad()
    scaler.scale((p * a + q * b).sum()).backward()
    scaler.unscale_(first)
    scaler.unscale_(second)
    steps(scaler, first, second)


@pytest.mark.parametrize("loop", [two_losses, one_loss, unscaled_first])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gains", [(1.0, INF), (INF, 1.0)])
@pytest.mark.parametrize("healthy_before", [0, 3])
def test_trap_two_optimizers_one_overflow(
    loop: Loop, fused: bool, gains: tuple[float, float], healthy_before: int, host: str
) -> None:
    """In the very first iteration and later; torch lets the healthy one step, which `skip="each"` asks for."""
    for scaler, together in (
        (theirs(init_scale=8.0), False),
        (GradScaler(polyamp.LossScaler(init_scale=8.0), skip="each"), False),
        (GradScaler(polyamp.LossScaler(init_scale=8.0)), True),
    ):
        p, q = parameter(10.0), parameter(10.0)
        first, second = torch.optim.SGD([p], 1.0, fused=fused), torch.optim.SGD([q], 1.0, fused=fused)
        for _ in range(healthy_before):
            loop(scaler, first, second, 1.0, 1.0)
        loop(scaler, first, second, *gains)
        start = 10.0 - healthy_before
        moved = (p.item() != start, q.item() != start)
        assert moved == ((False, False) if together else (gains[0] == 1.0, gains[1] == 1.0))
        assert scaler.get_scale() == 4.0
        loop(scaler, first, second, 1.0, 1.0)
        assert p.item() == start - 1.0 - (moved[0])
        assert q.item() == start - 1.0 - (moved[1])


def test_steps_with_a_scale_between_them_decide_for_themselves() -> None:
    """The order of a GAN: the second loss sees what the first step did, so the two cannot be one decision."""
    p, q = parameter(4.0), parameter(4.0)
    first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([q], 1.0)
    scaler = ours(init_scale=8.0)
    seen = []
    for a, b in ((1.0, 1.0), (INF, 1.0), (1.0, INF), (1.0, 1.0)):
        first.zero_grad()
        scaler.scale(p.sum() * a).backward()
        scaler.step(first)
        second.zero_grad()
        scaler.scale((q * p.detach()).sum() * b).backward()
        scaler.step(second)
        scaler.update()
        seen.append((p.item(), q.item(), scaler.get_scale()))
    assert seen == [(3.0, 1.0, 8.0), (3.0, -2.0, 4.0), (2.0, -2.0, 2.0), (1.0, -3.0, 2.0)]


def test_trap_update_between_two_steps_unscales_with_another_scale() -> None:
    """Accelerate updates the scaler after each optimizer; on a growth torch halves the second one's gradients."""
    for scaler, expected in ((theirs(init_scale=8.0, growth_interval=1), 0.5), (ours(growth_interval=1), 1.0)):
        p, q = parameter(0.0), parameter(0.0)
        first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([q], 1.0)
        scaler.scale(-(p + q).sum()).backward()
        for optimizer in (first, second):
            scaler.step(optimizer)
            scaler.update()
        assert (p.item(), q.item()) == (1.0, expected)


def test_trap_dict_outputs() -> None:
    outputs = {"loss": torch.tensor(2.0)}
    lost = theirs().scale(outputs)  # a map over the keys, which are maps over their letters
    assert type(lost) is type(next(lost)) is map
    assert GradScaler("cpu").scale(outputs) == {"loss": torch.tensor(131072.0)}


def test_trap_without_cuda_the_scaler_disables_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: True)
    with pytest.warns(UserWarning, match="Disabling"):
        assert not torch.amp.GradScaler().is_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scaler in (GradScaler(), GradScaler("cuda"), GradScaler(device="cuda")):
            assert scaler.is_enabled()
            assert scaler.scale(torch.tensor(1.0)).item() == 65536.0


def test_trap_float16_gradients_pass_with_fused_optimizers() -> None:
    """They vanish and overflow before anything can be unscaled; torch refuses them for the other optimizers only."""
    for scaler in (theirs(), ours()):
        p = nn.Parameter(torch.tensor([1.0], dtype=torch.float16))
        optimizer = torch.optim.SGD([p], 1.0, fused=True)
        scaler.scale(p.float().sum() * 1e-13).backward()
        if isinstance(scaler, GradScaler):
            with pytest.raises(UnsupportedError, match="Gradients must not be float16"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            assert p.grad is not None
            assert p.grad.item() == 0.0, "1e-13 times the scale is below float16's smallest number"


@pytest.mark.parametrize("fused", [False, True])
def test_trap_complex_gradients(fused: bool) -> None:
    p = nn.Parameter(torch.tensor([1.0 + 1.0j]))
    scaler = theirs()
    scaler.scale((p * p.conj()).real.sum()).backward()
    with pytest.raises(RuntimeError, match="not implemented for 'ComplexFloat'"):
        scaler.step(torch.optim.SGD([p], 0.25))
    mine = ours(init_scale=8.0)
    optimizer = torch.optim.SGD([p], 0.25)
    optimizer.zero_grad()
    mine.scale((p * p.conj()).real.sum()).backward()
    mine.unscale_(optimizer)
    assert p.grad is not None
    assert p.grad.item() == 2.0 + 2.0j
    mine.step(optimizer)
    mine.update()
    assert p.item() == 0.5 + 0.5j
    p.grad = None
    mine.scale((p * p.conj()).real.sum()).backward()
    p.grad = torch.tensor([complex(3e38, 3e38)])  # its magnitude is above float32's range, its parts are not
    mine.step(optimizer)
    assert not mine.step_was_skipped
    mine.update()
    mine.scale((p * p.conj()).real.sum()).backward()
    p.grad = torch.tensor([complex(1.0, INF)])
    mine.step(optimizer)
    assert mine.step_was_skipped
    assert [tuple(row) for row in mine.report()] == [("group 0, parameter 0", (1,), "complex64", 1, 0)]


def sparse(values: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uncoalesced gradient of 3 rows with two entries for row 1."""
    index = torch.tensor([[1, 1]])
    made: torch.Tensor = torch.sparse_coo_tensor(
        index, torch.tensor(values, dtype=dtype), (3, 1), check_invariants=True
    )
    return made


@pytest.mark.parametrize("values", [[[3e38], [3e38]], [[3e38], [2e38]]])
def test_trap_sparse_gradients_are_tested_before_they_are_summed(values: list[list[float]]) -> None:
    """The optimizer sums entries of one index; only the sum shows that it is too large."""
    for scaler, skips in ((theirs(init_scale=1.0), False), (ours(init_scale=1.0), True)):
        p = nn.Parameter(torch.zeros(3, 1))
        optimizer = torch.optim.SGD([p], 1.0)
        scaler.scale(p.sum()).backward()
        p.grad = sparse(values)
        scaler.step(optimizer)
        assert torch.isfinite(p).all().item() is skips
    assert isinstance(scaler, GradScaler)
    assert [row.inf for row in scaler.report()] == [1]


def test_sparse_gradients_are_unscaled() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SparseAdam(layer.parameters(), lr=0.5)
    scaler = ours(init_scale=1024.0)
    scaler.scale(layer(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.unscale_(optimizer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_coalesced()
    assert layer.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    assert (layer.weight - before).ne(0).any(1).tolist() == [False, True, False, True]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_trap_compressed_sparse_gradients() -> None:
    for scaler in (theirs(init_scale=8.0), ours(init_scale=8.0)):
        p = nn.Parameter(torch.eye(2).to_sparse_csr())
        optimizer = torch.optim.SGD([p], 1.0)
        for gain, value in ((2.0, -3.0), (INF, -3.0)):
            optimizer.zero_grad()
            scaler.scale((torch.sparse.mm(p, torch.ones(2, 2)) * gain).sum()).backward()
            if not isinstance(scaler, GradScaler):
                with pytest.raises(NotImplementedError, match="SparseCsrCPU"):
                    scaler.step(optimizer)
                break
            scaler.step(optimizer)
            scaler.update()
            assert p.values().tolist() == [value, value]
            assert scaler.step_was_skipped is (gain == INF)
    assert isinstance(scaler, GradScaler)
    assert [(row.shape, row.inf, row.nan) for row in scaler.report()] == [((2, 2), 2, 0)]


def test_trap_fused_sgd_leaves_its_momentum_uninitialised(request: pytest.FixtureRequest, host: str) -> None:
    """When its very first step is skipped. Deterministic mode fills such memory with NaN, so that it shows."""
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for scaler, healthy in ((theirs(init_scale=8.0), False), (ours(init_scale=8.0), True)):
        p, late = parameter(1.0), parameter(1.0)
        late.requires_grad_(False)
        optimizer = torch.optim.SGD([{"params": [p]}, {"params": [late]}], 1.0, momentum=0.5, fused=True)
        run(scaler, p, optimizer, INF)
        run(scaler, p, optimizer, 1.0)
        assert (p.item() == 0.0) is healthy
        if healthy:
            run(scaler, p, optimizer, 1.0)
            late.requires_grad_(True)  # its group's own first step comes later, and is skipped as well
            for gain in (INF, 1.0):
                optimizer.zero_grad()
                scaler.scale(((p + late) * gain).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
            assert (p.item(), late.item()) == (-3.25, 0.0)


@pytest.mark.parametrize(
    "forget",
    [
        lambda o: o.state.clear(),
        lambda o: o.load_state_dict(
            torch.optim.SGD(o.param_groups[0]["params"], 1.0, momentum=0.5, fused=True).state_dict()
        ),
    ],
    ids=["cleared", "loaded"],
)
def test_a_momentum_that_was_there_and_is_gone_is_noticed(
    forget: Callable[[Any], None], request: pytest.FixtureRequest, host: str
) -> None:
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], 1.0, momentum=0.5, fused=True)
    scaler = ours(init_scale=8.0)
    for _ in range(3):
        run(scaler, p, optimizer)
    assert p.item() == 1.0 - 1.0 - 1.5 - 1.75
    forget(optimizer)
    run(scaler, p, optimizer, INF)
    run(scaler, p, optimizer)
    assert p.item() == 1.0 - 1.0 - 1.5 - 1.75 - 1.0


@pytest.mark.parametrize(("fused", "reads"), [(True, []), (False, ["tolist"])])
def test_what_an_iteration_reads_where_reading_waits(
    fused: bool, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer's iteration reads no tensor on the host; another's reads one."""
    seen: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any) -> Any:
            seen.append(name)
            return original(self, *args)

        return read

    monkeypatch.setattr(native_scaler, "can_read_without_sync", lambda device: False)
    monkeypatch.setattr(scaler_state, "can_read_without_sync", lambda device: False)
    p = parameter(1.0)
    optimizer = torch.optim.AdamW([p], 0.1, fused=fused)
    scaler = ours()
    run(scaler, p, optimizer)
    monkeypatch.setattr(optimizer, "step", lambda: None)  # torch's own reads are not counted
    for unscale in (False, True):
        scaler.scale(p.sum()).backward()
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
                patch.setattr(torch.Tensor, name, counting(name))
            seen.clear()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert seen == reads
