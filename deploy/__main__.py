"""The pdserve command's first moments: `python -m deploy`.

Ctrl-C while the libraries are read ends the process without a trace, and modules of the user's that stand in the way
of the product's are named in one line.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from deploy.cli import main as command
    except ImportError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
