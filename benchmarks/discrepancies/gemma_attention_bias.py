"""Gemma with attention_bias: vLLM drops the biases of q, k, v and the output projection."""

from both import SMALL, compare

if __name__ == "__main__":
    compare("GemmaForCausalLM", SMALL, {"attention_bias": True})
