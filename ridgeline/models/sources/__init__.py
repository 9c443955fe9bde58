"""Where a replica's weights come from: its cache, peers, object stores. Verified by sha256, or not used."""
