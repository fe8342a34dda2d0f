"""The critic is trained on advantages with their graph, so both values of each step are moved.

Threads: https://github.com/Farama-Foundation/Gymnasium/issues/1494
Names: F81
Missed: the errors of all steps are stacked before they are squared
"""

import torch
import torch.nn as nn

torch.manual_seed(23)
ENVS, STEPS, OBSERVATION, ACTIONS, GAMMA = 6, 10, 5, 2, 0.97
actor = nn.Sequential(nn.Linear(OBSERVATION, 32), nn.Tanh(), nn.Linear(32, ACTIONS))
critic = nn.Sequential(nn.Linear(OBSERVATION, 32), nn.Tanh(), nn.Linear(32, 1))
actor_optim = torch.optim.RMSprop(actor.parameters(), lr=1e-3)
critic_optim = torch.optim.RMSprop(critic.parameters(), lr=5e-3)


def act(obs):
    policy = torch.distributions.Categorical(logits=actor(obs))
    action = policy.sample()
    return action, policy.log_prob(action), policy.entropy()


obs = torch.randn(ENVS, OBSERVATION)
for update in range(16):
    value_preds = []
    rewards = []
    log_probs = []
    entropies = []
    for _ in range(STEPS):
        value_preds.append(critic(obs).squeeze(-1))
        action, log_prob, entropy = act(obs)
        rewards.append(((action == 1) == (obs[:, 0] > 0)).float())
        log_probs.append(log_prob)
        entropies.append(entropy)
        drift = 0.1 * (action - 0.5).unsqueeze(1)
        obs = 0.9 * obs + drift + 0.4 * torch.randn(ENVS, OBSERVATION)
    value_preds.append(critic(obs).squeeze(-1))
    errors = []
    for t in range(STEPS):
        # broken
        next_value = value_preds[t + 1]
        # mended
        # next_value = value_preds[t + 1].detach()
        # end
        errors.append(rewards[t] + GAMMA * next_value - value_preds[t])
    advantages = torch.stack(errors)
    critic_loss = advantages.pow(2).mean()
    gain = advantages.detach() * torch.stack(log_probs)
    actor_loss = -gain.mean() - 0.01 * torch.stack(entropies).mean()
    critic_optim.zero_grad()
    critic_loss.backward()
    critic_optim.step()
    actor_optim.zero_grad()
    actor_loss.backward()
    actor_optim.step()
    if update % 5 == 0:
        print(update, f"{critic_loss.item():.3f}", f"{torch.stack(rewards).mean().item():.3f}")
