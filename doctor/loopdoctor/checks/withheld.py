"""What a program leaves out without a word: F106 to F110, F112 to F115, F120, D33 to D35, S48 to S50.

A network that is not told how noisy its input is, a level that a window lost, an order that attention can't see.
Nothing in the line that is there is wrong; something else is missing.

Footgun: what is missing may have been left out on purpose. Each watcher says when it is certain, and these checks warn.
"""

FAR, STRANGE, ROWS = 0.02, 2.5, 48  # of a mean; spreads below which rows are strangers; rows that were compared
