"""The pdserve command's first moments: `python -m deploy`.

Ctrl-C while the libraries are read ends the process without a trace, and a module of the user's that stands in the way
of one of the product's is named in one line.
"""

from __future__ import annotations

import signal
import sys

from deploy.installation import foreign_module


def main() -> None:
    if (foreign := foreign_module()) is not None:
        print(f"pdserve: {foreign}", file=sys.stderr)
        sys.exit(2)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from deploy.cli import main as command

    try:
        signal.signal(signal.SIGINT, before)
        command()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
