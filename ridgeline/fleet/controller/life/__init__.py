"""The life of one replica, as the controller runs it: start, probe, watch, drain, find again."""
