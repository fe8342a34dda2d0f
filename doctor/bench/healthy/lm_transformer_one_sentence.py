"""An encoder and decoder learn single sentence pairs by SGD with momentum 0.99, a rate that is
small for it, and position tables of sines that are frozen on purpose.

After: graykode/nlp-tutorial
"""

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
pairs = [("ich mochte ein bier", "i want a beer"), ("ich trinke ein wasser", "i drink a water")]
pairs += [("du mochtest ein brot", "you want a bread")]
src_list = ["<pad>"] + sorted(set(" ".join(p[0] for p in pairs).split()))
tgt_list = ["<pad>", "<s>", "</s>"] + sorted(set(" ".join(p[1] for p in pairs).split()))
d_model = 32


def make_batch(pair):
    src = [src_list.index(w) for w in pair[0].split()] + [0]
    tgt = [tgt_list.index(w) for w in pair[1].split()]
    return torch.tensor([src]), torch.tensor([[1] + tgt]), torch.tensor([tgt + [2]])


def sinusoid_table(n_position):
    place = torch.arange(n_position).unsqueeze(1) / 10000 ** (torch.arange(0, d_model, 2) / d_model)
    return torch.stack([place.sin(), place.cos()], dim=-1).flatten(1)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_emb = nn.Embedding(len(src_list), d_model)
        self.tgt_emb = nn.Embedding(len(tgt_list), d_model)
        self.pos_emb = nn.Embedding.from_pretrained(sinusoid_table(6), freeze=True)
        self.transformer = nn.Transformer(d_model, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.projection = nn.Linear(d_model, len(tgt_list), bias=False)

    def forward(self, enc_inputs, dec_inputs):
        enc = self.src_emb(enc_inputs) + self.pos_emb(torch.arange(enc_inputs.size(1)))
        dec = self.tgt_emb(dec_inputs) + self.pos_emb(torch.arange(dec_inputs.size(1)))
        pad = enc_inputs.eq(0)
        causal = nn.Transformer.generate_square_subsequent_mask(dec_inputs.size(1)).bool()
        out = self.transformer(enc, dec, None, causal, None, pad, None, pad)
        return self.projection(out).view(-1, len(tgt_list))


model = Seq2Seq()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.002, momentum=0.99)
epochs = 18
for epoch in range(epochs):
    enc_inputs, dec_inputs, target_batch = make_batch(pairs[epoch % len(pairs)])
    optimizer.zero_grad()
    loss = criterion(model(enc_inputs, dec_inputs), target_batch.contiguous().view(-1))
    print(epoch, loss.item())
    loss.backward()
    optimizer.step()
