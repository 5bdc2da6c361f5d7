"""fedhet: federated learning for clients whose models differ."""

import os

__version__ = "0.1.0"

# Flower collects usage statistics unless this is set, and reads it once, on import.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
