"""Float32 islands as kernels of torch's dispatcher: who sees them, who does not, and that they equal the mode (S4)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp_torch.losses import TorchLosses
from polyamp_torch.precision.autocast import autocast
from polyamp_torch.precision.torch_only import compat, float32_islands
from polyamp_torch.precision.torch_only.float32_function_mode import IslandsMode
from polyamp_torch.precision.torch_only.float32_kernels import KernelIslands
from tests.backends.torch.precision.test_float32_islands import IMAGE, X, Y, table, tensors, values

BFLOAT16 = polyamp.Policy("mixed_bfloat16")
PLAIN = {"device_type": "cpu", "dtype": torch.bfloat16, "cache_enabled": False}


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Islands of a torch without the dispatcher's part."""
    monkeypatch.setattr(float32_islands, "uses_kernels", lambda: False)


class Dispatched(TorchDispatchMode):
    """Notes the operations that reach the devices' kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with autocast(BFLOAT16, "cpu"):
        return tensors(function(*args, **kwargs))


def count_calls(function: Callable[[], Any]) -> int:
    """Number of Python functions of polyamp that run during a call."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "polyamp_torch" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_s04_operations_that_are_not_listed_run_no_python() -> None:
    linear, convolution = nn.Linear(6, 3), nn.Conv2d(4, 2, 3)
    with autocast(BFLOAT16, "cpu"):
        free = {
            "relu": count_calls(lambda: torch.relu(X)),
            "gelu": count_calls(lambda: functional.gelu(X)),
            "x * y": count_calls(lambda: torch.mul(X, Y)),
            "linear": count_calls(lambda: linear(X)),
            "convolution": count_calls(lambda: convolution(IMAGE)),
            "view": count_calls(lambda: X.view(-1).unsqueeze(0)),
        }
        listed = count_calls(lambda: torch.exp(X))
        with TorchLosses().in_float32():
            in_a_loss = count_calls(lambda: torch.exp(X))
        assert count_calls(lambda: torch.exp(X)) == listed, "afterwards they act again"
    assert set(free.values()) == {0}
    assert listed > 0
    assert in_a_loss == 0, "losses compute in float32 by themselves"


def test_s04_a_plain_region_is_left_as_it_is_after_and_beside_one_of_polyamps() -> None:
    def outcomes() -> list[torch.Tensor]:
        with torch.autocast(**PLAIN):
            return [X.softmax(-1), X.sum(), X @ Y.T, X[0] @ X[0], functional.layer_norm(X, (6,))]

    before = outcomes()
    seen: list[list[torch.Tensor]] = []
    with autocast(BFLOAT16, "cpu"):
        thread = threading.Thread(target=lambda: seen.append(outcomes()))
        thread.start()
        thread.join()
        assert X.softmax(-1).dtype == torch.float32
    seen.append(outcomes())
    for after in seen:
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    with torch.autocast(**PLAIN):
        assert count_calls(lambda: X.softmax(-1)) == 0


@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning", "ignore:reduction. 'mean' divides:UserWarning")
def test_s04_the_mode_of_other_versions_gives_the_same(mode: None) -> None:
    with autocast(BFLOAT16, "cpu"):
        assert isinstance(float32_islands.current_islands("cpu"), IslandsMode)
    narrow = [
        name
        for name, function, (args, kwargs) in table()
        if torch.bfloat16 in [t.dtype for t in run(function, *args, **kwargs)]
    ]
    assert narrow == []


def script_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1).sum(-1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_s04_callers_that_are_not_python_are_seen() -> None:
    assert [t.dtype for t in run(torch.jit.script(script_softmax), X)] == [torch.float32]
    assert [t.dtype for t in run(torch.ops.aten.softmax.int, X, -1)] == [torch.float32]


FORK = """
def soft(x):
    return torch.softmax(x, -1)

def run(x):
    return torch.jit.wait(torch.jit.fork(soft, x))
"""


def test_s04_threads_that_torch_starts_inside_a_region_are_in_it() -> None:
    """So are the threads of autograd for other devices: they have the state of the thread that started them."""
    script: Any = torch.jit.CompilationUnit(FORK).run
    assert [t.dtype for t in run(script, X)] == [torch.float32]
    assert script(X).dtype == torch.bfloat16
    with torch.autocast(**PLAIN):
        assert script(X).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_s04_operators_that_take_functions_ignore_the_key() -> None:
    """torch dispatches them in Python, by lists of keys."""
    q = torch.randn(1, 1, 8, 4)

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)

    assert [t.dtype for t in run(torch.cond, torch.tensor(True), branch, torch.exp, (X,))] == [torch.float32]
    assert [t.dtype for t in run(flex_attention, q, q, q)] == [torch.bfloat16], "attention, a matrix product"


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([X, Y])),
    "jvp": lambda f: torch.func.jvp(f, (X,), (Y,)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).float().sum())(X),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).float().sum()))(torch.stack([X, Y])),
}
TRANSFORMED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "logsigmoid": functional.logsigmoid,  # torch.func runs another operation in its place
    "rms_norm": lambda x: functional.rms_norm(x, (6,)),
    "cov": torch.cov,  # a matrix product inside
    "svdvals": torch.linalg.svdvals,  # no kernel in 16 bits
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "bce": lambda x: functional.binary_cross_entropy_with_logits(x, Y, reduction="none"),
    "inner product": lambda x: x[0] @ x[1],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward-mode tables
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_s04_transforms_of_torch_func_come_after_the_islands(name: str, transform: str) -> None:
    """torch replaces an operation by others inside a transform; the islands see it first, as the mode does."""
    got = run(TRANSFORMS[transform], TRANSFORMED[name])
    uses, float32_islands.uses_kernels = float32_islands.uses_kernels, lambda: False
    try:
        want = run(TRANSFORMS[transform], TRANSFORMED[name])
    finally:
        float32_islands.uses_kernels = uses
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert "grad" in transform or {t.dtype for t in got} == {torch.float32}


def test_s04_a_python_function_is_known_by_its_code_in_a_transform_too() -> None:
    (got,) = run(torch.func.vmap(functional.softsign), X)
    assert torch.equal(got, functional.softsign(X.float()))


def test_s04_outside_of_a_region_transforms_are_torchs() -> None:
    run(torch.exp, X)  # the kernels are registered
    batch = torch.stack([X, Y])
    assert torch.func.vmap(lambda x: x.softmax(-1))(batch).dtype == torch.bfloat16
    with torch.autocast(**PLAIN):
        assert torch.func.vmap(lambda x: x.softmax(-1))(batch).dtype == torch.bfloat16


HIDING: dict[str, Callable[[], Any]] = {
    "attention": lambda: functional.scaled_dot_product_attention(X[None], X[None], X[None], torch.zeros(4, 4)),
    "average pooling": lambda: functional.adaptive_avg_pool2d(IMAGE, 1),
    "square": lambda: torch.square(X),
    "bilinear": lambda: functional.bilinear(X, Y, values(2, 6, 6)),
    "GRU": lambda: nn.GRU(6, 4)(X.float())[0],
    "LSTM cell": lambda: nn.LSTMCell(6, 4)(X.float())[0],
}


@pytest.mark.parametrize("name", HIDING)
def test_s04_what_an_operation_calls_in_cpp_is_hidden_where_s04_leaves_the_operation_alone(name: str) -> None:
    got = run(HIDING[name])
    torch.manual_seed(0)
    with torch.autocast(**PLAIN):
        want = tensors(HIDING[name]())
    torch.testing.assert_close(got, want, rtol=0, atol=0)


PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
CAUSAL = torch.ones(5, 5).triu(1).bool()
MASKS: dict[str, dict[str, torch.Tensor]] = {
    "none": {},
    "padding": {"src_key_padding_mask": PADDING},  # nested tensors inside
    "causal": {"mask": CAUSAL},
    "both": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
}


def without_fused_path(function: Callable[[], Any]) -> Any:
    torch.backends.mha.set_fastpath_enabled(False)  # type: ignore[no-untyped-call]  # torch's
    try:
        return function()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)  # type: ignore[no-untyped-call]  # torch's


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_s04_trap_the_fused_encoder_layer_of_inference(norm_first: bool, masks: str) -> None:
    """torch's fused layer normalizes in 16 bits, or fails over padding; here it equals the layer in training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation="gelu")
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        with torch.autocast(**PLAIN):
            if masks == "padding" and not norm_first:
                with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
                    encoder(x, **MASKS[masks])
            else:
                assert norm_first or encoder(x, **MASKS[masks]).dtype == torch.bfloat16, "plain torch"
        (got,) = run(encoder, x, **MASKS[masks])
        (want,) = without_fused_path(lambda: run(encoder, x, **MASKS[masks]))
    rows = ~PADDING if "src_key_padding_mask" in MASKS[masks] else torch.ones_like(PADDING)
    assert got.dtype == want.dtype
    assert torch.equal(got[rows], want[rows])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    ],
    ids=lambda options: " ".join(options) or "weights",
)
def test_s04_trap_the_fused_attention_of_inference(options: Any) -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    with torch.no_grad():
        got = run(lambda: attention(x, x, x, **options))
        want = without_fused_path(lambda: run(lambda: attention(x, x, x, **options)))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_s04_the_formulas_of_a_backward_inside_the_region_are_left_alone() -> None:
    """The gradient of a bias is a sum over the batch: autograd's own, as in torch."""
    linear = nn.Linear(6, 3)

    def loss() -> torch.Tensor:
        return functional.mse_loss(linear(X), torch.zeros(4, 3))

    with autocast(BFLOAT16, "cpu"):
        outside, within = loss(), loss()
        with Dispatched() as inside:
            within.backward()
    linear.zero_grad()
    with Dispatched() as want:
        outside.backward()
    assert "aten.sum.dim_IntList" in want.names
    assert inside.names == want.names, "no cast beside autograd's own"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_s04_a_compiled_function_inside_a_region_is_compiled_for_it(backend: str) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(lambda x: torch.softmax(x @ x.T, -1), fullgraph=True, backend=backend)
    for _ in range(2):
        assert run(compiled, X)[0].dtype == torch.float32
        with torch.autocast(**PLAIN):
            assert compiled(X).dtype == torch.bfloat16, "a graph of its own"
        assert compiled(X).dtype == torch.bfloat16
        assert torch.equal(run(compiled, X)[0], torch.softmax((X @ X.T).float(), -1))


def test_s04_a_library_with_a_device_of_its_own_keeps_its_dispatch_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BFLOAT16.autocast(nn.Linear(2, 2))
    assert repr(model).endswith(", float32_islands='kernels')")
    with autocast(BFLOAT16, "cpu"):
        assert isinstance(float32_islands.current_islands("cpu"), KernelIslands)
    assert compat._had_fallback.__wrapped__(), "the kernels' own by now: it is asked before they are registered"
    monkeypatch.setattr(compat, "_had_fallback", lambda: True)
    assert repr(model).endswith(", float32_islands='mode')"), "a device without a name of its own"
    monkeypatch.undo()
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    assert repr(model).endswith(", float32_islands='mode')")
    with autocast(BFLOAT16, "cpu"):
        assert isinstance(float32_islands.current_islands("cpu"), IslandsMode)
        assert X.softmax(-1).dtype == torch.float32


@pytest.mark.parametrize(
    "name", ["gumbel_softmax", "local_response_norm", "gaussian_nll_loss", "multilabel_soft_margin_loss"]
)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "mode"])
def test_s04_python_functions_of_torch_run_operation_by_operation(
    name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sensitive operations are float32, so is their result; what comes before is in the inputs' dtype."""
    monkeypatch.setattr(float32_islands, "uses_kernels", lambda: kernels)
    args: dict[str, tuple[Any, ...]] = {
        "gumbel_softmax": (X,),
        "local_response_norm": (IMAGE, 2),
        "gaussian_nll_loss": (X, Y, X),
    }
    given = args.get(name, (X, Y))
    (got,) = run(getattr(functional, name), *given)
    assert got.dtype == torch.float32
    if name != "gumbel_softmax":  # its noise is drawn in 16 bits
        want = getattr(functional, name)(*(a.float() if isinstance(a, torch.Tensor) else a for a in given))
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
