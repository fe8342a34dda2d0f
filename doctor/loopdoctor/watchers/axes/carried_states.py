"""The state of a recurrent network that goes from one batch into the next, where the batches have nothing in common.

    output, state = lstm(x, state); state = state.detach()      in a loop over DataLoader(..., shuffle=True)

The end of one text is a good beginning for the next piece of the same text. A row of a shuffled batch has no such
beginning: it is told what another row has left behind. States are known by their numbers, and a loader by its sampler.

Footgun: a loader that shuffles may stand beside data that do not come from it. So the batch must be as large as the
loader's.
"""

NETWORKS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
