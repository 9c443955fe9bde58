"""KV memory as numbered blocks: the pool, the prefix index, and the blocks of one sequence. Pure logic."""
