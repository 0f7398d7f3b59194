"""`python -m keysieve`: the command line."""

import sys

from keysieve.cli.main import main

sys.exit(main())
