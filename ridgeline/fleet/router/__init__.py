"""The I/O around the routing logic: tables and feeds in, requests out to replicas, streams that survive one."""
