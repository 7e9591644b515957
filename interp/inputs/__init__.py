"""What analyses are given: texts, pairs of them, and positions in them."""
