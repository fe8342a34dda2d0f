"""What was prepared for the loss and does not fit it: D36 to D44.

Flags that nothing reads, targets that lost their scale, labels in another order than the rows: the model and the loss
are right, and what comes between the data and them is not.

Footgun: data can be meant as they are. Each watcher says by which numbers it is certain, and these checks warn.
"""

EMPTY, CUT = 0.4, 0.02  # shares of heatmaps: that are empty, and whose hill is cut off at the last line or column
