"""``python -m keysieve.dcp.protocol``."""

from keysieve.dcp.protocol import main

raise SystemExit(main())
