"""The commands of the command line, one file for each command.

Read `command` first: it finds the command in the arguments, runs it and prints its errors in one
line. `common` contains the options, the model, the text and the output that all commands share, and
`edits` reads edits from text.
"""
