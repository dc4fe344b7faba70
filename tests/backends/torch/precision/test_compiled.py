"""torch.compile around and inside a model under a policy, and overrides behind the wrappers that torch puts around."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import polyamp
from polyamp.errors import PolicyError
from polyamp_torch.precision.autocast import autocast, carried
from polyamp_torch.precision.torch_only.unwrapped_paths import unwrapped_paths

BFLOAT16 = polyamp.Policy("mixed_bfloat16")
ISLAND = BFLOAT16.replace(overrides={"2": "float32"})
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def gradients(model: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    function(X).float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **options)


@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "graphs"])
@pytest.mark.parametrize("way", ["compiled bound model", "bound compiled model", "function that calls it"])
def test_a_bound_model_with_overrides_has_eager_gradients_when_it_is_compiled(way: str, fullgraph: bool) -> None:
    eager, model = network(), network()
    want = gradients(eager, ISLAND.autocast(eager))
    if way == "bound compiled model":
        run = ISLAND.autocast(compiled(model, fullgraph=fullgraph))
    else:
        bound = ISLAND.autocast(model)
        run = compiled(bound if way == "compiled bound model" else lambda x: bound(x), fullgraph=fullgraph)
    got = gradients(model, run)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "forward" not in model[2].__dict__
    assert torch._functorch.config.backward_pass_autocast == "same_as_forward", "the user's other code"


def test_overrides_are_one_graph_and_compiled_once() -> None:
    graphs: list[list[Any]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    bound = ISLAND.autocast(network())
    run: Any = torch.compile(bound, fullgraph=True, backend=backend)
    for _ in range(3):
        got = run(X)
    assert torch.equal(got, bound(X))
    assert len(graphs) == 1
    entered = [getattr(target, "__name__", "") for target in graphs[0]]
    assert entered.count("_enter_autocast") == 2, "the region, and the override's in it"


def test_the_backward_of_code_compiled_in_a_region() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def island(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ weight

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], region: Any) -> torch.Tensor:
        with region:
            loss = function(X).square().mean()
        (grad,) = torch.autograd.grad(loss, weight)
        return grad

    want = gradient(island, autocast(BFLOAT16, "cpu"))
    assert torch.equal(gradient(compiled(island), autocast(BFLOAT16, "cpu")), want)
    with autocast(BFLOAT16, "cpu"):
        again = carried(compiled(island))
    assert torch.equal(gradient(again, contextlib.nullcontext()), want)
    plain = gradient(compiled(island), torch.autocast("cpu", torch.bfloat16))
    assert not torch.equal(plain, want), "torch's own region keeps torch's default"


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    store = f"file://{folder / 'store'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=30)
        )
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


def inner_dtypes(model: nn.Module, part: nn.Module, policy: polyamp.Policy) -> torch.dtype:
    """In what dtype a linear layer of a model under a policy ran."""
    seen: list[torch.dtype] = []
    torch._dynamo.reset()  # it does not look for new hooks
    hook = part.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    policy.autocast(model)(X)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("wrapper", ["none", "compile", "DataParallel", "checkpoint", "DistributedDataParallel", "two"])
def test_globs_match_behind_wrappers(wrapper: str, tmp_path: Path) -> None:
    inner = network()
    with one_rank(tmp_path) if wrapper == "DistributedDataParallel" else contextlib.nullcontext():
        wrapped: dict[str, Callable[[nn.Module], nn.Module]] = {
            "none": lambda m: m,
            "compile": lambda m: compiled(m),
            "DataParallel": nn.DataParallel,
            "checkpoint": checkpoint_wrapper,
            "DistributedDataParallel": nn.parallel.DistributedDataParallel,
            "two": lambda m: nn.DataParallel(checkpoint_wrapper(m)),
        }
        model = wrapped[wrapper](inner)
        assert set(unwrapped_paths(model)) == {"0", "1", "2", "3", "4"}
        assert inner_dtypes(model, inner[2], BFLOAT16.replace(overrides={"?": "float32"})) == torch.float32
        assert inner_dtypes(model, inner[2], BFLOAT16.replace(overrides={"4": "float32"})) == torch.bfloat16
        with pytest.raises(PolicyError, match="'module/2' matches no module path"):
            BFLOAT16.replace(overrides={"module/2": "float32"}).autocast(model)


def test_a_wrapped_part_and_a_submodule_that_is_called_module() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = network()
            self.encoder = compiled(network())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.module(x) + self.encoder(x)
            return out

    own = Own()
    assert {"module", "module/2", "encoder", "encoder/2"} <= set(unwrapped_paths(own))
    assert inner_dtypes(own, own.module[2], BFLOAT16.replace(overrides={"module/2": "float32"})) == torch.float32
    behind = own.encoder._orig_mod[2]
    for glob in ("encoder/2", "encoder"):
        assert inner_dtypes(own, behind, BFLOAT16.replace(overrides={glob: "float32"})) == torch.float32
    assert inner_dtypes(own, behind, BFLOAT16.replace(overrides={"module": "float32"})) == torch.bfloat16


def test_a_step_of_a_wrapped_model_names_the_models_own_paths() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.part.weight

    made = polyamp.Recipe(policy=BFLOAT16.replace(overrides={"part": "float32"}), optimizer=polyamp.sgd(0.1))
    state = polyamp.init(nn.DataParallel(Unused()), made)
    with pytest.raises(polyamp.errors.UnsupportedError, match="the module 'part' is never called as a module"):
        polyamp.train_step(lambda model, x: model(x).square().mean(), made)(state, X)
