"""Effects between the steps of one text, such as its sentences.

Read `spans` first: the rule that divides a text into sentences or words. `stepping` contains the
class `Steps`, a text with its steps. Three analyses read it: `suppressing` hides one step from all
later positions, `resampling` writes a step again and compares the answers, and `receiving` finds
heads that attend from many later steps to few steps. `writing` continues texts with the model.
"""
