"""What the console shows of a server: figures of its engines, its last requests, lab reports, prompt lint."""
