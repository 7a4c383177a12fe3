"""StableLM with use_parallel_residual: vLLM runs attention and MLP one after the other."""

from both import SMALL, compare

if __name__ == "__main__":
    compare("StableLmForCausalLM", SMALL, {"use_parallel_residual": True})
