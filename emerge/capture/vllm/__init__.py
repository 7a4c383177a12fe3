"""vLLM models from their configs, one graph per rank, as vLLM's own code builds and loads them.

Runs where vLLM is installed (``python_env:``), without engine, without weights and without a hub. Public entry point:
:func:`emerge.capture.vllm.model.capture_vllm`; the keys of a spec are in :mod:`emerge.capture.vllm.spec`.
"""
