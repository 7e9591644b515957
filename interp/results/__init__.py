"""Tables of effects, and how sure their means are. `result` stands on `parts`, `places` and `node`."""
