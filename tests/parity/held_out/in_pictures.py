"""Faults in the code of the U-Net and of the convolutional net."""

from __future__ import annotations

from typing import Final

import numpy as np

from tests.parity.held_out.planted import plant, policy, wrong_array

_U: Final = "unet"
_C: Final = "convnet"
UNET: Final = (
    plant(_U, "torch nnx", "epsilon", "flax's own 1e-6 written 1e-5", "down/norm1", ("self.norm1 = nnx.GroupNorm(inputs, GROUPS, epsilon=1e-6, rngs=rngs)", "self.norm1 = nnx.GroupNorm(inputs, GROUPS, epsilon=1e-5, rngs=rngs)")),
    plant(_U, "torch torch", "epsilon", "torch's 1e-5 in the last norm", "norm", ("self.norm = nn.GroupNorm(GROUPS, WIDTH, eps=1e-6)", "self.norm = nn.GroupNorm(GROUPS, WIDTH)")),
    plant(_U, "torch nnx", "formula", "2 groups for 4", "norm", ("self.norm = nnx.GroupNorm(WIDTH, GROUPS,", "self.norm = nnx.GroupNorm(WIDTH, 2,")),
    plant(_U, "torch torch", "formula", "cosine before sine", "time1", ("[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"), says="formula|layout"),
    plant(_U, "torch nnx", "formula", "frequencies over half - 1", "time1", ("(9.210340371976184 / (WIDTH // 2))", "(9.210340371976184 / (WIDTH // 2 - 1))")),
    plant(_U, "torch torch", "formula", "times from 0 to 1", "time1", ('time_embedding(batch["times"])', 'time_embedding(batch["times"] / 1000.0)')),
    plant(_U, "nnx nnx", "formula", "no SiLU before the time's layer", "down/time", ("self.time(jax.nn.silu(t))", "self.time(t)")),
    plant(_U, "torch nnx", "formula", "skip before the upsampled", "up/norm1 up/shortcut", ("[x, skip]", "[skip, x]"), says="formula|layout"),
    plant(_U, "torch torch", "formula", "bilinear for nearest", "larger", ('mode="nearest"', 'mode="bilinear"')),
    plant(_U, "torch nnx", "formula", "SAME padding of the strided convolution", "smaller", ("padding=size // 2", 'padding="SAME"')),
    plant(_U, "torch torch", "formula", "skip from behind the strided convolution", "up/norm1 up/shortcut", ("torch.cat([x, skip], 1)", "torch.cat([x, functional.interpolate(self.smaller(skip), scale_factor=2.0)], 1)")),
    plant(_U, "torch torch", "formula", "ReLU for SiLU", "out", ("self.out(functional.silu(self.norm(x)))", "self.out(functional.relu(self.norm(x)))")),
    plant(_U, "torch nnx", "formula", "tiled for repeated in the upsampling", "larger", ("jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)", "jnp.tile(x, (1, 2, 2, 1))"), says="formula|layout"),
    plant(_U, "torch torch", "formula", "time added behind the second norm", "down/norm2 down/conv2", ("h = h + self.time(functional.silu(t))[:, :, None, None]\n        h = self.conv2(functional.silu(self.norm2(h)))", "h = self.norm2(h) + self.time(functional.silu(t))[:, :, None, None]\n        h = self.conv2(functional.silu(h))")),
    plant(_U, "nnx torch", "formula", "residual divided by the root of 2", "down smaller", ("return self.shortcut(x) + h", "return (self.shortcut(x) + h) / 2**0.5"), says="formula|factor"),
    plant(_U, "torch torch", "formula", "reflected for zero padding", "stem", ("self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)", 'self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1, padding_mode="reflect")')),
    plant(_U, "torch torch", "formula", "dilated kernel", "larger", ("self.larger = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=1)", "self.larger = nn.Conv2d(2 * WIDTH, WIDTH, 3, padding=2, dilation=2)")),
    plant(_U, "torch nnx", "stopped", "time embedding's gradient stopped", "time2", ("t = self.time2(jax.nn.silu(self.time1(time_embedding(batch[\"times\"]))))", "t = jax.lax.stop_gradient(self.time2(jax.nn.silu(self.time1(time_embedding(batch[\"times\"])))))"), stage="backward"),
    plant(_U, "torch torch", "halved", "skip detached", "down/shortcut down/conv2 down down/*", ("torch.cat([x, skip], 1)", "torch.cat([x, skip.detach()], 1)"), stage="backward"),
    plant(_U, "torch torch", "dtype", "time embedding in bfloat16", "time1", ("return torch.cat([angles.sin(), angles.cos()], -1)", "return torch.cat([angles.sin(), angles.cos()], -1).bfloat16().to(angles.dtype)")),
    plant(_U, "torch nnx", "loss", "sum over pixels", "loss", ('- batch["noise"]).mean()', '- batch["noise"]).sum((1, 2, 3)).mean()'), says="factor"),
    plant(_U, "torch torch", "loss", "absolute for squared", "loss", (".square().mean()", ".abs().mean()"), says="formula"),
    plant(_U, "torch nnx", "loss", "predicts the image, not the noise", "loss", ('- batch["noise"])', '- batch["images"])'), says="formula"),
    policy(_U, "torch torch", "last convolution in float32", "out", "mixed_bfloat16", ("return self.out(functional.silu(self.norm(x)))", "x = functional.silu(self.norm(x)).float()\n        with torch.autocast('cpu', enabled=False):\n            return self.out(x)")),
    wrong_array(_U, "torch nnx", "rows and columns of a kernel exchanged", "middle/conv1", r"middle/conv1/kernel", lambda x: x.swapaxes(0, 1)),
    wrong_array(_U, "torch torch", "kernel turned round", "stem", r"stem/weight", lambda x: x[:, :, ::-1, ::-1]),
)  # fmt: skip
CONVNET: Final = (
    plant(_C, "torch nnx", "epsilon", "1e-5 for 1e-3", "mbconv/norm1", ("self.norm1 = nnx.BatchNorm(WIDTH, epsilon=1e-3,", "self.norm1 = nnx.BatchNorm(WIDTH, epsilon=1e-5,")),
    plant(_C, "torch torch", "epsilon", "torch's own", "mbconv/norm2", ("self.norm2 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.1)", "self.norm2 = nn.BatchNorm2d(WIDTH, momentum=0.1)")),
    plant(_C, "torch keras", "epsilon", "Keras's own in the layer norm", "next/norm", ('layers.LayerNormalization(epsilon=1e-6, name="next_norm")', 'layers.LayerNormalization(name="next_norm")')),
    plant(_C, "torch nnx", "statistics", "momentum of 0.99", "mbconv/norm1", ("self.norm1 = nnx.BatchNorm(WIDTH, epsilon=1e-3, momentum=0.9,", "self.norm1 = nnx.BatchNorm(WIDTH, epsilon=1e-3, momentum=0.99,"), stage="update"),
    plant(_C, "torch torch", "statistics", "momentum the other way round", "mbconv/norm2", ("self.norm2 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.1)", "self.norm2 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.9)"), stage="update"),
    plant(_C, "torch keras", "statistics", "Keras's own momentum", "mbconv/norm1", ('layers.BatchNormalization(momentum=0.9, epsilon=1e-3, name="mbconv_norm1")', 'layers.BatchNormalization(epsilon=1e-3, name="mbconv_norm1")'), stage="update"),
    plant(_C, "torch nnx", "formula", "running statistics in training", "mbconv/norm1", ("self.norm1(self.depthwise(x))", "self.norm1(self.depthwise(x), use_running_average=True)"), says="formula|~running"),
    plant(_C, "torch torch", "formula", "ReLU for SiLU in the squeeze", "mbconv/squeeze/expand", ("functional.silu(self.reduce(", "functional.relu(self.reduce(")),
    plant(_C, "torch nnx", "formula", "tanh for sigmoid in the gates", "mbconv/squeeze mbconv/project", ("gates = jax.nn.sigmoid(", "gates = jnp.tanh(")),
    plant(_C, "torch torch", "formula", "hard sigmoid in the gates", "mbconv/squeeze mbconv/project", ("gates = torch.sigmoid(", "gates = functional.hardsigmoid(")),
    plant(_C, "torch nnx", "formula", "maximum for the mean in the squeeze", "mbconv/squeeze/reduce", ("self.reduce(x.mean((1, 2)))", "self.reduce(x.max((1, 2)))")),
    plant(_C, "torch torch", "formula", "squeeze before the activation", "mbconv/squeeze/reduce mbconv/squeeze mbconv/squeeze/*", ("self.project(self.squeeze(h))", "self.project(self.squeeze(self.norm1(self.depthwise(x))))"), says="formula"),
    plant(_C, "torch keras", "formula", "activation forgotten behind the squeeze", "mbconv/squeeze/reduce mbconv/squeeze/expand", ('layers.Dense(4, activation="silu", name="mbconv_squeeze_reduce")', 'layers.Dense(4, name="mbconv_squeeze_reduce")')),
    plant(_C, "torch nnx", "formula", "tanh GELU for erf", "next/down", ("approximate=False", "approximate=True"), says="~tanh|~erf|~gelu"),
    plant(_C, "torch torch", "formula", "scale of the layer left out", "next norm", ("h * self.gamma)", "h * (0.0 * self.gamma + 1.0))")),
    plant(_C, "torch nnx", "formula", "scale of the layer over the residual too", "next norm", ("return x + h * self.gamma[...]", "return (x + h) * self.gamma[...]")),
    plant(_C, "torch torch", "formula", "norm over all places", "next/norm next/up", ("h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))", "h = functional.group_norm(self.depthwise(x), 1, self.norm.weight, self.norm.bias, 1e-6).permute(0, 2, 3, 1)"), says="formula|missing"),
    plant(_C, "torch torch", "formula", "pooled behind the last norm", "norm head", ("self.head(self.norm(x.mean((2, 3))))", "self.head(self.norm(x.permute(0, 2, 3, 1)).mean((1, 2)))")),
    plant(_C, "nnx torch", "formula", "sum for the mean over places", "norm", ("self.norm(x.mean((2, 3)))", "self.norm(x.sum((2, 3)))"), says="factor|formula"),
    plant(_C, "torch torch", "formula", "5 for 3 bits: kernel's border cut off", "next/depthwise next/norm", ("self.depthwise(x).permute", "functional.conv2d(x, self.depthwise.weight[..., 1:-1, 1:-1], self.depthwise.bias, padding=1, groups=WIDTH).permute"), says="formula|missing"),
    plant(_C, "torch nnx", "formula", "pictures scaled to -1 and 1", "stem", ('self.stem(batch["images"])', 'self.stem(batch["images"] * 2.0 - 1.0)')),
    plant(_C, "torch torch", "formula", "colours in the other order", "stem", ('self.stem(batch["images"])', 'self.stem(batch["images"].flip(1))'), says="formula|layout"),
    plant(_C, "torch nnx", "stopped", "gates without a gradient", "mbconv/squeeze/expand", ("gates = jax.nn.sigmoid(self.expand(jax.nn.silu(self.reduce(x.mean((1, 2))))))", "gates = jax.lax.stop_gradient(jax.nn.sigmoid(self.expand(jax.nn.silu(self.reduce(x.mean((1, 2)))))))"), stage="backward"),
    plant(_C, "torch torch", "dtype", "pictures rounded to float16", "stem", ('self.stem(batch["images"])', 'self.stem(batch["images"].half().float())')),
    policy(_C, "torch nnx", "statistics of the layer norm in 16 bits", "next/norm next/up", "mixed_bfloat16", ("h = self.norm(self.depthwise(x))", "h = self.norm(self.depthwise(x).astype(jnp.bfloat16)).astype(jnp.float16)")),
    plant(_C, "torch keras", "loss", "sum for the mean", "loss", ("tf.reduce_mean(losses)", "tf.reduce_sum(losses)"), says="factor"),
    wrong_array(_C, "torch keras", "depthwise kernel with rows and columns exchanged", "mbconv/depthwise", r"^mbconv_depthwise/kernel|^mbconv_depthwise", lambda x: x.swapaxes(0, 1)),
    wrong_array(_C, "torch nnx", "stem's kernel turned round", "stem", r"stem/kernel", lambda x: np.flip(x, (0, 1))),
)  # fmt: skip
PLANTS: Final = (*UNET, *CONVNET)
"""All of them."""
