"""Qwen2-MoE with use_sliding_window: vLLM sees everything before a token."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip

if __name__ == "__main__":
    compare("Qwen2MoeForCausalLM", EXPERTS, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1})
