"""Faults of part E in the code of the U-Net and of the convolutional net."""

from __future__ import annotations

from typing import Final

from tests.parity.held_out.part_c.variants import BRAIN, HALF
from tests.parity.held_out.part_e.variants import carried, fault

_U: Final = "unet"
_C: Final = "convnet"
UNET: Final = (
    fault(_U, "torch nnx", "formula", "angles in turns of 2 pi", "time1", ("angles = times[:, None] * rates", "angles = 6.283185307179586 * times[:, None] * rates")),
    fault(_U, "torch torch", "formula", "convolved before it is made larger", "larger up up/norm1 up/shortcut", ('self.larger(functional.interpolate(x, scale_factor=2.0, mode="nearest"))', 'functional.interpolate(self.larger(x), scale_factor=2.0, mode="nearest")'), says="formula|layout|missing", under=BRAIN),
    fault(_U, "nnx torch", "formula", "SiLU before the first norms", "down/norm1 down", ("h = self.conv1(functional.silu(self.norm1(x)))", "h = self.conv1(self.norm1(functional.silu(x)))")),
    fault(_U, "torch torch", "formula", "averages of pairs for a stride of 2", "smaller middle middle/norm1 middle/shortcut", ("self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)", "self.smaller = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)"), ("self.middle(self.smaller(skip), t)", "self.middle(functional.avg_pool2d(self.smaller(skip), 2), t)"), says="formula|layout|~stride"),
    fault(_U, "nnx nnx", "formula", "SiLU taken twice", "down/time", ("self.time(jax.nn.silu(t))", "self.time(jax.nn.silu(jax.nn.silu(t)))")),
    fault(_U, "torch torch", "stopped", "stem frozen", "stem", ('x = self.stem(batch["images"])', 'x = self.stem(batch["images"]).detach()'), stage="backward", under=HALF),
    fault(_U, "torch nnx", "loss", "weighed by the time", "loss", ('jnp.square(model(batch).astype(jnp.float32) - batch["noise"]).mean()', '(jnp.square(model(batch).astype(jnp.float32) - batch["noise"]) * (0.5 + 0.01 * batch["times"])[:, None, None, None]).mean()'), says="formula"),
    carried(_U, "torch nnx", "last kernel mirrored", "out", r"^out/kernel", lambda x: x[:, ::-1]),
)  # fmt: skip
CONVNET: Final = (
    fault(_C, "torch keras", "formula", "gates of 1 and the sigmoid", "mbconv/project mbconv/squeeze", ('h = h * layers.Reshape((1, 1, WIDTH), name="mbconv_gates")(s)', 'h = h * (1.0 + layers.Reshape((1, 1, WIDTH), name="mbconv_gates")(s))')),
    fault(_C, "torch torch", "statistics", "momentum of 0.01", "mbconv/norm2", ("self.norm2 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.1)", "self.norm2 = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.01)"), stage="update"),
    fault(_C, "torch nnx", "formula", "no norm behind the projection", "mbconv next next/depthwise mbconv/norm2", ("return x + self.norm2(self.project(self.squeeze(h)))", "return x + self.project(self.squeeze(h))"), says="formula|missing"),
    fault(_C, "nnx torch", "formula", "norm before the depthwise kernel", "next/depthwise next/norm", ("h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))", "h = self.depthwise(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)"), under=BRAIN),
    fault(_C, "torch keras", "formula", "ReLU for GELU", "next/up next/down", ('activation="gelu", name="next_up"', 'activation="relu", name="next_up"')),
    fault(_C, "torch nnx", "epsilon", "1e-4 in the last norm", "norm", ("self.norm, self.head = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)", "self.norm, self.head = nnx.LayerNorm(WIDTH, epsilon=1e-4, rngs=rngs)")),
    fault(_C, "torch torch", "stopped", "branch without a gradient", "next next/*", ("return x + (h * self.gamma).permute(0, 3, 1, 2)", "return x + (h * self.gamma).permute(0, 3, 1, 2).detach()"), stage="backward", under=HALF),
    fault(_C, "torch nnx", "loss", "sure pictures count less", "loss", ('return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1).mean()', 'logs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1)\n    return -(jnp.square(1.0 - jnp.exp(logs)) * logs).mean()'), says="formula"),
    carried(_C, "torch keras", "depthwise kernel turned round", "next/depthwise", r"^next_depthwise/.*kernel", lambda x: x[::-1, ::-1]),
)  # fmt: skip
PLANTS: Final = (*UNET, *CONVNET)
"""All of them."""
