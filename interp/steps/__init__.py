"""Effects between the steps of one text, such as its sentences.

Read `spans` first, the rule that divides a text into sentences or words, and then `stepping`, which
contains the class `Steps`, a text with its steps. Then read the three analyses in any order:
`suppressing` hides one step from all later positions, `resampling` writes a step again (with
`writing`) and compares the answers, and `receiving` finds heads that attend from many later steps
to few steps.
"""
