"""The I/O around the routing logic: tables and feeds in, requests out, streams that survive a replica."""
