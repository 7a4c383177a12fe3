"""Capture tests import their models from this folder, as a user's factory would be imported from his package."""

import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
