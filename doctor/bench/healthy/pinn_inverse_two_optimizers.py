"""An inverse problem: an oscillator's damping and stiffness are parameters beside the network; Adam
goes first, and then LBFGS takes over the same parameters.

After: maziarraissi/PINNs
"""

import torch
from torch import nn

TRUE_DAMPING, TRUE_STIFFNESS = 0.6, 4.0
frequency = (TRUE_STIFFNESS - TRUE_DAMPING**2 / 4) ** 0.5


def exact(t):
    return torch.exp(-TRUE_DAMPING / 2 * t) * torch.cos(frequency * t)


class PhysicsInformedNN:
    def __init__(self, t_data, u_data, t_physics):
        self.t_data, self.u_data = t_data, u_data
        self.t_physics = t_physics.requires_grad_(True)
        self.damping = nn.Parameter(torch.tensor(0.0))
        self.log_stiffness = nn.Parameter(torch.tensor(0.0))
        self.dnn = nn.Sequential(
            nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
        )
        self.parameters = [*self.dnn.parameters(), self.damping, self.log_stiffness]

    def net_f(self):
        u = self.dnn(self.t_physics)
        (u_t,) = torch.autograd.grad(u.sum(), self.t_physics, create_graph=True)
        (u_tt,) = torch.autograd.grad(u_t.sum(), self.t_physics, create_graph=True)
        return u_tt + self.damping * u_t + self.log_stiffness.exp() * u

    def loss_func(self):
        fit = torch.mean((self.dnn(self.t_data) - self.u_data) ** 2)
        return fit + 0.01 * torch.mean(self.net_f() ** 2)

    def closure(self):
        self.second.zero_grad()
        loss = self.loss_func()
        loss.backward()
        return loss

    def train(self, adam_steps, lbfgs_steps):
        self.first = torch.optim.Adam(self.parameters, lr=5e-3)
        self.second = torch.optim.LBFGS(self.parameters, max_iter=8, line_search_fn="strong_wolfe")
        for step in range(adam_steps):
            self.first.zero_grad()
            loss = self.loss_func()
            loss.backward()
            self.first.step()
            print("adam", step, loss.item())
        for step in range(lbfgs_steps):
            loss = self.second.step(self.closure)
            print("lbfgs", step, loss.item(), self.damping.item(), self.log_stiffness.exp().item())


t = torch.rand(40, 1, generator=torch.manual_seed(5)) * 4
PhysicsInformedNN(t, exact(t), torch.linspace(0, 4, 60).view(-1, 1)).train(10, 10)
