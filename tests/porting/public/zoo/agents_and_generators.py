"""Actors, critics, autoencoders and generators, from torch to flax linen and back.

Actor-critic: stable-baselines3's `ActorCriticPolicy` and `NatureCNN` beside purejaxrl's `ActorCritic`. Q-network:
CleanRL's, in torch and flax. Twin critics: SAC, Haarnoja et al., 2018, as stable-baselines3's `ContinuousCritic`. VAE:
the examples of torch and flax, and one with convolutions. DCGAN: Radford et al., 2015, as torch's example. U-Net with
time embedding: Ho et al., 2020, as diffusers' `UNet2DModel`. FiLM: Perez et al., 2017. All are written anew, small.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import nn
from torch.nn import functional as F

from tests.porting.public.zoo.building_blocks import shapes
from tests.porting.public.zoo.case import Batch, Case, features, images


# Actor and critic on vectors.
class MlpExtractor(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.policy_net = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.value_net = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Any) -> Any:
        return self.policy_net(x), self.value_net(x)


class ActorCriticPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp_extractor = MlpExtractor(5)
        self.action_net, self.value_net = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Any) -> Any:
        policy, value = self.mlp_extractor(x)
        return self.action_net(policy), self.value_net(value)


class ActorCritic(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.tanh(linen.Dense(16)(x))
        y = linen.tanh(linen.Dense(16)(y))
        actions = linen.Dense(3)(y)
        y = linen.tanh(linen.Dense(16)(x))
        y = linen.tanh(linen.Dense(16)(y))
        return actions, linen.Dense(1)(y)


class CriticFirst(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.tanh(linen.Dense(16)(x))
        y = linen.tanh(linen.Dense(16)(y))
        value = linen.Dense(1)(y)
        y = linen.tanh(linen.Dense(16)(x))
        y = linen.tanh(linen.Dense(16)(y))
        return linen.Dense(3)(y), value


# Actor and critic on images: two heads behind one flatten.
class NatureCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(4, 8, 4, 2), nn.ReLU(), nn.Conv2d(8, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 1), nn.ReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.linear = nn.Sequential(nn.Linear(16 * 16, 32), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.linear(self.cnn(x))


class CnnPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features_extractor = NatureCNN()
        self.action_net, self.value_net = nn.Linear(32, 6), nn.Linear(32, 1)

    def forward(self, x: Any) -> Any:
        x = self.features_extractor(x)
        return self.action_net(x), self.value_net(x)


class FlaxCnnPolicy(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        for width, window, stride in ((8, 4, 2), (16, 4, 2), (16, 3, 1)):
            x = linen.relu(linen.Conv(width, (window, window), stride, padding="VALID")(x))
        x = linen.relu(linen.Dense(32)(x.reshape(len(x), -1)))
        return linen.Dense(6)(x), linen.Dense(1)(x)


class TwoHeads(nn.Module):
    """Actor and critic read the flatten themselves, as in Impala's shallow network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 4, 2), nn.Conv2d(8, 16, 4, 2)
        self.actor, self.critic = nn.Linear(16 * 36, 6), nn.Linear(16 * 36, 1)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1)
        return self.actor(x), self.critic(x)


class FlaxTwoHeads(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Conv(8, (4, 4), 2, padding="VALID", name="conv1")(x))
        x = linen.relu(linen.Conv(16, (4, 4), 2, padding="VALID", name="conv2")(x)).reshape(len(x), -1)
        return linen.Dense(6, name="actor")(x), linen.Dense(1, name="critic")(x)


# Q-network and twin critics.
class QNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2)
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.network(x)


class FlaxQNetwork(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(2)(linen.relu(linen.Dense(16)(linen.relu(linen.Dense(24)(x)))))


class ContinuousCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(2):
            net = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
            self.add_module(f"qf{number}", net)

    def forward(self, observations: Any, actions: Any) -> Any:
        x = torch.cat([observations, actions], 1)
        return self.qf0(x), self.qf1(x)  # type: ignore[operator]


class Critic(linen.Module):
    @linen.compact
    def __call__(self, observations: Any, actions: Any) -> Any:
        x = jnp.concatenate([observations, actions], -1)
        return linen.Dense(1)(linen.relu(linen.Dense(16)(linen.relu(linen.Dense(16)(x)))))


class DoubleCritic(linen.Module):
    @linen.compact
    def __call__(self, observations: Any, actions: Any) -> Any:
        return Critic()(observations, actions), Critic()(observations, actions)


# Variational autoencoders; the noise is an input, so that both sides draw the same.
class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(36, 24), nn.Linear(24, 6), nn.Linear(24, 6)
        self.fc3, self.fc4 = nn.Linear(6, 24), nn.Linear(24, 36)

    def forward(self, x: Any, noise: Any) -> Any:
        x = F.relu(self.fc1(x))
        mu, logvar = self.fc21(x), self.fc22(x)
        z = mu + noise * torch.exp(0.5 * logvar)
        return self.fc4(F.relu(self.fc3(z))), mu, logvar


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.relu(linen.Dense(24, name="fc1")(x))
        return linen.Dense(6, name="fc2_mean")(x), linen.Dense(6, name="fc2_logvar")(x)


class Decoder(linen.Module):
    @linen.compact
    def __call__(self, z: Any) -> Any:
        return linen.Dense(36, name="fc2")(linen.relu(linen.Dense(24, name="fc1")(z)))


class FlaxVAE(linen.Module):
    def setup(self) -> None:
        self.encoder, self.decoder = Encoder(), Decoder()

    def __call__(self, x: Any, noise: Any) -> Any:
        mean, logvar = self.encoder(x)
        return self.decoder(mean + noise * jnp.exp(0.5 * logvar)), mean, logvar


class ConvVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2 = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.fc_mu, self.fc_logvar = nn.Linear(16 * 16, 6), nn.Linear(16 * 16, 6)
        self.fc_dec = nn.Linear(6, 16 * 16)
        self.dec1, self.dec2 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 1, 2, 2)

    def forward(self, x: Any, noise: Any) -> Any:
        x = F.relu(self.enc2(F.relu(self.enc1(x)))).flatten(1)
        mu, logvar = self.fc_mu(x), self.fc_logvar(x)
        z = self.fc_dec(mu + noise * torch.exp(0.5 * logvar)).unflatten(1, (16, 4, 4))
        return self.dec2(F.relu(self.dec1(F.relu(z)))), mu, logvar


class FlaxConvVAE(linen.Module):
    @linen.compact
    def __call__(self, x: Any, noise: Any) -> Any:
        for number, width in enumerate((8, 16), 1):
            x = linen.relu(linen.Conv(width, (3, 3), 2, ((1, 1), (1, 1)), name=f"enc{number}")(x))
        x = x.reshape(len(x), -1)
        mu, logvar = linen.Dense(6, name="fc_mu")(x), linen.Dense(6, name="fc_logvar")(x)
        z = linen.Dense(256, name="fc_dec")(mu + noise * jnp.exp(0.5 * logvar)).reshape(-1, 4, 4, 16)
        y = linen.relu(linen.ConvTranspose(8, (2, 2), (2, 2), transpose_kernel=True, name="dec1")(linen.relu(z)))
        return linen.ConvTranspose(1, (2, 2), (2, 2), transpose_kernel=True, name="dec2")(y), mu, logvar


# DCGAN's generator.
def generator() -> Any:
    return nn.Sequential(
        nn.ConvTranspose2d(12, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


class Generator(linen.Module):
    @linen.compact
    def __call__(self, z: Any, train: bool = False) -> Any:
        for width, strides, padding in ((16, 1, "VALID"), (8, 2, "SAME")):
            z = linen.ConvTranspose(width, (4, 4), (strides, strides), padding, use_bias=False, transpose_kernel=True)(
                z
            )
            z = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(z))
        return linen.tanh(linen.ConvTranspose(3, (4, 4), (2, 2), use_bias=False, transpose_kernel=True)(z))


# U-Net with time embedding.
def sines(time: Any, library: Any) -> Any:
    angles = time[:, None] * library.exp(-library.arange(8) / 4.0)
    return library.concatenate([library.sin(angles), library.cos(angles)], -1)


class TimestepEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.linear_2(F.silu(self.linear_1(x)))


class ResnetBlock2D(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.time_emb_proj = nn.Linear(32, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(4, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Any, emb: Any) -> Any:
        y = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(F.silu(emb))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class UNet2DModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_embedding = TimestepEmbedding()
        self.conv_in = nn.Conv2d(3, 8, 3, 1, 1)
        self.down_0, self.downsample = ResnetBlock2D(8, 8), nn.Conv2d(8, 8, 3, 2, 1)
        self.mid, self.upsample = ResnetBlock2D(8, 16), nn.Conv2d(16, 16, 3, 1, 1)
        self.up_0 = ResnetBlock2D(24, 8)
        self.conv_norm_out, self.conv_out = nn.GroupNorm(4, 8), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x: Any, time: Any) -> Any:
        emb = self.time_embedding(sines(time[:, 0], torch))
        skip = self.down_0(self.conv_in(x), emb)
        x = self.upsample(F.interpolate(self.mid(self.downsample(skip), emb), scale_factor=2.0, mode="nearest"))
        x = self.up_0(torch.cat([x, skip], 1), emb)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class FlaxTimestepEmbedding(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(32, name="linear_2")(linen.silu(linen.Dense(32, name="linear_1")(x)))


def conv3(features: int, name: str, strides: int = 1) -> Any:
    return linen.Conv(features, (3, 3), strides, ((1, 1), (1, 1)), name=name)


class FlaxResnetBlock2D(linen.Module):
    outputs: int

    @linen.compact
    def __call__(self, x: Any, emb: Any) -> Any:
        y = conv3(self.outputs, "conv1")(linen.silu(linen.GroupNorm(4, epsilon=1e-5, name="norm1")(x)))
        y = y + linen.Dense(self.outputs, name="time_emb_proj")(linen.silu(emb))[:, None, None]
        y = conv3(self.outputs, "conv2")(linen.silu(linen.GroupNorm(4, epsilon=1e-5, name="norm2")(y)))
        return y + (x if x.shape == y.shape else linen.Conv(self.outputs, (1, 1), name="conv_shortcut")(x))


class FlaxUNet2DModel(linen.Module):
    @linen.compact
    def __call__(self, x: Any, time: Any) -> Any:
        emb = FlaxTimestepEmbedding(name="time_embedding")(sines(time[:, 0], jnp))
        skip = FlaxResnetBlock2D(8, name="down_0")(conv3(8, "conv_in")(x), emb)
        x = FlaxResnetBlock2D(16, name="mid")(conv3(8, "downsample", 2)(skip), emb)
        x = conv3(16, "upsample")(x.repeat(2, 1).repeat(2, 2))
        x = FlaxResnetBlock2D(8, name="up_0")(jnp.concatenate([x, skip], -1), emb)
        return conv3(3, "conv_out")(linen.silu(linen.GroupNorm(4, epsilon=1e-5, name="conv_norm_out")(x)))


def image_and_time(rng: np.random.Generator) -> Batch:
    return images(16)(rng)[0], rng.uniform(0, 10, (2, 1)).astype(np.float32)


# An image and a state, joined by FiLM and by concatenation.
class FiLMPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, 2)
        self.film = nn.Linear(16, 16)
        self.fuse, self.head = nn.Linear(8 + 16, 32), nn.Linear(32, 4)

    def forward(self, image: Any, state: Any) -> Any:
        x = F.relu(self.conv1(image))
        scale, shift = self.film(state)[:, :, None, None].chunk(2, 1)
        x = F.relu(self.conv2(x * (1 + scale) + shift)).mean((2, 3))
        return self.head(F.relu(self.fuse(torch.cat([x, state], 1))))


class FlaxFiLMPolicy(linen.Module):
    @linen.compact
    def __call__(self, image: Any, state: Any) -> Any:
        x = linen.relu(linen.Conv(8, (3, 3), 2, padding="VALID", name="conv1")(image))
        scale, shift = jnp.split(linen.Dense(16, name="film")(state)[:, None, None], 2, -1)
        x = linen.relu(linen.Conv(8, (3, 3), 2, padding="VALID", name="conv2")(x * (1 + scale) + shift)).mean((1, 2))
        return linen.Dense(4, name="head")(linen.relu(linen.Dense(32, name="fuse")(jnp.concatenate([x, state], -1))))


def image_and_state(rng: np.random.Generator) -> Batch:
    return images(16)(rng)[0], rng.standard_normal((2, 16)).astype(np.float32)


def image_and_noise(rng: np.random.Generator) -> Batch:
    return images(16, 1)(rng)[0], rng.standard_normal((2, 6)).astype(np.float32)


def filled(module: Any, *sizes: tuple[int, ...]) -> Any:
    """A linen model as a source, with values."""
    return module, module.init(jax.random.key(0), *(np.zeros(size, np.float32) for size in sizes))


CASES: Final = [
    Case("actor-critic, vectors", "stable-baselines3 → purejaxrl", ActorCriticPolicy,
         lambda batch: shapes(ActorCritic(), batch), features(5),
         names={"^mlp_extractor/policy_net/0$": "Dense_0", "^mlp_extractor/policy_net/2$": "Dense_1"}, tries=2),
    Case("actor-critic, critic first", "stable-baselines3 → purejaxrl", ActorCriticPolicy,
         lambda batch: shapes(CriticFirst(), batch), features(5),
         names={"^mlp_extractor/policy_net/0$": "Dense_3", "^mlp_extractor/policy_net/2$": "Dense_4"}, tries=2),
    Case("actor-critic, images", "stable-baselines3 → purejaxrl", CnnPolicy,
         lambda batch: shapes(FlaxCnnPolicy(), batch), images(30, 4)),
    Case("two heads behind a flatten", "torch → flax linen", TwoHeads,
         lambda batch: shapes(FlaxTwoHeads(), batch), images(30, 4)),
    Case("Q-network", "CleanRL, torch → CleanRL, flax", QNetwork, lambda batch: shapes(FlaxQNetwork(), batch),
         features(4)),
    Case("twin critics (SAC)", "stable-baselines3 → jaxrl", ContinuousCritic,
         lambda batch: shapes(DoubleCritic(), batch), features(4, 3)),
    Case("VAE", "flax's example → torch's example", lambda: filled(FlaxVAE(), (1, 36), (1, 6)), lambda batch: VAE(),
         features(36, 6), names={"^encoder/fc2_mean$": "fc21"}, tries=2),
    Case("VAE with convolutions", "torch → flax linen", ConvVAE, lambda batch: shapes(FlaxConvVAE(), batch),
         image_and_noise),
    Case("DCGAN, generator", "torch's example → flax linen", generator, lambda batch: shapes(Generator(), batch),
         lambda rng: (rng.standard_normal((2, 12, 1, 1)).astype(np.float32),)),
    Case("U-Net with time embedding", "diffusers → flax linen", UNet2DModel,
         lambda batch: shapes(FlaxUNet2DModel(), batch), image_and_time),
    Case("FiLM, image and state", "torch → flax linen", FiLMPolicy, lambda batch: shapes(FlaxFiLMPolicy(), batch),
         image_and_state),
]  # fmt: skip
