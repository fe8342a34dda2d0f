"""Reptile: each task trains the network itself with a new optimizer, and then the weights are put
back to a point between the old and the new ones; the loss jumps up at each new task.

After: openai/supervised-reptile
"""

from copy import deepcopy

import numpy as np
import torch
from torch import nn

innerstepsize, outerstepsize0 = 0.02, 0.5
niterations = 5
rng = np.random.RandomState(0)
torch.manual_seed(0)
x_all = np.linspace(-5, 5, 48)[:, None]
ntrain = 12


def gen_task():
    phase = rng.uniform(low=0, high=2 * np.pi)
    ampl = rng.uniform(0.5, 2)
    return lambda x: np.sin(x + phase) * ampl


model = nn.Sequential(
    nn.Linear(1, 48),
    nn.Tanh(),
    nn.Linear(48, 48),
    nn.Tanh(),
    nn.Linear(48, 1),
)


def train_on_batch(optimizer, x, y):
    x = torch.as_tensor(x, dtype=torch.float32)
    y = torch.as_tensor(y, dtype=torch.float32)
    optimizer.zero_grad()
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


for iteration in range(niterations):
    weights_before = deepcopy(model.state_dict())
    y_all = gen_task()(x_all)
    inds = rng.permutation(len(x_all))
    optimizer = torch.optim.SGD(model.parameters(), lr=innerstepsize)
    losses = []
    for start in range(0, len(x_all), ntrain):
        mbinds = inds[start : start + ntrain]
        losses.append(train_on_batch(optimizer, x_all[mbinds], y_all[mbinds]))
    weights_after = model.state_dict()
    outerstepsize = outerstepsize0 * (1 - iteration / niterations)
    state = {k: weights_before[k].lerp(weights_after[k], outerstepsize) for k in weights_before}
    model.load_state_dict(state)
    print(iteration, round(outerstepsize, 2), [round(loss, 3) for loss in losses])
