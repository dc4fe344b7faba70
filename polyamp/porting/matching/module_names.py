"""Parsing of module names into a framework-independent form: `h.0`, `h_0`, `h0`; `LayerNorm_1`, `ln_1`, `norm1`.

A segment of a path becomes a role (a stem that stands for all its synonyms) and numbers.
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from polyamp.porting.layouts.layer_kinds import KINDS

_ROLES: Final = {
    "norm": " ".join(
        (
            "ln bn gn norm normalization instancenorm instance_norm",
            *(f"{kind} {kind.replace('_', '')} {kind}alization" for kind in KINDS if kind.endswith("_norm")),
        )
    ),
    "final norm": (
        "ln_f norm_f final_norm final_layer_norm final_layernorm ln_final ln_out post_norm norm_out out_norm "
        "final_ln head_norm norm_final f_norm"
    ),
    "attention norm": (
        "attention_norm attn_norm ln_attn norm_attn input_layernorm self_attn_layer_norm attn_ln pre_attention_norm "
        "norm_attention attention_layer_norm pre_attn_norm ln_attention layernorm_before pre_attention_layernorm"
    ),
    "mlp norm": (
        "mlp_norm ffn_norm ln_mlp norm_mlp post_attention_layernorm ffn_ln mlp_ln norm_ffn feed_forward_norm "
        "pre_mlp_norm ln_ffn mlp_layer_norm ff_norm norm_ff layernorm_after pre_mlp_layernorm"
    ),
    "attention": (
        "attn attention self_attn self_attention mha multi_head_attention multihead_attention "
        "multi_head_dot_product_attention self_attention_layer causal_self_attention"
    ),
    "cross attention": (
        "cross_attn cross_attention crossattention encoder_attn encoder_attention enc_dec_attention "
        "encoder_decoder_attention src_attn enc_attn encdec_attn"
    ),
    "encoder": "encoder enc encode",
    "decoder": "decoder dec decode",
    "query": "q query wq to_q q_proj query_proj query_dense w_q q_lin query_projection",
    "key": "k key wk to_k k_proj key_proj key_dense w_k k_lin key_projection",
    "value": "v value wv to_v v_proj value_proj value_dense w_v v_lin value_projection",
    "queries, keys, values": "qkv c_attn in_proj to_qkv qkv_proj query_key_value wqkv attn_qkv",
    "output": "o out wo to_out o_proj out_proj output_dense w_o attention_output out_lin",
    "mlp": "mlp ffn feed_forward feedforward ff mlp_block",
    "up": "c_fc up up_proj intermediate fc_in expand mlp_in dense_in",
    "down": "down down_proj fc_out contract mlp_out dense_out",
    "gate": "gate gate_proj",
    "token embedding": (
        "wte tok_embeddings token_embedding token_embeddings embed_tokens tok_emb token_emb embedding embed "
        "embeddings word_embeddings emb tok_embed token_embed tokens"
    ),
    "position": (
        "wpe pos_embedding position_embedding position_embeddings pos_emb positions pos pe pos_embed "
        "positional_embedding position position_embed position_emb"
    ),
    "class token": "cls cls_token class_token class_embedding",
    "head": "head lm_head classifier logits predictions output_layer cls_head",
    "dense": "linear dense fc lin",
    "conv": "conv conv_1d conv_2d conv_3d convolution convolution_2d conv_1_d conv_2_d conv_3_d",
    "transposed conv": (
        "conv_transpose conv_transpose_1d conv_transpose_2d conv_transpose_3d deconv convt upconv conv_1d_transpose "
        "conv_2d_transpose conv_3d_transpose up_conv"
    ),
    "block": (
        "h block blocks layers layer encoder_layer decoder_layer transformer_block res_block basic_block "
        "residual_block encoder_block decoder_block resblock"
    ),
    "shortcut": "shortcut downsample skip residual conv_proj conv_shortcut",
    "forward": "forward fwd forward_layer forward_rnn forward_lstm forward_gru forward_cell",
    "backward": "backward bwd reverse backward_layer backward_rnn backward_lstm backward_gru backward_cell",
    "lstm": "lstm lstm_cell optimized_lstm_cell bilstm",
    "gru": "gru gru_cell",
    "scale": "scale gamma weight alpha",
    "mean": "mean mu fc_mu mean_head head_mean z_mean fc_mean mu_head to_mean loc",
    "log variance": (
        "logvar log_var fc_logvar fc_log_var logvar_head log_var_head z_log_var z_logvar sigma fc_sigma log_std "
        "logstd log_sigma fc_var log_variance to_logvar std"
    ),
    "actor": "actor policy pi policy_net actor_net policy_head actor_head policy_network",
    "critic": "critic vf value_net value_head critic_net critic_head value_network value_fn",
    "image tower": (
        "visual image_encoder vision_model image vision vision_encoder visual_encoder image_tower vision_tower "
        "image_model"
    ),
    "text tower": "text text_encoder text_model textual text_tower",
    "image projection": "visual_projection image_proj vision_proj image_projection visual_proj",
    "text projection": "text_projection text_proj",
    "student": "student online online_network online_net student_network",
    "teacher": "teacher target_network teacher_network target_net target",
    "generator": "generator gen",
    "discriminator": "discriminator disc",
    "left": "left left_arm left_branch branch_left",
    "right": "right right_arm right_branch branch_right",
}
"""Role -> its names, in lower case, with words joined by "_"."""
_ROLE_OF: Final = {name: role for role, names in _ROLES.items() for name in names.split()}
NATURAL_ORDER: Final = (
    "query",
    "key",
    "value",
    "output",
    "up",
    "gate",
    "down",
    "forward",
    "backward",
    "attention norm",
    "mlp norm",
    "attention",
    "cross attention",
)
"""Roles in the usual order of definition."""
_PARALLEL_ROLES: Final = (
    *("mean", "log variance", "actor", "critic", "image tower", "text tower", "image projection", "text projection"),
    *("student", "teacher", "generator", "discriminator", "left", "right"),
)
"""Roles of parallel branches, which have no natural order of definition."""
_GENERIC_WORDS: Final = frozenset(("head", "net", "network", "branch", "model", "tower"))
"""Words without meaning next to another word: age_head is the head for the age."""
_EMPTY_SEGMENTS: Final = ("~", "cell", "model", "module", "params")
"""Segments without meaning."""


class ModuleName(NamedTuple):
    """Parsed name of one or several path segments, for comparison.

    Attributes:
        stem: the role if there is one, otherwise the words; several segments are joined by "/".
        numbers: the numbers in the name, in order; the first of a numbered family may have none.
    """

    stem: str
    numbers: tuple[int, ...]

    @property
    def has_role(self) -> bool:
        """Whether the last segment has a role that names a purpose, not only a kind of layer."""
        return self.stem.rpartition("/")[2] in _ROLES and self.stem.rpartition("/")[2] not in _KINDS_OF_LAYERS

    @property
    def words(self) -> frozenset[str]:
        """Words of the segments, without those that name a kind of layer.

        >>> sorted(parse_module_name("encoder/mean_head/dense_1").words)
        ['encoder', 'mean']
        """
        return frozenset(
            word
            for segment in self.stem.split("/")
            if segment not in _KINDS_OF_LAYERS
            for word in ([segment] if segment in _ROLES else segment.split("_"))
            if word not in _ROLE_OF or _ROLE_OF[word] not in _KINDS_OF_LAYERS
        )

    @property
    def own(self) -> frozenset[str]:
        """Words without generic ones, unless all are generic.

        >>> parse_module_name("head_age").own == parse_module_name("age").own
        True
        """
        return self.words - _GENERIC_WORDS or self.words

    @property
    def branch(self) -> frozenset[str]:
        """Parallel branch that the module belongs to; empty if none.

        >>> parse_module_name("critic/dense_1").branch == parse_module_name("value_net/fc1").branch == {"critic"}
        True
        """
        return frozenset(self.stem.split("/")).intersection(_PARALLEL_ROLES)


_KINDS_OF_LAYERS: Final = ("norm", "dense", "conv", "transposed conv", "block", "lstm", "gru", "scale")


@functools.lru_cache(maxsize=65536)
def parse_module_name(path: str) -> ModuleName:
    """Parse a path, or a part of one.

    >>> parse_module_name("h.0") == parse_module_name("h_0") == parse_module_name("h0")
    True
    >>> parse_module_name("LayerNorm_1"), parse_module_name("ln_1")
    (ModuleName(stem='norm', numbers=(1,)), ModuleName(stem='norm', numbers=(1,)))
    >>> parse_module_name("attn/q_proj")
    ModuleName(stem='attention/query', numbers=())
    """
    stems: list[str] = []
    numbers: list[int] = []
    for segment in re.split(r"[/.]", path):
        words = _split_words(segment)
        role = _ROLE_OF.get("_".join(words))
        if role is None:
            found = [int(word) for word in words if word.isdigit()]
            plain = [word for word in words if not word.isdigit()]
            role = _ROLE_OF.get("_".join(plain), "_".join(plain))
            numbers += found
        if role and role not in _EMPTY_SEGMENTS:
            stems.append(role)
    return ModuleName("/".join(stems), tuple(numbers))


def _split_words(segment: str) -> list[str]:
    """Return the words and numbers of a segment, in lower case.

    >>> _split_words("MultiHeadDotProductAttention_0"), _split_words("conv2d_1")
    (['multi', 'head', 'dot', 'product', 'attention', '0'], ['conv', '2d', '1'])
    >>> _split_words("fc1"), _split_words("LSTMCell_0")
    (['fc', '1'], ['lstm', 'cell', '0'])
    """
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", segment)
    found = re.findall(r"[123]d(?![a-z])|\d+|[a-z]+|~", re.sub(r"(?<=[123])_d(?![a-z])", "d", spaced.lower()))
    return [str(word) for word in found]
