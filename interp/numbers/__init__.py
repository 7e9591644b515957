"""Numbers: precision, running moments and intervals, for all rooms."""
