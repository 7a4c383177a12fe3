"""Process that evaluates one embedded job: a pickled job on stdin, pickled (rows, error message) on stdout."""

from __future__ import annotations

import os
import pickle
import sys

from emerge.engine.embedded import evaluate
from emerge.util.errors import EngineError


def main() -> None:
    """Read, evaluate, answer."""
    # The answer must be alone on stdout: whatever a library prints goes to stderr.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job = pickle.load(sys.stdin.buffer)
    try:
        reply = (evaluate(job), "")
    except EngineError as error:
        reply = ({}, str(error))
    pickle.dump(reply, answer, protocol=pickle.HIGHEST_PROTOCOL)
    answer.close()
