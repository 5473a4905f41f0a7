"""Small seeded models of transformers, one of every family that `replace_moe_layers` knows."""

import copy

import torch
import transformers as hf
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from moe_ep.integrations.transformers import experts_weights, find_experts, record_routing

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 2, 128, 64
NUM_PROMPTS, PROMPT_LENGTHS = 4, (61, 64, 37, 50)
SIZE = dict(vocab_size=256, hidden_size=HIDDEN, num_attention_heads=4, initializer_range=0.08)
MOE = dict(moe_intermediate_size=INTERMEDIATE, num_experts_per_tok=TOP_K)
SHARED = dict(intermediate_size=96, n_routed_experts=NUM_EXPERTS, n_shared_experts=1)

CONFIGS = {
    "Mixtral": lambda: hf.MixtralConfig(
        **SIZE,
        num_hidden_layers=2,
        num_key_value_heads=2,
        intermediate_size=INTERMEDIATE,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
    ),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(
        **SIZE,
        **MOE,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=NUM_EXPERTS,
        norm_topk_prob=True,
    ),
    "Qwen3.5-MoE": lambda: Qwen3_5MoeTextConfig(
        **SIZE,
        **MOE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_key_value_heads=2,
        head_dim=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        shared_expert_intermediate_size=INTERMEDIATE,
        num_experts=NUM_EXPERTS,
    ),
    "DeepSeek-V3": lambda: hf.DeepseekV3Config(
        **SIZE,
        **MOE,
        **SHARED,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    ),
    "DeepSeek-V4": lambda: hf.DeepseekV4Config(
        **SIZE,
        **MOE,
        n_routed_experts=NUM_EXPERTS,
        num_hidden_layers=3,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        layer_types=[
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        swiglu_limit=0.75,  # small, so that the clamp bites
        num_key_value_heads=1,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        sliding_window=16,
        max_position_embeddings=128,
    ),
    "GLM-4-MoE": lambda: hf.Glm4MoeConfig(
        **SIZE,
        **MOE,
        **SHARED,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_key_value_heads=2,
        head_dim=32,
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **SIZE,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=INTERMEDIATE,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        swiglu_limit=0.75,  # small, so that the clamp bites
    ),
}
FAMILIES = list(CONFIGS)


def build_model(family: str) -> hf.PreTrainedModel:
    """A seeded model in BF16 with eager experts; biases and the hash router's table are not 0."""
    torch.manual_seed(FAMILIES.index(family))
    model = hf.AutoModelForCausalLM.from_config(
        CONFIGS[family](), dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    model.set_experts_implementation("eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("_proj_bias", "e_score_correction_bias")):
            tensor.data.normal_(std=0.1)
        elif name.endswith("tid2eid"):
            tensor.copy_(torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in tensor]))
    return model


def hold(model: hf.PreTrainedModel, weights: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Put canonical w13 and w2 in the place of the experts' own, in the experts' dtype."""
    for name, experts in find_experts(model).items():
        w13, w2 = weights[name]
        if experts.is_transposed:
            w13, w2 = w13.mT, w2.mT
        if not experts.is_concatenated:  # rows (or columns) gate, up, gate, up, ...
            dim = 2 if experts.is_transposed else 1
            w13 = torch.stack(w13.chunk(2, dim), dim + 1).flatten(dim, dim + 1)
        experts.gate_up_proj.data.copy_(w13)
        experts.down_proj.data.copy_(w2)


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(256, (1, length), generator=generator) for length in PROMPT_LENGTHS]


@torch.inference_mode()
def run_model(model: hf.PreTrainedModel, prompt: torch.Tensor):
    """FP32 logits [tokens, vocab] of one prompt, and the recorded routing."""
    with record_routing(model) as routing:
        logits = model(input_ids=prompt, use_cache=False).logits[0].float()
    return logits, dict(routing)


def untouched(family: str, weights_format: str) -> tuple[hf.PreTrainedModel, hf.PreTrainedModel]:
    """The same model in BF16 and in FP32, with transformers' own experts, which hold the values
    that the format can hold (in BF16 rounded once more).

    FP32 is cast up from BF16, never down again: routers keep their FP32 biases.
    """
    model = build_model(family)
    exact = copy.deepcopy(model).float()
    if weights_format != "bf16":
        held = {
            name: experts_weights(experts).quantize(weights_format).dequantize(torch.float32)
            for name, experts in find_experts(model).items()
        }
        hold(model, held)
        hold(exact, held)
    return model, exact
