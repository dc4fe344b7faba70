"""Networks for images, from transformers, torchvision and timm to flax linen.

GoogLeNet: Szegedy et al., 2014, as torchvision has it. AlexNet: Krizhevsky, 2014, as torchvision has it. U-Net:
Ronneberger et al., 2015, as milesial/Pytorch-UNet has it. Mixer: Tolstikhin et al., 2021, as timm and
google-research/vision_transformer have it. BiT: Kolesnikov et al., 2019, as timm's `resnetv2` and
google-research/big_transfer have it. All are written anew, small.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
import torch
import transformers
from flax import linen
from torch import nn
from torch.nn import functional as F

from tests.porting.public.linen_models import ResNet, VisionTransformer
from tests.porting.public.zoo.building_blocks import shapes
from tests.porting.public.zoo.case import Case, images


# GoogLeNet: concatenation, global pooling, one dense layer.
class BasicConv2d(nn.Module):
    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, bias=False, **options)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Any) -> Any:
        return F.relu(self.bn(self.conv(x)))


class Inception(nn.Module):
    def __init__(self, inputs: int, one: int, two: tuple[int, int], three: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.branch1 = BasicConv2d(inputs, one, kernel_size=1)
        self.branch2 = nn.Sequential(
            BasicConv2d(inputs, two[0], kernel_size=1), BasicConv2d(*two, kernel_size=3, padding=1)
        )
        self.branch3 = nn.Sequential(
            BasicConv2d(inputs, three[0], kernel_size=1), BasicConv2d(*three, kernel_size=3, padding=1)
        )
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), BasicConv2d(inputs, pooled, kernel_size=1))

    def forward(self, x: Any) -> Any:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 8, kernel_size=7, stride=2, padding=3)
        self.conv2 = BasicConv2d(8, 8, kernel_size=1)
        self.inception3a = Inception(8, 4, (6, 8), (3, 4), 4)
        self.inception3b = Inception(20, 8, (6, 12), (4, 8), 4)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(self.conv2(self.conv1(x)), 2)
        x = self.inception3b(self.inception3a(x))
        return self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))


class FlaxConv(linen.Module):
    features: int
    window: int
    strides: int = 1

    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        pad = self.window // 2
        x = linen.Conv(
            self.features, (self.window,) * 2, (self.strides,) * 2, ((pad, pad),) * 2, use_bias=False, name="conv"
        )(x)
        x = linen.BatchNorm(use_running_average=not train, epsilon=0.001, momentum=0.9, name="bn")(x)
        return linen.relu(x)


class FlaxInception(linen.Module):
    one: int
    two: tuple[int, int]
    three: tuple[int, int]
    pooled: int

    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        one = FlaxConv(self.one, 1, name="branch1")(x, train)
        two = FlaxConv(self.two[1], 3, name="branch2_1")(FlaxConv(self.two[0], 1, name="branch2_0")(x, train), train)
        three = FlaxConv(self.three[0], 1, name="branch3_0")(x, train)
        three = FlaxConv(self.three[1], 3, name="branch3_1")(three, train)
        pooled = linen.max_pool(x, (3, 3), (1, 1), ((1, 1), (1, 1)))
        pooled = FlaxConv(self.pooled, 1, name="branch4_1")(pooled, train)
        return jnp.concatenate([one, two, three, pooled], -1)


class FlaxGoogLeNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = FlaxConv(8, 1, name="conv2")(FlaxConv(8, 7, 2, name="conv1")(x, train), train)
        x = linen.max_pool(x, (2, 2), (2, 2))
        x = FlaxInception(4, (6, 8), (3, 4), 4, name="inception3a")(x, train)
        x = FlaxInception(8, (6, 12), (4, 8), 4, name="inception3b")(x, train)
        x = linen.Dropout(0.2, deterministic=not train)(x.mean((1, 2)))
        return linen.Dense(10, name="fc")(x)


# AlexNet: adaptive pooling and a flatten between features and classifier.
class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(8, 12, 5, padding=2), nn.ReLU(),
            nn.Conv2d(12, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((5, 5))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(8 * 25, 24),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(24, 24),
            nn.ReLU(),
            nn.Linear(24, 10),
        )

    def forward(self, x: Any) -> Any:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class FlaxAlexNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = linen.relu(linen.Conv(8, (5, 5), 2, ((2, 2), (2, 2)))(x))
        x = linen.max_pool(x, (3, 3), (2, 2))
        x = linen.relu(linen.Conv(12, (5, 5), 1, ((2, 2), (2, 2)))(x))
        x = linen.relu(linen.Conv(8, (3, 3), 1, ((1, 1), (1, 1)))(x))
        x = linen.max_pool(x, (3, 3), (2, 2))
        x = linen.Dropout(0.5, deterministic=not train)(x.reshape(len(x), -1))
        x = linen.Dropout(0.5, deterministic=not train)(linen.relu(linen.Dense(24)(x)))
        return linen.Dense(10)(linen.relu(linen.Dense(24)(x)))


# U-Net for segmentation: transposed convolutions and skips.
class DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, 2)
        self.conv = DoubleConv(inputs, outputs)

    def forward(self, x: Any, skip: Any) -> Any:
        return self.conv(torch.cat([skip, self.up(x)], 1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = DoubleConv(3, 8), DoubleConv(8, 16), DoubleConv(16, 32)
        self.up1, self.up2 = Up(32, 16), Up(16, 8)
        self.outc = nn.Conv2d(8, 2, 1)

    def forward(self, x: Any) -> Any:
        one = self.inc(x)
        two = self.down1(F.max_pool2d(one, 2))
        x = self.up1(self.down2(F.max_pool2d(two, 2)), two)
        return self.outc(self.up2(x, one))


class FlaxDoubleConv(linen.Module):
    features: int

    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        for _ in range(2):
            x = linen.Conv(self.features, (3, 3), use_bias=False)(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x


class FlaxUNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        one = FlaxDoubleConv(8, name="inc")(x, train)
        two = FlaxDoubleConv(16, name="down1")(linen.max_pool(one, (2, 2), (2, 2)), train)
        x = FlaxDoubleConv(32, name="down2")(linen.max_pool(two, (2, 2), (2, 2)), train)
        for number, skip in ((1, two), (2, one)):
            x = linen.ConvTranspose(x.shape[-1] // 2, (2, 2), (2, 2), transpose_kernel=True, name=f"up{number}_up")(x)
            x = FlaxDoubleConv(skip.shape[-1], name=f"up{number}_conv")(jnp.concatenate([skip, x], -1), train)
        return linen.Conv(2, (1, 1), name="outc")(x)


# MLP-Mixer.
class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.fc2(self.act(self.fc1(x)))


class MixerBlock(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(width, eps=1e-6), Mlp(length, 8)
        self.norm2, self.mlp_channels = nn.LayerNorm(width, eps=1e-6), Mlp(width, 64)

    def forward(self, x: Any) -> Any:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 24, 8, 8)

    def forward(self, x: Any) -> Any:
        return self.proj(x).flatten(2).transpose(1, 2)


class MlpMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = PatchEmbed()
        self.blocks = nn.Sequential(*(MixerBlock(16, 24) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(24, eps=1e-6), nn.Linear(24, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


class MlpBlock(linen.Module):
    mlp_dim: int

    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = linen.gelu(linen.Dense(self.mlp_dim)(x), approximate=False)
        return linen.Dense(x.shape[-1])(y)


class FlaxMixerBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        y = jnp.swapaxes(linen.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(MlpBlock(8, name="token_mixing")(y), 1, 2)
        return x + MlpBlock(64, name="channel_mixing")(linen.LayerNorm()(x))


class FlaxMlpMixer(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(24, (8, 8), (8, 8), name="stem")(x)
        x = x.reshape(len(x), -1, 24)
        for _ in range(2):
            x = FlaxMixerBlock()(x)
        x = linen.LayerNorm(name="pre_head_layer_norm")(x).mean(1)
        return linen.Dense(10, name="head")(x)


# BiT: standardized convolutions, group norm first.
class StdConv2d(nn.Conv2d):
    def forward(self, x: Any) -> Any:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) / torch.sqrt(variance + 1e-10)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class PreActBottleneck(nn.Module):
    def __init__(self, inputs: int, middle: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.downsample = None
        if inputs != outputs:
            self.downsample = StdConv2d(inputs, outputs, 1, stride, bias=False)
        self.norm1, self.conv1 = nn.GroupNorm(4, inputs), StdConv2d(inputs, middle, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, middle)
        self.conv2 = StdConv2d(middle, middle, 3, stride, 1, bias=False)
        self.norm3, self.conv3 = nn.GroupNorm(4, middle), StdConv2d(middle, outputs, 1, bias=False)

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm1(x))
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv2(F.relu(self.norm2(self.conv1(y))))
        return self.conv3(F.relu(self.norm3(y))) + shortcut


class ResNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = StdConv2d(3, 16, 7, 2, 3, bias=False)
        self.stages = nn.Sequential(
            nn.Sequential(PreActBottleneck(16, 8, 32, 1), PreActBottleneck(32, 8, 32, 1)),
            nn.Sequential(PreActBottleneck(32, 16, 64, 2)),
        )
        self.norm, self.head = nn.GroupNorm(4, 64), nn.Conv2d(64, 10, 1)

    def forward(self, x: Any) -> Any:
        x = F.relu(self.norm(self.stages(self.stem(x))))
        return self.head(x.mean((2, 3), keepdim=True)).flatten(1)


class StdConv(linen.Conv):
    def param(self, name: str, *rest: Any, **options: Any) -> Any:
        value = super().param(name, *rest, **options)
        if name != "kernel":
            return value
        value = value - value.mean((0, 1, 2))
        return value / jnp.sqrt(value.var((0, 1, 2)) + 1e-10)


class ResidualUnit(linen.Module):
    middle: int
    outputs: int
    strides: int = 1

    @linen.compact
    def __call__(self, x: Any) -> Any:
        def norm(name: str) -> Any:
            return linen.GroupNorm(4, epsilon=1e-5, name=name)

        y = linen.relu(norm("gn1")(x))
        if x.shape[-1] != self.outputs:
            x = StdConv(self.outputs, (1, 1), self.strides, use_bias=False, name="conv_proj")(y)
        y = StdConv(self.middle, (1, 1), use_bias=False, name="conv1")(y)
        y = linen.relu(norm("gn2")(y))
        y = StdConv(self.middle, (3, 3), self.strides, ((1, 1), (1, 1)), use_bias=False, name="conv2")(y)
        y = linen.relu(norm("gn3")(y))
        return StdConv(self.outputs, (1, 1), use_bias=False, name="conv3")(y) + x


class BigTransfer(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = StdConv(16, (7, 7), 2, ((3, 3), (3, 3)), use_bias=False, name="conv_root")(x)
        x = ResidualUnit(8, 32, name="block1_unit01")(x)
        x = ResidualUnit(8, 32, name="block1_unit02")(x)
        x = ResidualUnit(16, 64, 2, name="block2_unit01")(x)
        x = linen.relu(linen.GroupNorm(4, epsilon=1e-5, name="norm-pre-head")(x))
        return linen.Dense(10, name="conv_head")(x.mean((1, 2)))


def vit_source() -> Any:
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        num_labels=10, layer_norm_eps=1e-6,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet_source() -> Any:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[32, 64], depths=[2, 2], num_labels=10)
    )


CASES: Final = [
    Case(
        "ViT", "transformers → vision_transformer (linen)", vit_source,
        lambda batch: shapes(
            VisionTransformer(num_classes=10, patches=8, hidden_size=32, layers=2, mlp_dim=64, num_heads=4), batch
        ),
        images(),
        names={
            r"^vit/layers/(\d+)/layernorm_before$": r"encoderblock_\1/LayerNorm_0",
            r"^vit/layers/(\d+)/layernorm_after$": r"encoderblock_\1/LayerNorm_1",
        },
        tries=2,
    ),
    Case(
        "ResNet v1.5", "transformers → flax's ImageNet example", resnet_source,
        lambda batch: shapes(ResNet(stage_sizes=[2, 2], num_filters=8, num_classes=10), batch), images(),
        names={"shortcut/normalization": "shortcut/norm_proj"}, tries=2,
    ),
    Case("GoogLeNet", "torchvision → flax linen", GoogLeNet, lambda batch: shapes(FlaxGoogLeNet(), batch), images()),
    Case("AlexNet", "torchvision → flax linen", AlexNet, lambda batch: shapes(FlaxAlexNet(), batch), images(48)),
    Case("U-Net", "Pytorch-UNet → flax linen", UNet, lambda batch: shapes(FlaxUNet(), batch), images(16)),
    Case("MLP-Mixer", "timm → vision_transformer (linen)", MlpMixer, lambda batch: shapes(FlaxMlpMixer(), batch),
         images()),
    Case("ResNetV2 (BiT)", "timm → big_transfer (linen)", ResNetV2, lambda batch: shapes(BigTransfer(), batch),
         images()),
]  # fmt: skip
