"""A recurrent network of whose answer the first place is read: that place has seen one step of each row.

    output, _ = lstm(x)                                 # (B, T, H) with batch_first
    head(output[:, 0])                                  the state after the first step
    head(output[:, -1])

    output, _ = lstm(x)                                 # (B, T, H)
    head(output[0]), head(output[-1])                   a row, where batch_first was forgotten: S21

Footgun: with two directions the first place holds the end of the way back. And the first place may be one of several
that are read.
"""

BOTH, BATCH_FIRST, LEAST = 7, 8, 3  # places of two arguments of the function; steps of a row
