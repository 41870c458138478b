"""`python -m disttrain`."""

import sys

from disttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
