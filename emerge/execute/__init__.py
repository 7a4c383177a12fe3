"""Execution of captured graphs with torch: all ranks in lockstep, float64 values, real collective semantics.

Entry points: :mod:`.lockstep` (run), :mod:`.options` (settings), :mod:`.sampling` and :mod:`.dist_inputs` (inputs),
:mod:`.compare` (when values differ), :mod:`.decisions` (samples to redraw), :mod:`.memory` (what fits).
Nothing here imports torch before something runs.
"""
