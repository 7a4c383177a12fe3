"""GPT-OSS with another swiglu_alpha: vLLM always takes 1.702."""

from both import SMALL, compare

EXPERTS = SMALL | {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

if __name__ == "__main__":
    compare("GptOssForCausalLM", EXPERTS, {"swiglu_alpha": 1.0})
