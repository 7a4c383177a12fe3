"""Qwen3-MoE with another hidden_act: vLLM's experts always compute silu."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip

if __name__ == "__main__":
    compare("Qwen3MoeForCausalLM", EXPERTS, {"hidden_act": "gelu"})
