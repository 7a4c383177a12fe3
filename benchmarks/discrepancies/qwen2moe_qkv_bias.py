"""Qwen2-MoE with qkv_bias=False: vLLM adds biases that no checkpoint fills (memory as it was found)."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip

if __name__ == "__main__":
    compare("Qwen2MoeForCausalLM", EXPERTS, {"qkv_bias": False})
