"""Mixtral with another hidden_act: vLLM always computes silu."""

from both import SMALL, compare

EXPERTS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}

if __name__ == "__main__":
    compare("MixtralForCausalLM", EXPERTS, {"hidden_act": "gelu"})
