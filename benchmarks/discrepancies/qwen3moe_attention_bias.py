"""Qwen3-MoE with attention_bias: vLLM drops the bias of the output projection."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip

if __name__ == "__main__":
    compare("Qwen3MoeForCausalLM", EXPERTS, {"attention_bias": True})
