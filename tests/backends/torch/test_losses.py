"""torch: the losses are torch's own (S24), in values and gradients, eager, as on an accelerator, and compiled."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp
from polyamp.errors import LossError
from polyamp.reference import Tensor
from polyamp.reference import tensor as ops
from polyamp_torch.losses import TorchLosses

LOSSES = {
    "mean_squared_error": functional.mse_loss,
    "sigmoid_cross_entropy": functional.binary_cross_entropy_with_logits,
    "huber": functional.huber_loss,
}


@pytest.fixture(params=["host", "accelerator"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Labels whose values are on the host, and the way that accelerators take, which looks at none."""
    if request.param == "accelerator":
        monkeypatch.setattr(TorchLosses, "on_host", lambda self, labels: None)
    return str(request.param)


def case(kind: str, ignored: int | None, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(*shape, 5, generator=generator) * 3.0
    if kind == "probabilities":
        return logits, torch.softmax(torch.randn(*shape, 5, generator=generator), -1)
    labels = torch.randint(0, 5, shape, generator=generator)
    if ignored is not None and shape:
        labels.reshape(-1)[::3] = ignored
    return logits, labels


def torchs(logits: torch.Tensor, labels: torch.Tensor, *, ignored: int | None, reduction: str, **options: Any) -> Any:
    """torch's own loss; its classes are the second axis."""
    whole = logits.float()
    if labels.is_floating_point():
        flat = functional.cross_entropy(whole.reshape(-1, 5), labels.reshape(-1, 5), reduction=reduction, **options)
    else:
        known = {} if ignored is None else {"ignore_index": ignored}
        flat = functional.cross_entropy(
            whole.reshape(-1, 5), labels.reshape(-1), reduction=reduction, **known, **options
        )
    return flat.reshape(logits.shape[:-1]) if reduction == "none" else flat


def gradient(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(1.0, 2.0, loss.numel()).reshape(loss.shape)
    (found,) = torch.autograd.grad((loss * weights).sum(), logits)
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_s24_cross_entropy_is_torchs(dtype: torch.dtype, kind: str, reduction: Any, place: str) -> None:
    for ignored, smoothing, weighted, shape in itertools.product(
        [None, -100, 2], [0.0, 0.1, 1.0], [False, True], [(7,), (2, 3, 2), ()]
    ):
        if kind == "probabilities" and ignored is not None:
            continue
        logits, labels = case(kind, ignored, shape)
        logits = logits.to(dtype).requires_grad_()
        weights = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0]) if weighted else None
        got = polyamp.losses.softmax_cross_entropy(
            logits,
            labels,
            ignore_index=ignored,
            label_smoothing=smoothing,
            class_weights=weights,
            reduction=reduction,
        )
        want = torchs(logits, labels, ignored=ignored, reduction=reduction, label_smoothing=smoothing, weight=weights)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6, equal_nan=True)
        ours, theirs = gradient(got, logits), gradient(want, logits)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=float(torch.finfo(dtype).eps) * 8, atol=1e-6, equal_nan=True)


def test_s24_no_row_that_counts_is_torchs_nan(place: str) -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    labels = torch.full((3,), -100)
    for smoothing in (0.0, 0.1):
        got = polyamp.losses.softmax_cross_entropy(logits, labels, ignore_index=-100, label_smoothing=smoothing)
        want = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        assert got.isnan()
        assert want.isnan()
        found = gradient(got, logits)
        assert torch.equal(found, gradient(want, logits))
        assert not found.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_s24_weights_of_the_other_losses_are_torchs(name: str, reduction: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator, requires_grad=True)
    z, weights = torch.rand(4, 3, generator=generator), torch.rand(4, 3, generator=generator)
    for factors in (None, weights, weights[0]):
        got = getattr(polyamp.losses, name)(x, z, weights=factors, reduction=reduction)
        whole = None if factors is None else factors.expand(4, 3)
        want = LOSSES[name](x, z, weight=whole, reduction=reduction)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(gradient(got, x), gradient(want, x), rtol=2e-6, atol=1e-7)


def test_s24_the_reference_is_torchs_too() -> None:
    """TensorFlow and JAX are compared with NumPy's formulas in their own processes; here those are with torch's."""
    for kind, ignored, smoothing, reduction in itertools.product(
        ["labels", "probabilities"], [None, 2], [0.0, 0.1], ["mean", "sum"]
    ):
        if kind == "probabilities" and ignored is not None:
            continue
        logits, labels = case(kind, ignored, (7,))
        weights = np.array([0.5, 2.0, 1.0, 0.0, 3.0], "f4")
        x = Tensor(logits.numpy())
        got = polyamp.losses.softmax_cross_entropy(
            x,
            labels.numpy(),
            ignore_index=ignored,
            label_smoothing=smoothing,
            class_weights=weights,
            reduction=reduction,  # type: ignore[arg-type]  # one of the literals
        )
        logits.requires_grad_()
        want = torchs(
            logits,
            labels,
            ignored=ignored,
            reduction=reduction,
            label_smoothing=smoothing,
            weight=torch.from_numpy(weights),
        )
        np.testing.assert_allclose(float(got), want.item(), rtol=2e-6)
        (own,) = ops.gradients(got, [x])
        np.testing.assert_allclose(own, gradient(want, logits), rtol=2e-5, atol=1e-6)


def test_s24_compiled_and_mapped_labels_outside_of_the_classes_are_nan() -> None:
    """A graph has no host to look on: no other class, no crash, and torch's values for the rest."""

    def rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return polyamp.losses.softmax_cross_entropy(logits, labels, ignore_index=-100, reduction="none")

    logits, labels = torch.randn(5, 4), torch.tensor([0, -100, 4, -1, 3])
    want = functional.cross_entropy(logits, torch.tensor([0, -100, -100, -100, 3]), reduction="none")
    want[2:4] = torch.nan
    compiled = torch.compile(rows, fullgraph=True, backend="aot_eager")
    mapped = torch.func.vmap(lambda x, y: rows(x, y))
    for found in (compiled(logits, labels), mapped(logits[None], labels[None])[0]):
        torch.testing.assert_close(found, want, equal_nan=True)
    with pytest.raises(LossError, match=r"Received: 4 at index \(2,\); of 5 labels 2 are outside"):
        rows(logits, labels)


def test_s24_a_compiled_step_gives_nan_and_skips() -> None:
    model = torch.nn.Linear(3, 4)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler())
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(
        lambda m, b: polyamp.losses.softmax_cross_entropy(m(b[0]), b[1]), recipe, compile={"backend": "aot_eager"}
    )
    x = torch.randn(6, 3)
    state, result = step(state, (x, torch.tensor([0, 1, 2, 3, 0, 1])))
    before = model.weight.detach().clone()
    assert not result.skipped
    state, result = step(state, (x, torch.tensor([0, 1, 2, 4, 0, 1])))
    assert result.loss.isnan()
    assert result.skipped
    assert torch.equal(model.weight, before)


def test_s24_no_label_is_taken_for_torchs_own_default() -> None:
    with pytest.raises(LossError, match=r"Received: -100 at index \(1,\).*ignore_index=-100"):
        polyamp.losses.softmax_cross_entropy(torch.zeros(2, 3), torch.tensor([0, -100]))


FIRST = """
import torch, polyamp

def loss(model, x, y):
    hidden = model(x)
    return polyamp.losses.softmax_cross_entropy(hidden, y) + polyamp.losses.mean_squared_error(hidden, x) \\
        + polyamp.losses.regularization(model)

model = torch.nn.Linear(2, 2)
x, y = torch.ones(3, 2), torch.tensor([0, 1, 1])
found = torch.compile(loss, fullgraph=True, backend="eager")(model, x, y)
print(abs(found.item() - loss(model, x, y).item()) < 1e-6)
"""


def test_s24_losses_compile_whole_as_the_first_thing_that_a_program_does_with_polyamp() -> None:
    """The search for the backend, which cannot be traced, happens while the user's function is compiled."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr[-2000:]


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return found


def head(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (2, 32, 4), a weight (500, 4) of which both are smaller than a chunk's logits, and tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 32, 4, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(500, 4, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, 500, (2, 32), generator=generator)


@pytest.mark.parametrize("chunks", [1, 8])
def test_s24_no_tensor_holds_more_than_a_chunks_logits(chunks: int) -> None:
    hidden, weight, tokens = head()
    with LargestTensor() as largest:
        polyamp.losses.chunked_causal_language_model(hidden, weight, tokens, chunks=chunks).backward()
    assert largest.elements == {1: 2 * 31 * 500, 8: 2 * 4 * 500}[chunks]


def test_s24_chunks_in_a_region_compute_in_its_dtype_and_sum_gradients_in_float32() -> None:
    """autocast's cache of casts would hand all chunks one 16-bit weight, whose gradient is a sum in 16 bits."""
    _, weight, _ = head()
    hidden, tokens = torch.full((64, 4), 1.0, requires_grad=True), torch.zeros(64, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        loss = polyamp.losses.chunked_causal_language_model(
            hidden, weight, tokens, chunks=64, shift=False, reduction="sum"
        )
        loss.backward()
    logits = (hidden.bfloat16() @ weight.bfloat16().T).float()
    expected = polyamp.losses.causal_language_model(logits, tokens, shift=False, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0.0)
    assert weight.grad is not None
    one = (torch.softmax(logits[0], -1) - functional.one_hot(tokens[0], 500)).bfloat16().float()
    torch.testing.assert_close(weight.grad[:, 0], 64.0 * one, rtol=1e-6, atol=0.0)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_s24_compiled_chunks_are_those_of_eager_code(dtype: str | None) -> None:
    hidden, weight, tokens = head()

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        return polyamp.losses.chunked_causal_language_model(hidden, weight, tokens, chunks=3, dtype=dtype, z_loss=0.1)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(each(hidden, weight), (hidden, weight)) for each in (loss, compiled)]
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(compiled(hidden, weight), loss(hidden, weight), rtol=1e-6, atol=0.0)


def test_s24_causal_language_model_is_transformers_own() -> None:
    """`ForCausalLMLoss`, for which -100 is no argument but the default."""
    from transformers.loss import loss_utils

    logits, tokens = (
        torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(0)),
        torch.arange(14).reshape(2, 7) % 11,
    )
    tokens[0, 3:5] = -100
    expected = loss_utils.ForCausalLMLoss(logits, tokens, vocab_size=11)
    torch.testing.assert_close(polyamp.losses.causal_language_model(logits, tokens, ignore_index=-100), expected)
    with pytest.raises(LossError, match=r"Received: -100 at index \(0, 2\).* name their label: ignore_index=-100"):
        polyamp.losses.causal_language_model(logits, tokens)


def test_s24_plain_formulas_of_focal_loss_and_divergence_are_nan() -> None:
    """Where polyamp's are not: torchvision's formula with gamma below 1, and torch's `kl_div` of classes ruled out."""
    x, t = torch.tensor([20.0], requires_grad=True), torch.ones(1)
    p = torch.sigmoid(x)
    plain = functional.binary_cross_entropy_with_logits(x, t) * (1.0 - (p * t + (1.0 - p) * (1.0 - t))) ** 0.5
    for loss, is_nan in ((plain.sum(), True), (polyamp.losses.sigmoid_focal(x, t, gamma=0.5), False)):
        (found,) = torch.autograd.grad(loss, x)
        assert bool(torch.isnan(found)) is is_nan
    logits, target = torch.tensor([[0.0, 1.0, -torch.inf]]), torch.tensor([[1.0, 0.0, -torch.inf]])
    logs = functional.log_softmax(logits, -1), functional.log_softmax(target, -1)
    assert torch.isnan(functional.kl_div(*logs, reduction="batchmean", log_target=True))
    expected = functional.kl_div(logs[0][:, :2], logs[1][:, :2], reduction="batchmean", log_target=True)
    torch.testing.assert_close(polyamp.losses.kl_divergence(logits, target), expected)


def test_s24_ctc_is_torchs() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 12, 7, requires_grad=True)
    labels = torch.randint(1, 7, (5, 4))
    steps, widths = torch.tensor([12, 11, 10, 9, 12]), torch.tensor([4, 3, 2, 0, 4])
    for zero in (False, True):
        expected = torch.nn.functional.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), labels, steps, widths, zero_infinity=zero
        )
        found = polyamp.losses.ctc(logits, labels, logit_lengths=steps, label_lengths=widths, zero_infinity=zero)
        torch.testing.assert_close(found, expected)
        (one,), (other,) = (torch.autograd.grad(loss, logits) for loss in (found, expected))
        torch.testing.assert_close(one, other)


def test_s24_impossible_labels_of_the_host_are_refused_where_a_tensor_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As beside logits on a GPU."""
    monkeypatch.setattr(TorchLosses, "on_host", lambda _, labels: labels if isinstance(labels, np.ndarray) else None)
    with pytest.raises(LossError, match=r"labels from 0 to 2 other than blank=0\. Received: -7 at index \(1, 1\)"):
        polyamp.losses.ctc(torch.zeros(2, 5, 3), np.array([[1, 2], [2, -7]]))
