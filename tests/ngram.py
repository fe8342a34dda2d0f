"""A byte n-gram model with Witten-Bell smoothing: what a small language model has to beat to have
learned anything.

    P(c | h) = (count(h c) + kinds(h) P(c | shorter h)) / (count(h) + kinds(h)),
    P(c) = 1/256 at the bottom

where kinds(h) is how many different bytes followed h in training (Witten & Bell, 1991). Order n
looks at the n bytes before (the stricter count; in the other convention an n-gram has n - 1).
Written from the definition, independent of nblib.
"""

import math
from collections import Counter


def bits_per_byte(train: list[str], test: list[str], order: int) -> float:
    """Average code length of the test documents; contexts do not reach across documents."""
    grams, contexts, kinds = Counter(), Counter(), Counter()
    for document in train:
        data = document.encode()
        for n in range(order + 1):  # n bytes of context
            for i in range(n, len(data)):
                gram = data[i - n : i + 1]
                if gram not in grams:
                    kinds[n, gram[:-1]] += 1
                grams[gram] += 1
                contexts[n, gram[:-1]] += 1
    bits = length = 0
    for document in test:
        data = document.encode()
        for i in range(len(data)):
            p = 1 / 256
            for n in range(min(order, i) + 1):
                context = data[i - n : i]
                seen = contexts.get((n, context), 0)
                if seen:
                    k = kinds[n, context]
                    p = (grams.get(data[i - n : i + 1], 0) + k * p) / (seen + k)
            bits -= math.log2(p)
        length += len(data)
    return bits / length
