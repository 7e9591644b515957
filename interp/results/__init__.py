"""Tables of effects, and how sure their means are. `result` stands on `intervals`, `places` and `parts`; `plot` draws it."""
