"""``python -m scalewise`` is ``scalewise``."""

import sys

from scalewise.cli import main

if __name__ == "__main__":
    sys.exit(main())
