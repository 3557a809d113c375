"""Puts the simulated cards into this process, if its environment says which; see settings.py."""

import os
import sys
from pathlib import Path

if os.environ.get("FTKIT_TEST_CARD"):
    sys.path.append(str(Path(__file__).parents[2]))
    from simulated_card.process import prepare

    prepare()
