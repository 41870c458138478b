"""`python -m disttrain`."""

from disttrain.cli import main
from disttrain.launch.rank import leave

if __name__ == "__main__":
    leave(main())
