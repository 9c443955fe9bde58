"""Two runs side by side: differences and ratios with intervals."""
