"""Where in a fixture model a fault is: one word for a layer, whatever its path is in each of the six libraries.

Called by the lists of faults. A divergence names modules as the first side does, and either side may be any library.
"""

from __future__ import annotations

import re
from typing import Final

_BLOCK: Final = (
    r"transformer/h/{n}/",
    r"transformer_block{k}/",
    r"block{n}/",
    r"transformer_blocks/{n}/",
    r"layers/{n}/",
)
_GPT: Final = {
    "tokens": r"transformer/wte|token_and_position_embedding/embedding|Embed_0|embedding_layer/token_emb|"
    r"token_embedding|language_model/embed",
    "positions": r"transformer/wpe|token_and_position_embedding/embedding_1|position_embeddings|"
    r"embedding_layer/pos_emb|position_embedding|language_model/positional_embeddings",
    "embedding": r"token_and_position_embedding|embedding_layer",
    "last norm": r"transformer/ln_f|layer_normalization|norm|final_norm|language_model/transformer/layer_norm_4",
    "head": r"lm_head|transformer/wte|token_and_position_embedding/embedding|Embed_0|embedding_layer/token_emb|"
    r"token_embedding|language_model/embed",
}
_GPT_BLOCK: Final = {
    "block": "|".join(each.rstrip("/") for each in _BLOCK),
    "norm 1": "{0}ln_1|{1}layer_normalization|{2}LayerNorm_0|{3}layer_norm1|{4}attention_norm|"
    "language_model/transformer/layer_norm{h0}",
    "attention": "{0}attn(/.*)?|{1}multi_head_attention(/.*)?|{2}MultiHeadDotProductAttention_0(/.*)?|{3}mha(/.*)?|"
    "{4}attention(/.*)?|language_model/transformer/multi_head_attention{m}(/.*)?",
    "norm 2": "{0}ln_2|{1}layer_normalization_1|{2}LayerNorm_1|{3}layer_norm2|{4}mlp_norm|"
    "language_model/transformer/layer_norm{h1}",
    "fc": "{0}mlp/c_fc|{1}sequential/dense|{2}Dense_0|{3}linear1|{4}mlp_in|language_model/transformer/linear{h0}",
    "gelu": "{0}mlp/gelu",
    "proj": "{0}mlp/c_proj|{1}sequential/dense_1|{2}Dense_1|{3}linear2|{4}mlp_out|"
    "language_model/transformer/linear{h1}",
    "mlp": "{0}mlp|{1}sequential",
}
_VIT: Final = {
    "patches": r"conv_proj|patches|embedding|patch_embeddings?|vit/patch_embed",
    "token": r"class_token(/cls)?|cls|cls_token|vit/cls_token",
    "positions": r"pos_embedding|posembed_input(/pos_embedding)?|Transformer/posembed_input(/pos_embedding)?|"
    r"position_embeddings|positional_embedding|vit/pos_embed",
    "last norm": r"ln|layer_normalization_4|Transformer/encoder_norm|final_norm|norm|vit/layer_norm_4",
    "head": r"head|classifier|vit/head",
}
_VIT_BLOCK: Final = {
    "block": r"layers/{n}|Transformer/encoderblock_{n}|encoder/layers/{n}|attention_blocks/{n}",
    "norm 1": r"layers/{n}/ln_1|layer_normalization{h0}|Transformer/encoderblock_{n}/LayerNorm_0|"
    r"encoder/layers/{n}/norm1|attention_blocks/{n}/layer_norm1|vit/layer_norm{h0}",
    "attention": r"layers/{n}/self_attention(/.*)?|multi_head_attention{k}(/.*)?|encoder/layers/{n}/attn(/.*)?|"
    r"Transformer/encoderblock_{n}/MultiHeadDotProductAttention_0(/.*)?|attention_blocks/{n}/attention(/.*)?|"
    r"vit/multi_head_attention{m}(/.*)?",
    "norm 2": r"layers/{n}/ln_2|layer_normalization{h1}|Transformer/encoderblock_{n}/LayerNorm_1|"
    r"encoder/layers/{n}/norm2|attention_blocks/{n}/layer_norm2|vit/layer_norm{h1}",
    "fc": r"layers/{n}/mlp/0|dense{h0}|Transformer/encoderblock_{n}/MlpBlock_0/Dense_0|"
    r"encoder/layers/{n}/mlp/layers/0|attention_blocks/{n}/mlp/layers/0|vit/linear{h0}",
    "gelu": r"layers/{n}/mlp/1|encoder/layers/{n}/mlp/layers/1",
    "proj": r"layers/{n}/mlp/2|dense{h1}|Transformer/encoderblock_{n}/MlpBlock_0/Dense_1|"
    r"encoder/layers/{n}/mlp/layers/2|attention_blocks/{n}/mlp/layers/1|vit/linear{h1}",
    "mlp": r"layers/{n}/mlp|Transformer/encoderblock_{n}/MlpBlock_0|encoder/layers/{n}/mlp|attention_blocks/{n}/mlp",
}
_RESNET: Final = {
    "conv": r"conv1|conv1_conv|conv_init|stem|initial_conv",
    "norm": r"bn1|conv1_bn|bn_init|stem_norm|initial_batchnorm",
    "relu": r"relu|conv1_relu",
    "pool": r"avgpool|avg_pool",
    "head": r"fc|predictions|Dense_0|classifier|logits",
}
_RESNET_BLOCK: Final = {  # block 0 is the first stage, 1 and 2 the second, 1 with a projection
    "block": r"{t}|ResNetBlock_{n}|blocks/{n}|layers/{n}|block_{h}",
    "conv 1": r"{t}/conv1|{k}_1_conv|ResNetBlock_{n}/Conv_0|blocks/{n}/conv1|layers/{n}/conv1|block_{h}/~/conv_0",
    "norm 1": r"{t}/bn1|{k}_1_bn|ResNetBlock_{n}/BatchNorm_0|blocks/{n}/norm1|layers/{n}/bn1|block_{h}/~/batchnorm_0",
    "relu 1": r"{t}/relu|{k}_1_relu",
    "conv 2": r"{t}/conv2|{k}_2_conv|ResNetBlock_{n}/Conv_1|blocks/{n}/conv2|layers/{n}/conv2|block_{h}/~/conv_1",
    "norm 2": r"{t}/bn2|{k}_2_bn|ResNetBlock_{n}/BatchNorm_1|blocks/{n}/norm2|layers/{n}/bn2|block_{h}/~/batchnorm_1",
    "out": r"{t}/relu(#2)?|{k}_(out|add)",
    "project": r"{t}/downsample/0|{k}_0_conv|ResNetBlock_{n}/conv_proj|blocks/{n}/shortcut/layers/0|"
    r"layers/{n}/downsample/layers/0|block_{h}/~/shortcut_conv",
    "project norm": r"{t}/downsample(/1)?|{k}_0_bn|ResNetBlock_{n}/norm_proj|blocks/{n}/shortcut(/layers/1)?|"
    r"layers/{n}/downsample(/layers/1)?|block_{h}/~/shortcut_batchnorm",
}
_TAGGER: Final = {
    "words": r"word_embeddings|embedding|Embed_0|embed",
    "lstm": r"lstm|bidirectional|bidirectional_1|Bidirectional_[01]|lstm[12]|rnns/[01]",
    "cells 0": r"lstm(/layer_0(/forward|/backward)?)?|bidirectional(/forward|/backward)?|OptimizedLSTMCell_[01]|"
    r"lstm1(/(forward|backward)_rnn(/cell)?)?|rnns/0(/(forward|backward)_cell)?|(forward|backward)_0|Bidirectional_0",
    "cells 1": r"lstm(/layer_1(/forward|/backward)?)?|bidirectional_1(/forward|/backward)?|OptimizedLSTMCell_[23]|"
    r"lstm2(/(forward|backward)_rnn(/cell)?)?|rnns/1(/(forward|backward)_cell)?|(forward|backward)_1|Bidirectional_1",
    "head": r"hidden2tag|dense|Dense_0|head|linear",
}
_AUTOENCODER: Final = {
    "conv 0": r"encoder/0|conv2d|encoder/Conv_0|conv1|encoder/layers/0|conv2_d",
    "relu 0": r"encoder/1|encoder/layers/1",
    "pool 0": r"encoder/2|max_pooling2d|encoder/layers/2",
    "conv 1": r"encoder/3|conv2d_1|encoder/Conv_1|conv2|encoder/layers/3|conv2_d_1",
    "relu 1": r"encoder/4|encoder/layers/4",
    "pool 1": r"encoder/5|max_pooling2d_1|encoder/layers/5",
    "encoder": r"encoder",
    "deconv 0": r"decoder/0|conv2d_transpose|decoder/ConvTranspose_0|deconv1|decoder/layers/0|conv2_d_transpose",
    "relu 2": r"decoder/1|decoder/layers/1",
    "deconv 1": r"decoder/2|conv2d_transpose_1|decoder/ConvTranspose_1|deconv2|decoder/layers/2|conv2_d_transpose_1",
}
_ONE: Final = {"gpt": _GPT, "vit": _VIT, "resnet": _RESNET, "tagger": _TAGGER, "autoencoder": _AUTOENCODER}
_EACH: Final = {"gpt": _GPT_BLOCK, "vit": _VIT_BLOCK, "resnet": _RESNET_BLOCK}
_STAGES: Final = (
    ("layer1/0", "layer2/0", "layer2/1"),
    ("conv2_block1", "conv3_block1", "conv3_block2"),
    ("0_0", "1_0", "1_1"),
)


def _suffix(number: int) -> str:
    return f"_{number}" if number else ""


def paths(model: str, *places: str) -> str:
    """A regular expression of the paths of places, in every library.

    Args:
        model: of `common.MODELS`.
        places: words of the tables above; one of a block is followed by "@" and its number. "whole": the model itself;
            "any": every module.

    Example:
        >>> bool(re.fullmatch(paths("gpt", "norm 1@1"), "transformer/h/1/ln_1"))
        True
    """
    found = []
    for place in places:
        if place in ("whole", "any"):
            found.append("" if place == "whole" else ".*")
            continue
        name, _, block = place.partition("@")
        if not block:
            found.append(_ONE[model][name])
            continue
        number = int(block)
        words = {"n": number, "k": _suffix(number), "m": _suffix(number), "h0": _suffix(2 * number)}
        words["h1"] = _suffix(2 * number + 1)
        if model == "resnet":
            words |= dict(zip("tkh", (stage[number] for stage in _STAGES), strict=True))
        prefixes = [each.format(n=number, k=_suffix(number)) for each in _BLOCK]
        found.append(
            re.sub(
                r"\{(\w+)\}",
                lambda m, p=prefixes, w=words: p[int(m[1])] if m[1].isdigit() else str(w[m[1]]),
                _EACH[model][name],
            )
        )
    return "|".join(f"(?:{each})" for each in found)
