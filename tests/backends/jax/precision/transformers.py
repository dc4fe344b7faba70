"""One small transformer in flax linen, flax nnx, equinox and haiku, with the same weights. Used by the autocast tests.

Each is written as its library would have it, from the library's own linear layers and embedding. The normalisation is
the library's own, or `normalize` in a module of the library (`own_norm=False`): the libraries' own compute one formula
by different operations. Attention, softmax and gelu are written once, below, on arrays with any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

VOCABULARY, WIDTH, HEADS, HIDDEN, BLOCKS, LENGTH = 11, 8, 2, 16, 2, 5
EPSILON = 1e-6


class Library(NamedTuple):
    """Builds the model in one library.

    Attributes:
        build: makes the model; `own_norm` for the library's own layer normalisation.
        path: the library's path of a module -> the common one ("blocks/0/attention/query").
        single: it takes one example, not a batch.
    """

    build: Callable[..., Any]
    path: Callable[[str], str]
    single: bool = False


def weights(seed: int = 0) -> dict[str, Any]:
    """Common path of a module -> its arrays: {"w", "b"}, {"scale", "offset"} or {"table"}."""
    rng = np.random.default_rng(seed)

    def linear(ins: int, outs: int) -> dict[str, Any]:
        return {
            "w": (rng.normal(size=(ins, outs)) / ins**0.5).astype("f4"),
            "b": (rng.normal(size=outs) / 8).astype("f4"),
        }

    def norm() -> dict[str, Any]:
        return {"scale": rng.uniform(0.5, 1.5, WIDTH).astype("f4"), "offset": (rng.normal(size=WIDTH) / 8).astype("f4")}

    made: dict[str, Any] = {"embed": {"table": rng.normal(size=(VOCABULARY, WIDTH)).astype("f4")}}
    for n in range(BLOCKS):
        made[f"blocks/{n}/norm1"] = norm()
        for name in ("query", "key", "value", "out"):
            made[f"blocks/{n}/attention/{name}"] = linear(WIDTH, WIDTH)
        made[f"blocks/{n}/norm2"] = norm()
        made[f"blocks/{n}/mlp/up"] = linear(WIDTH, HIDDEN)
        made[f"blocks/{n}/mlp/down"] = linear(HIDDEN, WIDTH)
    return {**made, "norm": norm(), "head": linear(WIDTH, VOCABULARY)}


def tokens(size: int = 4) -> Any:
    """A batch of token sequences, shape (size, LENGTH)."""
    return jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (size, LENGTH)))


def normalize(x: Any, scale: Any, offset: Any) -> Any:
    """Layer normalisation over the last axis."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * scale + offset


def attend(query: Any, key: Any, value: Any) -> Any:
    """Causal attention of `HEADS` heads on arrays of shape (..., LENGTH, WIDTH)."""
    query, key, value = (x.reshape(*x.shape[:-1], HEADS, WIDTH // HEADS) for x in (query, key, value))
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key) / (WIDTH // HEADS) ** 0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    out = jnp.einsum("...hqk,...khd->...qhd", shares, value)
    return out.reshape(*out.shape[:-2], WIDTH)


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        scale = self.param("scale", linen.initializers.ones, (WIDTH,))
        return normalize(x, scale, self.param("offset", linen.initializers.zeros, (WIDTH,)))


def _linen_norm(own: bool, name: str) -> Any:
    return linen.LayerNorm(EPSILON, use_fast_variance=False, name=name) if own else LinenNorm(name=name)


class LinenAttention(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        parts = [linen.Dense(WIDTH, name=name)(x) for name in ("query", "key", "value")]
        return linen.Dense(WIDTH, name="out")(attend(*parts))


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(WIDTH, name="down")(jax.nn.gelu(linen.Dense(HIDDEN, name="up")(x)))


class LinenBlock(linen.Module):
    own_norm: bool
    dropout: float

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x + LinenAttention(name="attention")(_linen_norm(self.own_norm, "norm1")(x))
        mixed = LinenMlp(name="mlp")(_linen_norm(self.own_norm, "norm2")(x))
        if self.dropout:
            mixed = linen.Dropout(self.dropout, deterministic=False)(mixed)
        return x + mixed


class LinenTransformer(linen.Module):
    own_norm: bool = False
    dropout: float = 0.0

    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        x = linen.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for n in range(BLOCKS):
            x = LinenBlock(self.own_norm, self.dropout, name=f"block_{n}")(x)
        return linen.Dense(VOCABULARY, name="head")(_linen_norm(self.own_norm, "norm")(x))


def build_linen(*, own_norm: bool = False, dropout: float = 0.0) -> Any:
    """`(module, variables)`."""
    offset = "bias" if own_norm else "offset"
    params: dict[str, Any] = {}
    for path, arrays in weights().items():
        inner = params
        for segment in path.replace("blocks/", "block_").split("/"):
            inner = inner.setdefault(segment, {})
        names = {"w": "kernel", "b": "bias", "table": "embedding", "scale": "scale", "offset": offset}
        inner.update({names[name]: jnp.asarray(array) for name, array in arrays.items()})
    return LinenTransformer(own_norm, dropout), {"params": params}


class NnxNorm(nnx.Module):
    def __init__(self) -> None:
        self.scale, self.offset = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x: Any) -> Any:
        return normalize(x, self.scale[...], self.offset[...])


def _nnx_norm(own: bool, rngs: nnx.Rngs) -> Any:
    return nnx.LayerNorm(WIDTH, epsilon=EPSILON, use_fast_variance=False, rngs=rngs) if own else NnxNorm()


class NnxAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query, self.key, self.value, self.out = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))

    def __call__(self, x: Any) -> Any:
        return self.out(attend(self.query(x), self.key(x), self.value(x)))


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.gelu(self.up(x)))


class NnxBlock(nnx.Module):
    def __init__(self, own_norm: bool, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = _nnx_norm(own_norm, rngs), _nnx_norm(own_norm, rngs)
        self.attention, self.mlp = NnxAttention(rngs), NnxMlp(rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


_List = getattr(nnx, "List", list)  # until flax 0.11 a plain list holds modules


class NnxTransformer(nnx.Module):
    def __init__(self, own_norm: bool, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = _List([NnxBlock(own_norm, rngs) for _ in range(BLOCKS)])
        self.norm, self.head = _nnx_norm(own_norm, rngs), nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _modules(model: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each module of an nnx or equinox model that owns arrays, with its weights."""
    for path, arrays in weights().items():
        module = model
        for segment in path.split("/"):
            module = module[int(segment)] if segment.isdigit() else getattr(module, segment)
        yield module, {name: jnp.asarray(array) for name, array in arrays.items()}


def build_nnx(*, own_norm: bool = False) -> Any:
    """The module."""
    model = NnxTransformer(own_norm, nnx.Rngs(0))
    names = {"w": "kernel", "b": "bias", "table": "embedding", "scale": "scale"}
    for module, arrays in _modules(model):
        for name, array in arrays.items():
            own = names.get(name) or ("bias" if own_norm else "offset")
            setattr(module, own, nnx.Param(array))
    return model


class EquinoxNorm(eqx.Module):
    scale: Any
    offset: Any

    def __call__(self, x: Any) -> Any:
        return normalize(x, self.scale, self.offset)


def _equinox_norm(own: bool) -> Any:
    return eqx.nn.LayerNorm(WIDTH, EPSILON) if own else EquinoxNorm(jnp.ones(WIDTH), jnp.zeros(WIDTH))


class EquinoxAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.out)(attend(*(jax.vmap(part)(x) for part in (self.query, self.key, self.value))))


class EquinoxMlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class EquinoxBlock(eqx.Module):
    norm1: Any
    attention: EquinoxAttention
    norm2: Any
    mlp: EquinoxMlp

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(jax.vmap(self.norm1)(x))
        return x + self.mlp(jax.vmap(self.norm2)(x))


class EquinoxTransformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[EquinoxBlock]
    norm: Any
    head: eqx.nn.Linear

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def build_equinox(*, own_norm: bool = False) -> Any:
    """The module, which takes one sequence."""
    key = jax.random.key(0)

    def linear(ins: int, outs: int) -> Any:
        return eqx.nn.Linear(ins, outs, key=key)

    def block() -> EquinoxBlock:
        attention = EquinoxAttention(*(linear(WIDTH, WIDTH) for _ in range(4)))
        mlp = EquinoxMlp(linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH))
        return EquinoxBlock(_equinox_norm(own_norm), attention, _equinox_norm(own_norm), mlp)

    blocks = [block() for _ in range(BLOCKS)]
    embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key)
    model = EquinoxTransformer(embed, blocks, _equinox_norm(own_norm), linear(WIDTH, VOCABULARY))
    own = {"scale": "weight", "offset": "bias"} if own_norm else {"scale": "scale", "offset": "offset"}
    names = {"w": "weight", "b": "bias", "table": "weight", **own}

    def owned(model: Any) -> list[Any]:
        return [getattr(module, names[name]) for module, arrays in _modules(model) for name in arrays]

    values = [array.T if name == "w" else array for _, arrays in _modules(model) for name, array in arrays.items()]
    return eqx.tree_at(owned, model, values)


class HaikuNorm(hk.Module):
    def __call__(self, x: Any) -> Any:
        scale = hk.get_parameter("scale", (WIDTH,), init=jnp.ones)
        return normalize(x, scale, hk.get_parameter("offset", (WIDTH,), init=jnp.zeros))


def _haiku_norm(own: bool, name: str) -> Any:
    return hk.LayerNorm(-1, True, True, EPSILON, name=name) if own else HaikuNorm(name=name)


class HaikuAttention(hk.Module):
    def __call__(self, x: Any) -> Any:
        parts = [hk.Linear(WIDTH, name=name)(x) for name in ("query", "key", "value")]
        return hk.Linear(WIDTH, name="out")(attend(*parts))


class HaikuMlp(hk.Module):
    def __call__(self, x: Any) -> Any:
        return hk.Linear(WIDTH, name="down")(jax.nn.gelu(hk.Linear(HIDDEN, name="up")(x)))


class HaikuBlock(hk.Module):
    def __init__(self, own_norm: bool, name: str) -> None:
        super().__init__(name=name)
        self.own_norm = own_norm

    def __call__(self, x: Any) -> Any:
        x = x + HaikuAttention(name="attention")(_haiku_norm(self.own_norm, "norm1")(x))
        return x + HaikuMlp(name="mlp")(_haiku_norm(self.own_norm, "norm2")(x))


def build_haiku(*, own_norm: bool = False) -> Any:
    """`(transformed, params)`."""

    def forward(tokens: Any) -> Any:
        x = hk.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        for n in range(BLOCKS):
            x = HaikuBlock(own_norm, name=f"block_{n}")(x)
        return hk.Linear(VOCABULARY, name="head")(_haiku_norm(own_norm, "norm")(x))

    params = {
        path.replace("blocks/", "block_"): {
            "embeddings" if name == "table" else name: jnp.asarray(array) for name, array in arrays.items()
        }
        for path, arrays in weights().items()
    }
    return hk.transform(forward), params


def _numbered(path: str) -> str:
    return path.replace("block_", "blocks/")


LIBRARIES: dict[str, Library] = {
    "linen": Library(build_linen, _numbered),
    "nnx": Library(build_nnx, str),
    "equinox": Library(build_equinox, str, single=True),
    "haiku": Library(build_haiku, _numbered),
}
