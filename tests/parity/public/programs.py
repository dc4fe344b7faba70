"""Three programs that are not of this project: transformers' GPT-2 and ResNet beside models in flax's own layers, and
an LSTM tagger as torch's tutorials have it. Each with a loss in its framework's words, and mistakes that people make.

Run by `__main__`, with torch and JAX in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from flax import linen
from torch import nn
from torch.nn import functional as F

import polyamp
from tests.porting.public.linen_models import GPT2, ResNet

Batch = dict[str, Any]
VOCABULARY, WORDS, CLASSES, TAGS = 61, 12, 10, 5


class Program(NamedTuple):
    """Two sides of a comparison.

    Attributes:
        torch, flax: the models.
        batch: number of a step -> its batch, as torch has it.
        losses: of torch, of flax.
        inputs: what the flax model takes.
        names: as for `polyamp.port`.
        mistakes: name -> what is given instead: another `torch`, other `losses` or other `optimizers`.
    """

    torch: nn.Module
    flax: tuple[linen.Module, Any]
    batch: Callable[[int], Any]
    losses: tuple[Callable[..., Any], Callable[..., Any]]
    inputs: Any
    names: Mapping[str, str]
    mistakes: Mapping[str, Mapping[str, Any]]


def adamw(groups: Any = ()) -> Any:
    """What all of them train with."""
    return polyamp.adamw(1e-3, weight_decay=0.1, groups=groups)


def variables(module: linen.Module, given: Any) -> tuple[linen.Module, Any]:
    """A flax model with values: those of its variables' shapes; `compare` gives it torch's."""
    return module, jax.tree.map(
        lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(module.init, jax.random.key(0), given)
    )


def gpt2() -> Program:
    """Next-token training, with padding at the end of two rows; transformers shifts the labels itself."""

    def source(**changed: Any) -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=1, n_head=4, use_cache=False,
            bos_token_id=0, eos_token_id=0, initializer_range=0.2, loss_type="ForCausalLM", **changed,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)

    def batch(step: int) -> Batch:
        ids = np.random.default_rng(step).integers(0, VOCABULARY, (4, WORDS)).astype(np.int32)
        seen = np.arange(WORDS) < np.array([[WORDS], [9], [WORDS], [6]])
        return {"ids": ids, "seen": seen.astype(np.int32)}

    def torch_loss(model: Any, given: Batch, mask: Any = None) -> Any:
        labels = given["ids"].long().masked_fill(given["seen"] == 0, -100)
        return model(input_ids=given["ids"], attention_mask=mask, labels=labels).loss

    def flax_loss(model: Any, given: Batch, shift: int = 1) -> Any:
        logits = model(given["ids"])[:, : WORDS - shift].astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, given["ids"][:, shift:])
        return jnp.average(each, weights=given["seen"][:, shift:])

    target = GPT2(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=1, n_head=4)
    return Program(
        source(),
        variables(target, batch(0)["ids"]),
        batch,
        (torch_loss, flax_loss),
        batch(0)["ids"],
        {},
        {
            "gelu": {"torch": source(activation_function="gelu")},
            "epsilon": {"torch": source(layer_norm_epsilon=1e-6)},
            "a mask on one side": {"losses": (lambda model, given: torch_loss(model, given, given["seen"]), flax_loss)},
            "labels not shifted": {"losses": (torch_loss, lambda model, given: flax_loss(model, given, 0))},
        },
    )


def resnet() -> Program:
    """Classification."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[32], depths=[1], num_labels=CLASSES)

    def batch(step: int) -> Any:
        rng = np.random.default_rng(step)
        images = rng.standard_normal((8, 3, 32, 32)).astype(np.float32)
        labels = rng.integers(0, CLASSES, 8).astype(np.int32)
        ours, theirs = ({"x": x, "y": labels} for x in (images, images.transpose(0, 2, 3, 1)))
        return polyamp.porting.Batch(ours, theirs)

    def torch_loss(model: Any, given: Batch) -> Any:
        return F.cross_entropy(model(given["x"]).logits.float(), given["y"].long())

    def flax_loss(model: Any, given: Batch) -> Any:
        logits = model(given["x"], train=True).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, given["y"]).mean()

    target = ResNet(stage_sizes=[1], num_filters=8, num_classes=CLASSES)
    undecayed = adamw([polyamp.Group(kind=["bias", "norm"], weight_decay=0.0)])
    return Program(
        transformers.ResNetForImageClassification(config),
        variables(target, batch(0).target["x"]),
        batch,
        (torch_loss, flax_loss),
        batch(0).target["x"],
        {"shortcut/normalization": "shortcut/norm_proj"},
        {"decay on norms": {"optimizers": (undecayed, adamw())}},
    )


class LSTMTagger(nn.Module):
    """An embedding, an LSTM, a linear layer, the logarithm of a softmax: "Sequence models and long short-term memory
    networks" of torch's tutorials is made of these."""

    def __init__(self, words: int, width: int, hidden: int, tags: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.hidden2tag = nn.Linear(hidden, tags)

    def forward(self, sentences: Any) -> Any:
        return F.log_softmax(self.hidden2tag(self.lstm(self.word_embeddings(sentences))[0]), dim=-1)


class FlaxTagger(linen.Module):
    """The same in flax."""

    @linen.compact
    def __call__(self, sentences: Any) -> Any:
        x = linen.Embed(VOCABULARY, 12, name="word_embeddings")(sentences)
        x = linen.RNN(linen.OptimizedLSTMCell(16), name="lstm")(x)
        return linen.log_softmax(linen.Dense(TAGS, name="hidden2tag")(x))


def tagger() -> Program:
    """A tag for each word; a row ends with padding, which has the tag -100."""
    torch.manual_seed(0)

    def batch(step: int) -> Batch:
        rng = np.random.default_rng(step)
        tags = rng.integers(0, TAGS, (6, WORDS)).astype(np.int32)
        tags[:3, 8:] = -100
        return {"x": rng.integers(0, VOCABULARY, (6, WORDS)).astype(np.int32), "y": tags}

    def torch_loss(model: Any, given: Batch) -> Any:
        scores = model(given["x"]).float()
        return F.nll_loss(scores.reshape(-1, TAGS), given["y"].long().reshape(-1))

    def flax_loss(model: Any, given: Batch, *, padded: bool = False) -> Any:
        scores = model(given["x"]).astype(jnp.float32)
        seen = given["y"] >= 0
        each = -jnp.take_along_axis(scores, jnp.maximum(given["y"], 0)[..., None], axis=-1)[..., 0]
        return jnp.mean(each * seen) if padded else jnp.sum(each * seen) / jnp.sum(seen)

    return Program(
        LSTMTagger(VOCABULARY, 12, 16, TAGS),
        variables(FlaxTagger(), batch(0)["x"]),
        batch,
        (torch_loss, flax_loss),
        batch(0)["x"],
        {},
        {"mean over padding": {"losses": (torch_loss, lambda model, given: flax_loss(model, given, padded=True))}},
    )


PROGRAMS: Mapping[str, Callable[[], Program]] = {"GPT-2": gpt2, "ResNet": resnet, "LSTM tagger": tagger}
