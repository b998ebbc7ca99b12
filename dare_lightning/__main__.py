"""`python -m dare_lightning`."""

from __future__ import annotations

import sys


def main() -> int:
    """Entry point of the `dare-lightning` script."""
    from dare_lightning.cli.app import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
