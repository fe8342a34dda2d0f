"""The nearest of one side, twice: both terms of a Chamfer distance with the minimum over one and the same dim.

    d = torch.cdist(a, b)                                           # (B, N, M)
    loss = d.min(dim=2).values.mean() + d.min(dim=1).values.mean()  each of a has a near b, and each of b a near a
    loss = d.min(dim=2).values.mean() + d.min(dim=-1).values.mean() the first, twice

Footgun: a nearest and a second nearest are taken by topk or sort; the minimum of one tensor over one dim is one number,
so there is no reason to take it twice. Only what learns, from both, is looked at.
"""
