"""Numbers: precision, running moments, ranks and intervals, for all rooms."""
