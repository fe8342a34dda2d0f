"""Q-learning whose target, or what meets it, is the value of another action or state than the one that was meant.

    q = net(states).gather(1, actions[:, None]).squeeze(1)
    target = reward + gamma * target_net(next_states).max(1).values

    q = net(states).max(1).values                   that of another action than the one that earned the reward
    target_net(next_states).max()                   the largest of the whole batch, for each of its rows
    target_net(states).max(1).values                where the action was taken, and not where it led to

Maxima without a graph are followed through arithmetic into a target, and it is asked what meets them there.

Footguns: a maximum that learns is right elsewhere (pooling, several instances), so only one over as many values as the
target's own maximum is meant. Targets are also scaled by their largest number, and what a teacher is sure of is one; a
bootstrap is added to something that has a number for each row. The largest of all may be one of a table of costs, and
no answer of a layer. A network may be asked for the value of the same state for other ends, so all that it was asked
without a graph must be of the states that learn, what learns must be the value of an action that was picked, and the
maximum be one of the network's answer itself; and where it was given the very same tensor, another one of its shape
must be at hand, or there is no next state. With double Q-learning it is a value that was picked there, which is
scaled by a discount. Where each episode has one step, the next state is any, and what follows it counts nothing; where
there is but one state it is the next one as well; and of a few rows all may have bumped into a wall. A largest number
that is taken off first, and added again after an exponential, changes nothing.
"""

KEPT = {
    *("mul", "multiply", "add", "sub", "subtract", "rsub", "__rsub__", "where", "masked_fill", "squeeze", "unsqueeze"),
    *("view", "reshape", "detach", "flatten", "__getitem__", "clamp", "float", "to", "neg", "div", "minimum"),
}
FRAMES, FEW = 60, 200  # of the stack; names in one place
LEAST, MANY = 2, 8  # sizes of what a maximum is taken of; calls of one shape in a step
