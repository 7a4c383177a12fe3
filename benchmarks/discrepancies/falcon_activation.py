"""Falcon with another activation: vLLM always computes gelu."""

from both import compare

if __name__ == "__main__":
    compare(
        "FalconForCausalLM",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 1,
        },
        {"activation": "relu"},
    )
