"""Cohere with another hidden_act: vLLM always computes silu."""

from both import SMALL, compare

if __name__ == "__main__":
    compare("CohereForCausalLM", SMALL, {"hidden_act": "gelu"})
