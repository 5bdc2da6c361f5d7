"""fedhet: federated learning for clients whose models differ."""

import os

__version__ = "0.1.0"

# Flower reports usage to its makers unless told not to, and asks this once, when it is imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
