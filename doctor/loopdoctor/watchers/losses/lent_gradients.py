"""A critic that steps on the actor's gradients: they are added to its own before its optimizer steps.

    critic_loss.backward()
    actor_loss = -critic(s, actor(s)).mean()        on its way to the actor it leaves gradients on the critic as well
    actor_loss.backward()
    actor_opt.step(); critic_opt.step()             so the critic also learns to answer higher

    (critic_loss + actor_loss).backward()           the same at once

Where the critic steps before the actor's loss, or its gradients are cleared in between, nothing is wrong. So it is
asked of each backward whether its loss is a plain mean (sum, smaller of two) of what weights of an optimizer answer,
while gradients of another loss wait on them for a step, and whether that optimizer steps next; and of a loss of several
terms whether one is a regression of these weights alone and another such a mean that reaches other weights too.

    actor_loss = critic(s, actor(s)).mean()         the minus is missing: the actor looks for the worst action

Where the critic is trained by a regression, such a loss of the actor must fall as the value rises.

Footgun: two losses of one network are meant to be added. Only an answer that is to rise by itself, beside one that is
held to a target, is taken for this.
"""

NODES, PATHS = 3000, 60
PLAIN = set("Mean Sum Neg Sub Add Rsub Minimum Min Mul Div".split())
PLAIN |= set("Squeeze Unsqueeze View UnsafeView Reshape ReshapeAlias Select Slice Permute T Cat Stack".split())
LAYERS = {"Addmm", "Mm", "Linear", "Convolution"}
