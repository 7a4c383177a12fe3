"""Longrope with an attention_factor: vLLM computes its own factor from the lengths."""

from both import SMALL, compare

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 16, "long_factor": [1.0 + 0.2 * i for i in range(16)],
}  # fmt: skip

if __name__ == "__main__":
    compare(
        "LlamaForCausalLM",
        SMALL | {"rope_parameters": LONGROPE},
        {"rope_parameters": LONGROPE | {"attention_factor": 2.0}},
    )
