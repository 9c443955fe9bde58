"""`ridgeline doctor`: checks, measurements and calibration of this machine."""
