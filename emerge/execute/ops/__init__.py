"""Operator implementations by name.

``OPS`` maps an operator name to a function of one :class:`Call`; every ATen operator without an entry runs as this
torch has it. An operator with neither is unknown, which is an error that names it.
"""

from __future__ import annotations

from emerge.execute.ops import attention, hlo, kernels, layout, python, tensors, vllm
from emerge.execute.ops.base import OPS, Call, OpFunction, lookup, op

__all__ = [
    "OPS", "Call", "OpFunction", "attention", "hlo", "kernels", "layout", "lookup", "op", "python", "tensors", "vllm",
]  # fmt: skip
