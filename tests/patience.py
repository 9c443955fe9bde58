"""How long a test waits for what must come: reached only by a hang, whatever else the machine is doing."""

PATIENCE_S = 180.0
