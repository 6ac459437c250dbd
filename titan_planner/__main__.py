"""`python -m titan_planner` is `titan-plan`."""

import sys

from titan_planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
