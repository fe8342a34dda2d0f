"""Graphs that were put together without moving their edges: all edges lie among the nodes of the first graph.

    edges.append(edge_index)                        in a collate function; edge_index + offset was meant
    offset += len(x)

Graphs of a batch become one with N nodes, a list of edges and the number of the graph of each node. Edges that begin at
0 for each graph pile up on its first nodes. What is summed along edges (N rows) and what is summed into graphs are both
seen; it is asked in how many graphs any edge ends.

Footgun: graphs without edges exist, and edges of several kinds are summed apart. So all edges together must end
in a few graphs, at numbers below the size of the largest one.
"""

import torch
from torch import Tensor

from train_doctor.eye import Eye, Op, Watcher

SUMS = {"index_add", "scatter_add", "scatter_reduce", "scatter", "index_reduce"}
GRAPHS, SHARE, LOOKED = 8, 0.25, 2**20  # graphs at least; of these, how many have an edge at most


class FirstGraphs(Watcher):
    names = begins = SUMS | {"bincount"}

    def __init__(self, eye: Eye):
        super().__init__(eye)
        self.indices: list[tuple[int, Tensor]] = []  # rows of what is summed into, and where to

    def saw(self, op: Op) -> None:
        index = next((t for t in op.given if not t.is_floating_point() and not t.dtype == torch.bool), None)
        if index is None or not isinstance(op.result, Tensor) or not op.result.dim() or len(self.indices) > 16:
            return
        flat = index if index.dim() == 1 else index[:, 0] if index.dim() == 2 else None
        if flat is not None and 1 < len(flat) <= LOOKED:
            self.indices.append((len(op.result), flat))

    def backward(self, loss: Tensor) -> None:
        indices, self.indices = self.indices, []
        for graphs, graph_of in indices:
            if graphs < GRAPHS or len(graph_of) <= graphs or bool((graph_of[1:] < graph_of[:-1]).any()):
                continue
            ends = [e for nodes, e in indices if nodes == len(graph_of) != graphs and int(e.max()) < nodes]
            if not ends:
                continue
            ends = torch.cat(ends)
            touched = len(graph_of[ends.unique()].unique())
            if touched <= SHARE * graphs and int(ends.max()) < int(graph_of.bincount().max()):
                self.note("D22", (touched, graphs))

    def close(self) -> None:
        self.indices = []
