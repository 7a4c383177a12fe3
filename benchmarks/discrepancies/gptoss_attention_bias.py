"""GPT-OSS with attention_bias=False: vLLM adds biases that no checkpoint fills (memory as it was found)."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip

if __name__ == "__main__":
    compare("GptOssForCausalLM", EXPERTS, {"attention_bias": False})
