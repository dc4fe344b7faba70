"""FSDP2's `MixedPrecisionPolicy` from a policy: two processes compute what one does, bit for bit (S1, S3, S4, S5)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard

import polyamp
import polyamp_torch
from polyamp import ArgumentError, Policy, PolicyError, UnsupportedError
from polyamp_torch.compat import fsdp2_state
from tests import ranks

HALF, FULL = torch.float16, torch.float32


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.table: torch.Tensor
        self.register_buffer("table", torch.linspace(0.0, 1.0, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x + self.table))))


class Net(nn.Module):
    """Embedding, blocks, a norm and a tied head: what transformers are made of."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(norm), Block(norm)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def made(norm: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    torch.manual_seed(0)
    net = Net(norm)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape))  # norms of ones would be the same in 16 bits
    return net


def results(net: nn.Module, policy: Policy, steps: int = 2) -> list[torch.Tensor]:
    """Outputs, gradients and parameters of some steps of SGD, whole."""
    bound, found = policy.autocast(net), []
    tokens = torch.arange(12).reshape(4, 3) % 11
    for _ in range(steps):
        net.zero_grad()
        out = bound(tokens)
        (polyamp.losses.softmax_cross_entropy(out, tokens) * 1024.0).backward()
        found.append(out.detach().clone())
        with torch.no_grad():
            for p in net.parameters():
                assert p.grad is not None
                found.append(whole(p.grad))
                p.sub_(p.grad, alpha=1e-4)
                found.append(whole(p))
    return found


def whole(x: Any) -> torch.Tensor:
    full: torch.Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach().clone()


AUTOCAST = Policy("mixed_float16")
CAST = Policy("mixed_float16", mode="cast")
POLICIES: dict[str, Policy] = {
    "autocast": AUTOCAST,
    "autocast, overrides": AUTOCAST.replace(overrides={"blocks/*/norm": "bfloat16", "blocks/1/up": "float32"}),
    "cast": CAST,
    "cast, overrides": CAST.replace(overrides={"**/norm": "float32", "blocks/1/up": "bfloat16"}),
    "float32": Policy("float32"),
}


class Rows(nn.BatchNorm1d):
    """Batch normalisation over all but the last axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, -2)).view(x.shape)


def parity(rank: int) -> dict[str, bool]:
    """Whether two processes with the same batch have the numbers of one, bit for bit."""
    found = {}
    for name, policy in POLICIES.items():
        for norm in (nn.LayerNorm, Rows):
            alone = results(made(norm), policy)
            net = polyamp_torch.fully_shard(made(norm), policy, modules="blocks/*")
            pairs = zip(alone, results(net, policy), strict=True)
            found[f"{name}, {norm.__name__}"] = all(torch.equal(a, b) for a, b in pairs)
    return found


def sixteen(rank: int) -> dict[str, Any]:
    """What weights gathered, and gradients reduced, in 16 bits do under autocast and to a sum."""
    net, alone = made(), made()
    shard(net, mp_policy=MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=FULL, cast_forward_inputs=False))
    tokens = torch.arange(12).reshape(4, 3) % 11
    with polyamp_torch.autocast(AUTOCAST, "cpu"):
        apart = (net(tokens).float() - alone(tokens).float()).abs().max().item()
    means = []
    for reduce_dtype in (HALF, FULL):
        one = nn.Linear(3, 1, bias=False)
        shard(one, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        one(torch.tensor([[70000.0, 60000.0, 5e-8], [30000.0, 40000.0, 5e-8]])[rank : rank + 1]).sum().backward()
        means.append(whole(one.weight.grad).flatten().tolist())
    return {"apart": apart, "means": means}


def units(rank: int) -> dict[str, list[tuple[str, Any]]]:
    """The units that were made: path, and (param_dtype, reduce_dtype, output_dtype, cast_forward_inputs)."""
    found = {}
    for name in ("autocast, overrides", "cast, overrides"):
        net = polyamp_torch.fully_shard(made(Rows), POLICIES[name], modules=Block)
        states = ((path, fsdp2_state(part)) for path, part in net.named_modules())
        policies = [(path, state._mp_policy) for path, state in states if state is not None]
        found[name] = [
            (path, (mp.param_dtype, mp.reduce_dtype, mp.output_dtype, mp.cast_forward_inputs)) for path, mp in policies
        ]
    net = polyamp_torch.fully_shard(made(Rows), CAST)
    states = ((path, fsdp2_state(part)) for path, part in net.named_modules())
    found["batch norm"] = [(path, state._mp_policy.param_dtype) for path, state in states if state is not None]
    aliased = CAST.replace(aliases={"layers/*": {"torch": "blocks/*"}})
    net = polyamp_torch.fully_shard(made(), aliased, modules="layers/*")
    found["alias"] = [(path, None) for path, part in net.named_modules() if fsdp2_state(part) is not None]
    return found


def said(function: Callable[[], Any]) -> str:
    try:
        function()
    except polyamp.PolyampError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


GIVEN: dict[str, tuple[MixedPrecisionPolicy, Policy]] = {
    "default": (MixedPrecisionPolicy(), AUTOCAST),
    "derived": (polyamp_torch.mixed_precision_policy(AUTOCAST), AUTOCAST),
    "cast, derived": (polyamp_torch.mixed_precision_policy(CAST), CAST),
    "cast, output": (MixedPrecisionPolicy(HALF, FULL, FULL), CAST),
    "another": (MixedPrecisionPolicy(torch.bfloat16, FULL), CAST),
    "half under autocast": (MixedPrecisionPolicy(HALF, FULL), AUTOCAST),
    "default under cast": (MixedPrecisionPolicy(), CAST),
    "reduced": (MixedPrecisionPolicy(reduce_dtype=HALF), AUTOCAST),
    "reduced as gathered": (MixedPrecisionPolicy(HALF), CAST),
    "returned": (MixedPrecisionPolicy(output_dtype=HALF), AUTOCAST),
    "override": (MixedPrecisionPolicy(HALF, FULL), CAST.replace(overrides={"0": "float32"})),
    "pure": (MixedPrecisionPolicy(), Policy("bfloat16")),
}


def refusals(rank: int) -> dict[str, str]:
    """What is said of each at `policy.autocast` and at `init`."""
    found = {}
    for name, (mp_policy, policy) in GIVEN.items():
        net = nn.Sequential(nn.Linear(2, 2)).to(torch.bfloat16 if name == "pure" else FULL)
        shard(net, mp_policy=mp_policy)
        found[name] = said(functools.partial(policy.autocast, net))
        recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
        assert found[name] == said(functools.partial(polyamp.init, net, recipe)), name
    net = nn.Sequential(nn.Linear(2, 2))
    polyamp_torch.fully_shard(net, "mixed_float16")
    found["twice"] = said(lambda: polyamp_torch.fully_shard(net, "mixed_float16"))
    return found


def everything(rank: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module"
        )  # of outputs that are views: nobody writes here
        return [parity(rank), sixteen(rank), units(rank), refusals(rank)]


@pytest.fixture(scope="module")
def of_two() -> list[Any]:
    first, second = ranks.run(everything, 2)
    assert first == second
    found: list[Any] = first
    return found


def test_s03_s04_s05_two_processes_have_the_numbers_of_one(of_two: list[Any]) -> None:
    assert of_two[0] == dict.fromkeys([f"{name}, {norm}" for name in POLICIES for norm in ("LayerNorm", "Rows")], True)


def test_s04_s09_sixteen_bits_on_the_way_are_other_numbers(of_two: list[Any]) -> None:
    found = of_two[1]
    assert found["apart"] > 1e-4  # of a norm's weights, which autocast leaves in float32
    half, full = found["means"]
    assert half == [float("inf"), 49984.0, 0.0]
    assert full[:2] == [50000.0, 50000.0]
    assert full[2] == pytest.approx(5e-8)


def test_s05_what_an_override_keeps_is_a_unit_of_its_own(of_two: list[Any]) -> None:
    found = of_two[2]
    plain = (None, FULL, None, False)
    assert found["autocast, overrides"] == [("", plain), ("blocks.0", plain), ("blocks.1", plain)]
    kept, block = (FULL, FULL, HALF, True), (HALF, FULL, None, False)
    assert found["cast, overrides"] == [
        ("", (HALF, FULL, FULL, True)),
        ("blocks.0", block),
        ("blocks.0.norm", kept),
        ("blocks.1", block),
        ("blocks.1.norm", kept),
        ("blocks.1.up", (torch.bfloat16, FULL, HALF, True)),
        ("norm", kept),
    ]
    assert found["batch norm"] == [("", HALF), ("blocks.0.norm", None), ("blocks.1.norm", None)]
    assert [path for path, _ in found["alias"]] == ["", "blocks.0", "blocks.1"]


def test_s20_a_policy_that_contradicts_is_refused_by_name(of_two: list[Any]) -> None:
    found = of_two[3]
    accepted = ("default", "derived", "cast, derived", "cast, output", "pure")
    assert {name for name, what in found.items() if what == "accepted"} == set(accepted)
    assert "must come to torch.float16. Received: torch.bfloat16." in found["another"]
    assert "'0/weight' was sharded" in found["half under autocast"]
    assert "Received: torch.float16. Shard with polyamp_torch.fully_shard" in found["half under autocast"]
    assert found["half under autocast"].endswith("write Policy(..., mode='cast').")
    assert "must come to torch.float16. Received: torch.float32." in found["default under cast"]
    for name in ("reduced", "reduced as gathered"):
        assert "reduced over the ranks) must come to torch.float32. Received: torch.float16." in found[name]
    assert "the model was sharded" in found["returned"]
    assert "output_dtype (the dtype of what it returns) must come to torch.float32" in found["returned"]
    assert (
        "param_dtype (the dtype in which it is gathered for the forward pass) must come to torch.float32"
        in (found["override"])
    )
    assert found["twice"].startswith("UnsupportedError: the model is sharded already")


def test_what_the_arguments_of_fully_shard_must_be() -> None:
    net = made()
    with pytest.raises(ArgumentError, match="mp_policy follows from the policy"):
        polyamp_torch.fully_shard(net, "mixed_float16", mp_policy=MixedPrecisionPolicy())
    with pytest.raises(PolicyError, match=r"modules: the glob 'block/\*' matches no module path. Nearest: 'blocks"):
        polyamp_torch.fully_shard(net, "mixed_float16", modules="block/*")
    with pytest.raises(PolicyError, match="no module of the class Conv1d"):
        polyamp_torch.fully_shard(net, "mixed_float16", modules=[nn.Conv1d])
    with pytest.raises(UnsupportedError, match=r"'blocks' is a ModuleList.* Write 'blocks/\*'"):
        polyamp_torch.fully_shard(net, "mixed_float16", modules="blocks")
    with pytest.raises(polyamp.ModelError, match="Received: function"):
        polyamp_torch.fully_shard(made, "mixed_float16")  # type: ignore[arg-type]  # what is no module
    attention = nn.Sequential(nn.MultiheadAttention(4, 1))
    kept = CAST.replace(overrides={"0/out_proj": "float32"})
    with pytest.raises(UnsupportedError, match=r"'0/out_proj' cannot be gathered by itself.* Name '0' instead"):
        polyamp_torch.fully_shard(attention, kept)
