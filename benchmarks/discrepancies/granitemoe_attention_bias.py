"""GraniteMoE with attention_bias: vLLM drops the biases."""

from both import SMALL, compare

EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "num_attention_heads": 2}

if __name__ == "__main__":
    compare("GraniteMoeForCausalLM", EXPERTS, {"attention_bias": True})
