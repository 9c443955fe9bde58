"""The I/O around the routing logic: reads tables and feeds, sends requests, moves streams to peers."""
