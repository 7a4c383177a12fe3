"""``emerge replay``: executes a saved counterexample again and says whether the difference shows again."""

from __future__ import annotations

import json
import math
from pathlib import Path

from emerge.cli import options as opt
from emerge.util.errors import BudgetExceeded, ExecutionError, InputError


def replay_pair(directory: Path, pair: str, *, full: bool, memory_gb: float | None, form: str) -> int:
    """Exit status: 1 the sides differ again, 0 they agree, 3 it could not be decided.

    Raises:
        InputError: there is no counterexample of this pair, or it is malformed.
    """
    from emerge.campaign.counterexample import counterexample_folder

    folder = counterexample_folder(directory, pair)
    try:
        from emerge.execute.counterexample import replay
    except ImportError as e:
        raise InputError(f"execution is not available ({e}); install torch") from None
    memory = None if memory_gb is None else int(memory_gb * 2**30)
    sizes, largest, output = "captured" if full else "", None, ""
    try:
        found = replay(folder, full, memory_bytes=memory)
    except (ExecutionError, BudgetExceeded) as e:
        outcome, reason = "impossible", str(e)
    else:
        outcome, reason, sizes = "refuted" if found.differs else "agree", found.message, found.sizes
        if found.mismatches:
            largest, output = float(found.mismatches[0].difference.max_abs_diff), found.mismatches[0].reference
    if form == "json":
        shown = largest if largest is None or math.isfinite(largest) else str(largest)
        doc = {
            "schema": "emerge.replay/1", "pair": pair, "outcome": outcome, "reason": reason, "output": output,
            "max_abs_diff": shown, "sizes": sizes,
        }  # fmt: skip
        opt.emit(json.dumps(doc, indent=1) + "\n")
    else:
        words = {"refuted": "differs again", "agree": "agrees now", "impossible": "could not be decided"}
        opt.emit(f"{pair}: {words[outcome]}{f' ({sizes} sizes)' if sizes else ''}: {reason}\n")
    return {"refuted": opt.FAILED, "agree": opt.OK}.get(outcome, opt.UNKNOWN)
