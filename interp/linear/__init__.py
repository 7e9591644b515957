"""Linear maps: of norms, of heads with the norms around them folded in, and of lenses."""
