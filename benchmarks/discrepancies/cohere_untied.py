"""Cohere with tie_word_embeddings=False: vLLM drops lm_head and uses the embedding."""

from both import SMALL, compare

if __name__ == "__main__":
    compare("CohereForCausalLM", SMALL, {"tie_word_embeddings": False})
