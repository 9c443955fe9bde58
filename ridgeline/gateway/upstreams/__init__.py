"""Where answers come from: connections, credentials, retries, breakers, health."""
