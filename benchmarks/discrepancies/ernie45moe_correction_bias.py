"""Ernie 4.5 MoE: vLLM's router for CPUs ignores e_score_correction_bias where experts are in one group."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
    "tie_word_embeddings": False,
}  # fmt: skip

if __name__ == "__main__":
    compare("Ernie4_5_MoeForCausalLM", EXPERTS, {}, zero="e_score_correction_bias")
