"""DeepSeek-V2 with attention_bias: vLLM drops the biases."""

from both import SMALL, compare, in_process

LATENT = {k: v for k, v in SMALL.items() if k != "head_dim"} | {
    "num_key_value_heads": 2, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip

if __name__ == "__main__":
    compare("DeepseekV2ForCausalLM", LATENT, {"attention_bias": True}, how=in_process)
