"""Which requests of a failed replica move to another one."""
