"""Faults that only a mixed policy shows, and faults of dropout, whose masks both sides share."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Policy, sgd
from tests.parity.faults.planted import Expected, Fault, forward
from tests.porting.faults.planting import Edit

BRAIN: Final = "mixed_bfloat16"
HALF: Final = "mixed_float16"
_MLP: Final = "return self.c_proj(self.gelu(self.c_fc(x)))"
_SDPA: Final = "functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
_BY_HAND: Final = (
    "with torch.autocast('cpu', enabled=torch.is_autocast_enabled('cpu')):\n"
    "            scores = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(torch.ones(t, t).triu(1) > 0, -float('inf'))\n"
    "            weights = torch.exp(scores - scores.amax(-1, keepdim=True))\n"
    "            y = weights / weights.sum(-1, keepdim=True) @ v"
)
_OUTSIDE: Final = (
    'x = self.c_fc(x)\n        with torch.autocast("cpu", enabled=False):\n'
    "            return self.c_proj(self.gelu(x.float()))"
)
_TORCH_REST: Final = "return x + self.mlp(self.ln_2(x))"
_NNX_REST: Final = "return x + self.linear2(nnx.gelu(self.linear1(self.layer_norm2(x))))"
_KERAS_REST: Final = "return x + self.ffn(self.layernorm2(x))"
_TORCH_DROP: Final = (
    (
        "return x + self.mlp(self.ln_2(x))\n\n\nclass GPT",
        "return x + functional.dropout(self.mlp(self.ln_2(x)), 0.25, self.training)\n\n\nclass GPT",
    ),
)
_NNX_DROP: Final = (
    (_NNX_REST, _NNX_REST.replace("x + self.linear2(", "x + self.drop(self.linear2(") + ")"),
    ("self.mha = nnx.MultiHeadAttention(num_heads=HEADS,", "self.drop = nnx.Dropout(0.25, rngs=rngs)\n        self.mha = nnx.MultiHeadAttention(num_heads=HEADS,"),
)  # fmt: skip
_KERAS_DROP: Final = (
    (_KERAS_REST, "return x + self.drop(self.ffn(self.layernorm2(x)))"),
    ("self.att = layers.MultiHeadAttention(num_heads=HEADS", "self.drop = layers.Dropout(0.25)\n        self.att = layers.MultiHeadAttention(num_heads=HEADS"),
)  # fmt: skip
DROPOUT: Final = {"torch": _TORCH_DROP, "nnx": _NNX_DROP, "keras": _KERAS_DROP}
"""Edits that give the GPT a dropout behind each MLP."""


def _policy(what: str, model: str, first: str, second: str, *places: str, policy: str = BRAIN, **changes: Any) -> Fault:
    """The second side's policy is another."""
    recipe = {"optimizer": sgd(0.1), "policy": policy}
    at = forward(model, *places, phase="policy")
    return Fault(
        "dtype", what, model, first, second, at, recipe=recipe, changes={"policy": Policy(policy, **changes)}, steps=1
    )


def _code(
    what: str, model: str, first: str, second: str, *places: str, edits: tuple[Edit, ...], policy: str = BRAIN
) -> Fault:
    """The second side's code is another, and only 16 bits show it."""
    at = forward(model, *places, phase="policy")
    recipe = {"optimizer": sgd(0.1), "policy": policy}
    return Fault("dtype", what, model, first, second, at, edits, recipe=recipe, steps=1)


def _dropout(what: str, first: str, second: str, *edits: Edit) -> Fault:
    at = Expected("forward", forward("gpt", "block@0", "norm 1@1").at, what="(in|out)put.*")
    return Fault("randomness", what, "gpt", first, second, at, edits, both=DROPOUT, randomness="shared", steps=1)


POLICIES: Final = (
    _policy("a layer in float32", "gpt", "torch", "nnx", "fc@0", overrides={"transformer_blocks/0/linear1": "float32"}),
    _policy("a layer in float32", "gpt", "keras", "torch", "proj@1", "mlp@1", overrides={"transformer/h/1/mlp/c_proj": "float32"}),
    _policy("a layer in float32", "vit", "nnx", "keras", "fc@0", overrides={"dense": "float32"}),
    _policy("a convolution in float32", "autoencoder", "torch", "nnx", "conv 1", overrides={"conv2": "float32"}, policy=HALF),
    _policy("a convolution in float32", "resnet", "torch", "torch", "conv 2@1", overrides={"layer2/0/conv2": "float32"}),
    _code("a layer that asks for the highest precision", "gpt", "torch", "nnx", "fc@0", edits=(("self.linear1 = nnx.Linear(WIDTH, 4 * WIDTH,", 'self.linear1 = nnx.Linear(WIDTH, 4 * WIDTH, precision="highest",'),)),
    _code("a block outside of autocast", "gpt", "nnx", "torch", "proj@0", "gelu@0", "mlp@0", edits=((_MLP, _OUTSIDE),)),
    _policy("softmax in 16 bits", "gpt", "nnx", "nnx", "attention@0", op_rules={"exp": "compute"}),
    Fault("dtype", "softmax in 16 bits", "gpt", "torch", "torch", forward("gpt", "attention@0", phase="policy"), recipe={"optimizer": sgd(0.1), "policy": BRAIN}, edits=(("enabled=torch.is_autocast_enabled('cpu')", "enabled=False"),), both={"torch": ((f"y = {_SDPA}", _BY_HAND),)}, steps=1),
    _code("a factor that overflows", "gpt", "nnx", "torch", "mlp@0", "block@0", "norm 1@1", "proj@0", edits=((_MLP, "return self.c_proj(self.gelu(self.c_fc(x))) * 2.0**17 * 2.0**-17"),), policy=HALF),
    _code("a sum before its division", "vit", "keras", "torch", "block@0", "norm 2@0", edits=(("need_weights=False)[0]", "need_weights=False)[0].mul(2.0**17).mul(2.0**-17)"),), policy=HALF),
)  # fmt: skip
MASKS: Final = (
    _dropout("mask without 1 / (1 - rate)", "torch", "torch", ("functional.dropout(self.mlp(self.ln_2(x)), 0.25, self.training)", "0.75 * functional.dropout(self.mlp(self.ln_2(x)), 0.25, self.training)")),
    _dropout("mask without 1 / (1 - rate)", "torch", "nnx", ("self.drop(self.linear2", "0.75 * self.drop(self.linear2")),
    _dropout("mask without 1 / (1 - rate)", "nnx", "keras", ("self.drop(self.ffn", "0.75 * self.drop(self.ffn")),
    _dropout("other rate", "keras", "torch", ("functional.dropout(self.mlp(self.ln_2(x)), 0.25,", "functional.dropout(self.mlp(self.ln_2(x)), 0.5,")),
    _dropout("no dropout", "keras", "nnx", ("self.drop(self.linear2(nnx.gelu(self.linear1(self.layer_norm2(x)))))", "self.linear2(nnx.gelu(self.linear1(self.layer_norm2(x))))")),
)  # fmt: skip
FAULTS: Final = (*POLICIES, *MASKS)
"""All of them."""
