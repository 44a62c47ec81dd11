"""GTPO in a training loop of your own: from completions, rewards and hidden states to the gradient, with PyTorch alone.

It needs gtpo_loss.py and gtpo/forward/head.py, installed or on the path:

    PYTHONPATH=. python examples/own_loop.py
"""

import torch

from gtpo.forward.head import linear_logps_and_entropy
from gtpo_loss import completion_entropy, conflict_mask, conflict_weights, entropy_filter, gtpo_loss

G, T, H, V = 4, 6, 32, 100  # completions of one prompt, tokens, hidden size, vocabulary
hidden = torch.randn(G, T, H, requires_grad=True)  # of your model: position t predicts token t
lm_head = torch.randn(V, H)
completion_ids = torch.randint(V, (G, T))
completion_ids[:, :2] = torch.tensor([7, 8])  # all completions open with the same two tokens
completion_mask = torch.ones(G, T, dtype=torch.long)
rewards = torch.tensor([20.0, 10.0, 1.0, 0.0])
advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

weights = conflict_weights(conflict_mask(completion_ids, completion_mask, advantages, group_size=G), advantages)  # λ
logps, token_entropy = linear_logps_and_entropy(hidden.view(-1, H), lm_head, completion_ids.view(-1))
entropy = completion_entropy(token_entropy.view(G, T), completion_mask)  # ⟨H⟩_i
initial_entropy = 0.3  # ⟨H⟩ of your policy before training: the filter is on if it is below ln 2
keep = entropy_filter(entropy, advantages, initial_entropy, threshold=5.0)  # δ
loss, metrics = gtpo_loss(logps.view(G, T), entropy, completion_mask, advantages, weights, keep, gamma=0.1)
loss.backward()
print(weights, metrics, hidden.grad.norm())
