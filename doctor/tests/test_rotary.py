"""Rotary positions over the heads (F120), in every way to write them, and attention that turns what it should."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .test_meetings import blamed, named

ROWS, PLACES, HEADS, SIZE = 8, 12, 4, 8  # in each head


def angles(places: int, size: int = SIZE, first: int = 0):
    rates = 100.0 ** -(torch.arange(0, size, 2) / size)
    return torch.outer(torch.arange(first, first + places).float(), rates)


def laid(table, dim: int, axis: int):
    """(T, n) with its places along one axis."""
    shape = [1] * dim
    shape[axis], shape[-1] = table.shape
    return table.view(shape)


def rotate_half(x):
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def halves(x, axis):
    whole = torch.cat([angles(x.shape[axis], x.shape[-1])] * 2, 1)
    cos, sin = (laid(t, x.dim(), axis) for t in (whole.cos(), whole.sin()))
    return x * cos + rotate_half(x) * sin


def complex_numbers(x, axis):
    table = laid(torch.polar(torch.ones(1), angles(x.shape[axis], x.shape[-1])), x.dim(), axis)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(-2)


def even_and_odd(x, axis):
    cos, sin = (laid(t, x.dim(), axis) for t in (angles(x.shape[axis]).cos(), angles(x.shape[axis]).sin()))
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def written(x, axis):
    cos, sin = (laid(t, x.dim(), axis) for t in (angles(x.shape[axis]).cos(), angles(x.shape[axis]).sin()))
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
    return out


def a_part(x, axis):
    return torch.cat([halves(x[..., : SIZE // 2], axis), x[..., SIZE // 2 :]], -1)


STYLES = {"halves": halves, "complex": complex_numbers, "even and odd": even_and_odd, "written": written}
STYLES |= {"a part": a_part}


class Rotary(nn.Module):
    """turn(x, axis of the places) is given the layout `layout`, and told that places are axis `axis` in it."""

    def __init__(self, turn=halves, layout="bthd", axis=1, attend="sdpa", heads=HEADS, shared=1, size=SIZE):
        super().__init__()
        self.turn, self.layout, self.axis, self.attend = turn, layout, axis, attend
        self.heads, self.shared = heads, shared
        width = heads * size
        self.table = nn.Embedding(20, width)
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, width // shared) for _ in range(2))
        self.out = nn.Linear(width, 20)

    def forward(self, ids):
        h = self.table(ids)
        rows, places = ids.shape
        q, k, v = (layer(h).view(rows, places, -1, SIZE) for layer in (self.q, self.k, self.v))
        if self.layout == "bthd":
            q, k = self.turn(q, self.axis), self.turn(k, self.axis)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.layout == "bhtd":
            q, k = self.turn(q, self.axis), self.turn(k, self.axis)
        k, v = (x[:, :, None].expand(-1, -1, self.shared, -1, -1).reshape(q.shape) for x in (k, v))
        return self.out(h + self.met(q, k, v).transpose(1, 2).reshape(h.shape))

    def met(self, q, k, v):  # (B, H, T, D)
        hides = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        if self.attend == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.attend == "masked":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(hides.shape).masked_fill(hides, -1e9))
        if self.attend == "einsum":
            weights = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(hides, -1e9).softmax(-1)
            return torch.einsum("bhqk,bhkd->bhqd", weights, v)
        if self.attend == "merged":
            q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
            weights = (torch.bmm(q, k.transpose(1, 2)) / SIZE**0.5).masked_fill(hides, -1e9).softmax(-1)
            return torch.bmm(weights, v).view(-1, self.heads, *q.shape[1:])
        return ((q @ k.transpose(-2, -1)) / SIZE**0.5).masked_fill(hides, -1e9).softmax(-1) @ v


def next_token(places=PLACES):
    def loss(model):
        ids = torch.randint(0, 20, (ROWS, places + 1))
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return loss


WRONG = {style: Rotary(turn, "bhtd", 1) for style, turn in STYLES.items()}
WRONG |= {f"{style}, the other way": Rotary(turn, "bthd", 2) for style, turn in STYLES.items()}
WRONG |= {f"attention by {how}": Rotary(halves, "bhtd", 1, how) for how in ("masked", "einsum", "merged", "product")}
WRONG |= {"as many heads as places": Rotary(halves, "bhtd", 1, heads=PLACES)}
WRONG |= {"fewer heads of keys": Rotary(halves, "bhtd", 1, shared=2)}

RIGHT = {style: Rotary(turn, "bthd", 1) for style, turn in STYLES.items()}
RIGHT |= {f"{style}, the other way": Rotary(turn, "bhtd", 2) for style, turn in STYLES.items()}
RIGHT |= {f"attention by {how}": Rotary(halves, "bhtd", 2, how) for how in ("masked", "einsum", "merged", "product")}
RIGHT |= {"as many heads as places": Rotary(halves, "bthd", 1, heads=PLACES)}
RIGHT |= {"as many heads as places, turned later": Rotary(complex_numbers, "bhtd", 2, "product", heads=PLACES)}
RIGHT |= {"fewer heads of keys": Rotary(halves, "bhtd", 2, shared=2)}


@pytest.mark.parametrize("how", WRONG)
def test_angles_that_run_over_the_heads(how):
    assert named("F120", WRONG[how], next_token(), "and not over the 12 places")


class First:
    """Turns what comes first, the queries, and leaves the keys."""

    def __init__(self, turn):
        self.turn, self.calls = turn, 0

    def __call__(self, x, axis):
        self.calls += 1
        return self.turn(x, axis) if self.calls % 2 else x


@pytest.mark.parametrize("turn", (halves, complex_numbers))
def test_queries_alone_meet_keys_in_an_einsum(turn):
    assert named("F120", Rotary(First(turn), "bhtd", 2, "einsum"), next_token(), "queries alone")


@pytest.mark.parametrize("how", RIGHT)
def test_angles_that_run_over_the_places(how):
    assert not blamed("F120", RIGHT[how], next_token())


def grid(x, axis):
    """Half of the features are turned by the row and half by the column of 3 x 4 patches."""
    rows, columns = angles(3, SIZE // 2).repeat_interleave(4, 0), angles(4, SIZE // 2).repeat(3, 1)
    whole = torch.cat([rows, columns] * 2, 1)
    return x * laid(whole.cos(), 4, axis) + rotate_half(x) * laid(whole.sin(), 4, axis)


def in_a_grid(x, axis):
    """The same with the patches in two axes: (B, H, 3, 4, D)."""
    five = x.unflatten(2, (3, 4))
    one, two = five.chunk(2, -1)
    return torch.cat([halves(one, 2), halves(two, 3)], -1).flatten(2, 3)


def of_rows(x, axis):
    """Each row has positions of its own, as packed or padded rows have."""
    whole = torch.stack([torch.cat([angles(PLACES, first=n)] * 2, 1) for n in range(len(x))])[:, None]  # (B, 1, T, D)
    return x * whole.cos() + rotate_half(x) * whole.sin()


def of_heads(x, axis):
    """Each head has rates of its own."""
    whole = torch.stack([torch.cat([angles(PLACES)] * 2, 1) / (n + 1) for n in range(x.shape[1])])  # (H, T, D)
    return x * whole.cos() + rotate_half(x) * whole.sin()


def gates(x, axis):
    """No angles: numbers for each head, of a mask, and scales for each feature."""
    return x * (torch.rand(HEADS, 1, 1) < 0.5).expand(HEADS, 1, SIZE).float() + x * torch.rand(HEADS, 1, SIZE)


@pytest.mark.parametrize("turn", [grid, in_a_grid, of_rows, of_heads, gates])
def test_angles_that_differ_along_several_axes(turn):
    assert not blamed("F120", Rotary(turn, "bhtd", 2), next_token())


def test_one_place_has_one_angle():
    assert not blamed("F120", Rotary(halves, "bhtd", 2), next_token(1))


def test_a_library_turns_right():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    assert not blamed("F120", model, lambda m: next_token()(lambda ids: m(input_ids=ids, use_cache=False).logits))
