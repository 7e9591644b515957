"""The commands of the command line, a file for each; `interp.__main__` runs them."""
