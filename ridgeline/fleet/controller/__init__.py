"""The fleet's controller: one process that keeps replicas and routers as fleet.toml wants them."""
