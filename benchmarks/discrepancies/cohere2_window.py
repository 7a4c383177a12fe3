"""Cohere 2 with a sliding window: a token sees sliding_window tokens in Transformers, one more in vLLM."""

from both import SMALL, compare

if __name__ == "__main__":
    compare(
        "Cohere2ForCausalLM",
        SMALL | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window": 8},
    )
