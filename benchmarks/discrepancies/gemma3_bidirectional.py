"""Gemma 3 with use_bidirectional_attention: vLLM's causal model stays causal."""

from both import SMALL, compare

if __name__ == "__main__":
    compare(
        "Gemma3ForCausalLM",
        SMALL | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        {"use_bidirectional_attention": True},
    )
