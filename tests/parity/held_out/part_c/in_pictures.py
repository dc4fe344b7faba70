"""Faults of part C in the code of the U-Net and of the convolutional net."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF, carried, fault

_U: Final = "unet"
_C: Final = "convnet"
UNET: Final = (
    fault(_U, "torch nnx", "epsilon", "1e-3 in a norm of the middle", "middle/norm2", ("        self.middle = Block(WIDTH, 2 * WIDTH, rngs)\n", "        self.middle = Block(WIDTH, 2 * WIDTH, rngs)\n        self.middle.norm2.epsilon = 1e-3\n")),
    fault(_U, "torch torch", "formula", "a group for each channel", "up/norm1", ("        self.norm = nn.GroupNorm", "        self.up.norm1.num_groups = 2 * WIDTH\n        self.norm = nn.GroupNorm"), says="formula|~groups"),
    fault(_U, "torch torch", "formula", "convolution transposed", "larger up up/norm1 up/shortcut", ("x = self.larger(functional.interpolate(x, scale_factor=2.0, mode=\"nearest\"))", "x = functional.interpolate(x, scale_factor=2.0, mode=\"nearest\")\n        x = functional.conv_transpose2d(x, self.larger.weight.transpose(0, 1), self.larger.bias, padding=1)"), says="formula|missing|layout"),
    fault(_U, "torch torch", "formula", "periods up to 1000", "time1", ("9.210340371976184", "6.907755278982137"), under=BRAIN),
    fault(_U, "torch nnx", "formula", "no SiLU between the time's layers", "time2", ("self.time2(jax.nn.silu(self.time1(", "self.time2((self.time1(")),
    fault(_U, "nnx torch", "formula", "bilinear, corners aligned", "larger", ('mode="nearest"', 'mode="bilinear", align_corners=True')),
    fault(_U, "torch nnx", "formula", "borders joined in the stem", "stem", ("self.stem = conv(CHANNELS, WIDTH, 3, rngs)", 'self.stem = nnx.Conv(CHANNELS, WIDTH, (3, 3), padding="CIRCULAR", rngs=rngs)'), under=HALF),
    fault(_U, "torch torch", "formula", "shortcut behind the norm", "down/shortcut", ("self.shortcut(x) + h", "self.shortcut(self.norm1(x)) + h")),
    fault(_U, "nnx nnx", "formula", "time multiplied, not added", "down/norm2 down/conv2", ("h = h + self.time(jax.nn.silu(t))[:, None, None, :]", "h = h * (1.0 + self.time(jax.nn.silu(t))[:, None, None, :])")),
    fault(_U, "torch torch", "formula", "skip added before the last block", "up/norm1 up/shortcut up", ("torch.cat([x, skip], 1)", "torch.cat([x + skip, skip], 1)")),
    fault(_U, "torch torch", "stopped", "shortcut detached", "up/shortcut", ("self.shortcut(x) + h", "self.shortcut(x).detach() + h"), stage="backward"),
    fault(_U, "torch torch", "loss", "Huber's loss", "loss", ('(model(batch).float() - batch["noise"]).square().mean()', 'functional.huber_loss(model(batch).float(), batch["noise"])'), says="formula"),
    fault(_U, "torch nnx", "loss", "root of the mean", "loss", ('jnp.square(model(batch).astype(jnp.float32) - batch["noise"]).mean()', 'jnp.sqrt(jnp.square(model(batch).astype(jnp.float32) - batch["noise"]).mean())'), says="formula"),
    carried(_U, "torch nnx", "channels in and out exchanged", "up/conv2", r"up/conv2/kernel", lambda x: x.swapaxes(2, 3)),
    carried(_U, "torch torch", "channels of the joined skip exchanged", "up/conv1", r"up/conv1/weight", lambda x: x.reshape(12, 2, 12, 3, 3)[:, ::-1].reshape(12, 24, 3, 3)),
)  # fmt: skip
CONVNET: Final = (
    fault(_C, "torch nnx", "statistics", "momentum of 0.5 in one norm", "mbconv/norm2", ("self.norm2 = nnx.BatchNorm(WIDTH, epsilon=1e-3, momentum=0.9,", "self.norm2 = nnx.BatchNorm(WIDTH, epsilon=1e-3, momentum=0.5,"), stage="update", under=BRAIN),
    fault(_C, "torch keras", "epsilon", "1e-5 behind the projection", "mbconv/norm2", ('epsilon=1e-3, name="mbconv_norm2"', 'epsilon=1e-5, name="mbconv_norm2"')),
    fault(_C, "torch torch", "formula", "running statistics behind the projection", "mbconv/norm2 mbconv next/depthwise", ("self.norm2(self.project(self.squeeze(h)))", "functional.batch_norm(self.project(self.squeeze(h)), self.norm2.running_mean, self.norm2.running_var, self.norm2.weight, self.norm2.bias, False, 0.1, 1e-3)"), says="formula|missing|~running"),
    fault(_C, "torch torch", "statistics", "statistics updated twice", "mbconv/norm1", ("        h = functional.silu(self.norm1(self.depthwise(x)))\n        return", "        self.norm1(self.depthwise(x))\n        h = functional.silu(self.norm1(self.depthwise(x)))\n        return"), stage="update|forward"),
    fault(_C, "torch keras", "formula", "no activation before the squeeze", "mbconv/squeeze mbconv/squeeze/* mbconv/project", ('layers.Activation("silu", name="mbconv_silu")', 'layers.Activation("linear", name="mbconv_silu")')),
    fault(_C, "torch nnx", "formula", "ReLU bounded at 6 for SiLU", "mbconv/squeeze mbconv/squeeze/*", ("jax.nn.silu(self.norm1(self.depthwise(x)))", "jax.nn.relu6(self.norm1(self.depthwise(x)))")),
    fault(_C, "torch torch", "formula", "residual of the first block forgotten", "mbconv next next/depthwise", ("return x + self.norm2(", "return self.norm2("), under=HALF),
    fault(_C, "torch nnx", "formula", "branch kept at 0.9", "next norm", ("return x + h * self.gamma[...]", "return x + 0.9 * h * self.gamma[...]"), says="formula|factor"),
    fault(_C, "nnx torch", "formula", "maximum over the places", "norm", ("self.norm(x.mean((2, 3)))", "self.norm(x.amax((2, 3)))")),
    fault(_C, "torch torch", "formula", "bias of the depthwise kernel forgotten", "next/depthwise next/norm next", ("self.depthwise(x).permute", "functional.conv2d(x, self.depthwise.weight, padding=2, groups=WIDTH).permute"), says="formula|missing"),
    fault(_C, "torch torch", "stopped", "scale of the layer frozen", "next next/gamma", ("(h * self.gamma)", "(h * self.gamma.detach())"), stage="backward"),
    fault(_C, "torch nnx", "halved", "no gradient through the first residual", "stem mbconv", ("return x + self.norm2(", "return jax.lax.stop_gradient(x) + self.norm2("), stage="backward", says="missing|formula|factor"),
    fault(_C, "torch keras", "loss", "labels smoothed", "loss", ('tf.nn.sparse_softmax_cross_entropy_with_logits(labels=batch["labels"], logits=logits)', 'tf.nn.softmax_cross_entropy_with_logits(labels=0.9 * tf.one_hot(batch["labels"], CLASSES) + 0.1 / CLASSES, logits=logits)'), says="formula"),
    fault(_C, "torch torch", "loss", "softmax taken twice", "loss", ("functional.cross_entropy(model(batch).float(),", "functional.cross_entropy(model(batch).float().softmax(-1),"), says="formula"),
    carried(_C, "torch keras", "channels in and out of the projection exchanged", "mbconv/project", r"^mbconv_project/kernel", lambda x: x.swapaxes(2, 3)),
    carried(_C, "torch torch", "kernel of the stem transposed", "stem", r"stem/weight", lambda x: x.swapaxes(2, 3)),
)  # fmt: skip
PLANTS: Final = (*UNET, *CONVNET)
"""All of them."""
