"""The simulator: the engine's real scheduler and KV pool under planned traffic, with fitted step times."""
