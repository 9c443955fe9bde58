"""The fleet's controller: one process that runs the replicas and routers which fleet.toml asks for."""
