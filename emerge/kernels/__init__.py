"""Definitions of kernels in data files (``rules/kernels/*.kernel``, and ``.kernel`` files in a user's rule folders).

``syntax`` reads a file, ``interpret`` evaluates a definition over any kind of tensor, ``lowered`` does so over lowered
tensors; execution over torch tensors is in ``emerge/execute/ops/defined.py``. A file is parsed, never executed.
"""
