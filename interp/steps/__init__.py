"""Effects between the steps of one text, such as its sentences.

Read `spans` first: the rule that divides a text into sentences, words or turns. `stepping` contains
the class `Steps`, a text with its steps. `suppressing` hides one step from all later positions.
"""
