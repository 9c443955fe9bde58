"""Hardware: the chips the planner knows (`table`), and this machine's processor (`this_machine`)."""
