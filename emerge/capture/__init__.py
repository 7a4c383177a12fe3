"""Capture: live PyTorch programs become graphs (``emerge.graph/1``), one per rank, in one process.

Public entry points (nothing here imports torch before it is called):

- :func:`emerge.capture.trace.capture`: one module or function.
- :func:`emerge.capture.distributed.capture_ranks`: every rank of a parallel program.
- :mod:`emerge.capture.hf`: Hugging Face Transformers models from their configs.
- :func:`emerge.capture.source.load_spec`: whatever a campaign file or the command line names.
- :mod:`emerge.capture.worker`: the same in another Python environment.
"""
