"""The logarithm of a scale, and the sign with which it enters the loss: flows, and densities with a spread.

    z = x * s.exp() + t             what was stretched has a lower density: log p(x) = log p(z) + s
    loss = -(prior.log_prob(z) + s.sum(1)).mean()                           s has the sign -1

    loss = (error**2 * (-s).exp() + s).mean()                               here the scale is exp(-s), and s has +1

In a negative log-likelihood a scale and its logarithm pull in opposite directions. With the same sign both pull one
way, and the scale goes to 0 or without end. So the graph of a loss is read from its end: each logarithm that it holds
as a sum, with its sign, and each exp of the same tensor that multiplies something. Of several scales of one shape, as
the layers of a flow have, the loss must hold all: also where it holds none, though their logarithms were summed, for
nothing, and it is one of squares or log-probabilities of what came out.

What came out has a density for each of its numbers, and they must be summed as the logarithms are. As a mean over the
numbers of a row (prior.log_prob(z).mean(), of (B, D)) it weighs D times too little.

Footgun: a logarithm that is multiplied by what has several numbers (a mask, a weight, a count) has no one sign. And one
scale that stretches several numbers (of a row, or in all rows) counts once for each of them.
"""

NODES, KEY = 3000, "loopdoctor_factor"
