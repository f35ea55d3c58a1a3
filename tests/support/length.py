"""How long the proofs are that can be of any length: seeds, examples, rounds.

`make test` runs each in its short form and leaves none out. `make test-all` sets PDSERVE_TESTS=long: ten times as many.
"""

from __future__ import annotations

import os

LONG = os.environ.get("PDSERVE_TESTS") == "long"


def times(count: int) -> int:
    """So many seeds, examples or rounds; in the long form ten times as many."""
    return 10 * count if LONG else count
