"""OLMoE with another hidden_act: vLLM always computes silu."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip

if __name__ == "__main__":
    compare("OlmoeForCausalLM", EXPERTS, {"hidden_act": "gelu"})
