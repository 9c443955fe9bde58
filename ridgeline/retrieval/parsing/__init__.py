"""Files to texts. Offsets of chunks and citations refer to the parsed text, which is kept."""
