"""Word2Vec is trained on drawn skip-grams with one-hot rows times a matrix, where only a few
columns of the first matrix get a gradient in each step.

After: graykode/nlp-tutorial
"""

import random

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
random.seed(0)
sentences = "apple banana fruit|banana orange fruit|orange banana fruit|dog cat animal"
sentences = (
    sentences + "|cat monkey animal|monkey dog animal|apple fruit sweet|cat animal paw"
).split("|")
word_sequence = " ".join(sentences).split()
word_list = sorted(set(word_sequence))
word_dict = {w: i for i, w in enumerate(word_list)}
voc_size, embedding_size, batch_size = len(word_list), 4, 16
skip_grams = []
for sentence in sentences:
    ids = [word_dict[w] for w in sentence.split()]
    skip_grams += [[a, b] for a in ids for b in ids if a != b]


def random_batch():
    drawn = random.sample(skip_grams, batch_size)
    inputs = torch.eye(voc_size)[[pair[0] for pair in drawn]]
    return inputs, torch.LongTensor([pair[1] for pair in drawn])


class Word2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Linear(voc_size, embedding_size, bias=False)
        self.WT = nn.Linear(embedding_size, voc_size, bias=False)

    def forward(self, X):
        return self.WT(self.W(X))


model = Word2Vec()
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=0.05)
max_steps = 20
for step in range(max_steps):
    input_batch, target_batch = random_batch()
    optimizer.zero_grad()
    output = model(input_batch)
    loss = criterion(output, target_batch)
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(step + 1, loss.item())
vectors = model.W.weight.data.T
for word in ("banana", "cat"):
    near = torch.cosine_similarity(vectors[word_dict[word]], vectors).argsort(descending=True)
    print(word, [word_list[i] for i in near[1:3]])
