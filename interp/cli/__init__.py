"""The commands of the command line, one file for each command.

Read `command` first, which finds the command in the arguments, runs it and prints its errors in one
line, then `common` (the options, the model, the text and the output of all commands) and `edits`
(edits as texts). The other files are the commands: `features`, `generate`, `harvest`, `lens`,
`patch`, `points`, `report`, `trace` and `verify`.
"""
