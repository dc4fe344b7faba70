"""Faults of part D in the code of the U-Net and of the convolutional net."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF
from tests.parity.held_out.part_d.variants import carried, fault

_U: Final = "unet"
_C: Final = "convnet"
UNET: Final = (
    fault(_U, "torch nnx", "formula", "longest period of 1000 for 10000", "time1", ("(9.210340371976184 / (WIDTH // 2))", "(6.907755278982137 / (WIDTH // 2))")),
    fault(_U, "torch torch", "formula", "padded at the end alone before the strided convolution", "smaller", ("self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)", "self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, stride=2)"), ("self.smaller(skip)", "self.smaller(functional.pad(skip, (0, 1, 0, 1)))"), says="formula|layout"),
    fault(_U, "torch torch", "formula", "one group in each second norm", "down/norm2", ("nn.GroupNorm(GROUPS, outputs, eps=1e-6)", "nn.GroupNorm(1, outputs, eps=1e-6)"), under=BRAIN),
    fault(_U, "nnx torch", "formula", "shortcut behind the norm", "down/shortcut down/norm1", ("self.shortcut(x) + h", "self.shortcut(self.norm1(x)) + h")),
    fault(_U, "torch nnx", "formula", "time multiplies, not adds", "down/norm2", ("h = h + self.time(", "h = h * self.time(")),
    fault(_U, "torch nnx", "loss", "half of the squares", "loss", ('return jnp.square(', 'return 0.5 * jnp.square('), says="factor|formula", under=HALF),
    fault(_U, "nnx nnx", "loss", "squares only up to 1", "loss", ('jnp.square(model(batch).astype(jnp.float32) - batch["noise"]).mean()', 'jnp.where(jnp.abs(e := model(batch).astype(jnp.float32) - batch["noise"]) < 1.0, jnp.square(e), 2.0 * jnp.abs(e) - 1.0).mean()'), says="formula"),
)  # fmt: skip
CONVNET: Final = (
    fault(_C, "torch keras", "statistics", "torch's momentum taken over as it is", "mbconv/norm2", ('momentum=0.9, epsilon=1e-3, name="mbconv_norm2"', 'momentum=0.1, epsilon=1e-3, name="mbconv_norm2"'), stage="update"),
    fault(_C, "torch torch", "statistics", "statistics not followed", "mbconv/norm1", ("self.norm1 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.1)", "self.norm1 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.0)"), stage="update", says="formula|factor|missing|~momentum|~running"),
    fault(_C, "torch nnx", "formula", "sum over the places in the squeeze", "mbconv/squeeze/reduce", ("self.reduce(x.mean((1, 2)))", "self.reduce(x.sum((1, 2)))"), says="factor|formula", under=BRAIN),
    fault(_C, "torch torch", "formula", "GELU before the wide layer for behind it", "next/up", ("h = self.down(functional.gelu(self.up(h)))", "h = self.down(self.up(functional.gelu(h)))")),
    fault(_C, "nnx torch", "formula", "scale of 1 + gamma", "next norm", ("(h * self.gamma)", "(h * (1.0 + self.gamma))")),
    fault(_C, "torch torch", "halved", "squeeze's mean without a gradient", "mbconv/squeeze mbconv/squeeze/reduce mbconv/norm1", ("self.reduce(x.mean((2, 3)))", "self.reduce(x.mean((2, 3)).detach())"), stage="backward", under=HALF),
    fault(_C, "torch keras", "loss", "a sigmoid for each class", "loss", ('tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["labels"], logits=logits)', 'tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.one_hot(batch["labels"], CLASSES), logits=logits), -1)'), says="formula"),
    carried(_C, "torch keras", "classes of the head in the other order", "head", r"^head/kernel", lambda x: x[:, ::-1]),
)  # fmt: skip
PLANTS: Final = (*UNET, *CONVNET)
"""All of them."""
