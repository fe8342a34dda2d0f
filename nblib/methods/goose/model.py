"""A spiking recurrent student: keys and values of -a, 0, a, and a state that decays instead of
attention.

Per layer, on x~ = LN(x), with l = 0 ... L - 1 and D channels:

    mixed_t = m x~_t + (1 - m) x~_(t-1)
    token shift, m of its own for k, v and r, starting at 1 - l / (L - 1)
    k, v = spike(W_k mixed), spike(W_v mixed);    r = sigmoid(W_r mixed)
    S_t = d S_(t-1) + k_t v_t,
    d = sigmoid(w) per channel
    out = x + r W_o S_t;
    then a SiLU FFN

    spike(x) = a (1[x > theta] - 1[x < -theta]),  theta = alpha mean_channels |x| per token;
    backward as if it were x

The layer is that of the ASNN-Goose write-up, in the manner of RWKV. A token costs the same wherever
it stands, and generation carries 2 D numbers per layer and sequence instead of a KV cache.

Training needs all S_t at once. The write-up divides k v by d^t + 1e-8 and multiplies back after a
cumulative sum. That is exact on paper. As soon as d^t is below 1e-8 it is wrong: at d = 0.38 from
position 17 on, and by 60 the whole state is lost. `scan` doubles instead: S += d^1 shift(S, 1),
then d^2 shift(S, 2), d^4 shift(S, 4): log2 T passes, no negative power, right at every decay. Its
backward pass is the same scan from the other end, so only S is kept.

At the start the decays are spread over the channels, from 0.3 (a few tokens) to 0.997 (hundreds).
The write-up starts all at 0.38, of which nothing is left after ten tokens, and training hardly
moves a decay. With `decay_by_token` a token says itself what is kept, d_t = sigmoid(w + W_d x~_t),
as in RWKV-6 and Mamba: W_d starts at 0, so the start is that of fixed decays, and the scan doubles
the decays beside the states. Where a document starts, at position 0 in `position_ids`, neither the
state nor the token shift crosses; padded positions (`attention_mask`) add nothing. So packed and
padded rows give what separate rows give.

Footgun: only the product of the two amplitudes enters, so they always move together. And theta is
relative to the token's own channels, so the firing rate hardly depends on the scale of W. W then
gets its gradient from the straight-through estimator alone. Watch the rate and the dead channels
(notebook 15).
"""

import math
from typing import NamedTuple

import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from nblib import runtime, wiring

SCANS = ("doubling", "sequential")


class GooseConfig(tf.PreTrainedConfig):
    model_type = "goose"

    def __init__(
        self,
        vocab_size: int = 4096,
        hidden_size: int = 256,
        num_hidden_layers: int = 4,
        max_position_embeddings: int = 256,
        alpha: float = 1.0,  # threshold over the mean of |x|
        # d at the start, of the first and of the last channel
        decays: tuple[float, float] = (0.3, 0.997),
        scan: str = "doubling",
        decay_by_token: bool = False,  # d = sigmoid(w + W x~), W from 0 on
        tie_word_embeddings: bool = True,
        **kwargs,
    ):
        if scan not in SCANS:
            raise ValueError(f"scan = {scan!r}: allowed are {', '.join(SCANS)}")
        if not alpha > 0:
            raise ValueError(f"alpha = {alpha}: must be above 0")
        if not (len(decays) == 2 and all(0 < d < 1 for d in decays)):
            raise ValueError(f"decays = {decays}: must be two numbers above 0 and below 1")
        self.vocab_size, self.hidden_size, self.num_hidden_layers = (
            vocab_size,
            hidden_size,
            num_hidden_layers,
        )
        self.max_position_embeddings, self.alpha, self.scan = max_position_embeddings, alpha, scan
        self.decays, self.decay_by_token = list(decays), decay_by_token  # a list, as JSON has it
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class Past(NamedTuple):
    """All that a sequence leaves behind: per layer the last x~ and the state, (L, B, D) each, and
    its length.
    """

    shifted: Tensor
    state: Tensor
    length: int


def sequential(x: Tensor, d: Tensor, documents: Tensor | None = None) -> Tensor:
    """S_t = d S_(t-1) + x_t over dimension 1, one step after the other: the definition. x (B, T,
    D), d (D,), or (B, T, D) where each position has its own. With `documents` (B, T), their
    numbers, S starts at 0 with each.
    """
    states = [x[:, 0]]
    for t in range(1, x.shape[1]):
        before = (
            states[-1]
            if documents is None
            else states[-1] * (documents[:, t] == documents[:, t - 1])[:, None]
        )
        states.append(torch.addcmul(x[:, t], d if d.ndim == 1 else d[:, t], before))
    return torch.stack(states, 1)


def scan(x: Tensor, d: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return the same in log2 T passes."""
    if d.ndim == 1:
        return _Scan.apply(x, d, documents)
    if documents is not None:  # a decay of 0 where a document starts
        d = d * F.pad(_same(documents, 1), (0, 0, 1, 0))
    return _ScanOfEach.apply(x, d)


def _doubled(x: Tensor, d: Tensor, documents: Tensor | None, *, reverse: bool = False) -> Tensor:
    S, reach = x.clone(), 1
    while reach < x.shape[1]:
        late, early = S[:, reach:], S[:, :-reach]
        into, earlier = (early, late) if reverse else (late, early)
        into += d * (earlier.clone() if documents is None else earlier * _same(documents, reach))
        d, reach = d * d, 2 * reach  # S now sums the last 2 reach inputs
    return S


def _same(documents: Tensor, reach: int) -> Tensor:
    """Whether a position and the one `reach` before it are of one document, (B, T - reach, 1)."""
    return (documents[:, reach:] == documents[:, :-reach])[..., None]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, d, documents):
        S = _doubled(x, d, documents)
        ctx.save_for_backward(S, d, documents)
        return S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        S, d, documents = ctx.saved_tensors
        G = _doubled(grad, d, documents, reverse=True)  # what x_t receives from all later states
        of_d = G[:, 1:] * S[:, :-1]
        return G, (of_d if documents is None else of_d * _same(documents, 1)).sum((0, 1)), None


def _doubled_of_each(x: Tensor, d: Tensor) -> Tensor:
    """S where each position has a decay of its own: what two halves of a stretch keep is the
    product of both.
    """
    S, reach = x, 1
    while reach < x.shape[1]:
        S = torch.cat([S[:, :reach], torch.addcmul(S[:, reach:], d[:, reach:], S[:, :-reach])], 1)
        d, reach = torch.cat([d[:, :reach], d[:, reach:] * d[:, :-reach]], 1), 2 * reach
    return S


class _ScanOfEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, d):
        S = _doubled_of_each(x, d)
        ctx.save_for_backward(S, d)
        return S

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        S, d = ctx.saved_tensors
        # seen from the end, a step goes by the decay of the one after
        later = F.pad(d.flip(1)[:, :-1], (0, 0, 1, 0))
        G = _doubled_of_each(grad.flip(1), later).flip(1)
        return G, G * F.pad(S[:, :-1], (0, 0, 1, 0))


class Zero(nn.Linear):
    """A linear layer that starts at zero and draws nothing."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Spike(nn.Module):
    """-a, 0 or a. Straight through: d / dx is 1, d / da the sign; the threshold has no gradient."""

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha, self.amplitude = alpha, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            theta = (self.alpha * x.abs().mean(-1, keepdim=True)).clamp(0.01, 10.0)
            sign = (x > theta).to(x.dtype) - (x < -theta).to(x.dtype)
        return self.amplitude * sign + (x - x.detach())


class Recurrent(nn.Module):
    def __init__(self, config: GooseConfig, layer: int):
        super().__init__()
        D = config.hidden_size
        self.scan = {"doubling": scan, "sequential": sequential}[config.scan]
        self.norm = nn.LayerNorm(D)
        start = 1 - layer / max(1, config.num_hidden_layers - 1)
        self.mix = nn.ParameterDict({name: nn.Parameter(torch.full((D,), start)) for name in "kvr"})
        self.key, self.value, self.receptance, self.out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        self.spike_k, self.spike_v = Spike(config.alpha), Spike(config.alpha)
        # sigmoid(w) is d
        self.w = nn.Parameter(torch.linspace(*(math.log(d / (1 - d)) for d in config.decays), D))
        self.decay = Zero(D, D, bias=False) if config.decay_by_token else None

    def forward(
        self,
        x: Tensor,
        last: Tensor,
        state: Tensor,
        documents: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D). `documents` (B, T) counts starts of documents, so 0 goes on with `last` and
        `state`; `real` (B, T) is 0 at padding.
        """
        y = self.norm(x) if real is None else self.norm(x) * real[..., None].to(x.dtype)
        before = torch.cat([last[:, None].to(y.dtype), y[:, :-1]], 1)
        if documents is not None:
            # what came before this call is of document 0
            goes_on = documents == F.pad(documents[:, :-1], (1, 0))
            before, state = before * goes_on[..., None], state * goes_on[:, :1]
        k, v, r = (torch.lerp(before, y, self.mix[name].to(y.dtype)) for name in "kvr")
        k, v, r = (
            self.spike_k(self.key(k)),
            self.spike_v(self.value(v)),
            self.receptance(r).sigmoid(),
        )
        moves = None if self.decay is None else self.decay(y)
        with torch.autocast(x.device.type, enabled=False):  # hundreds of products: fp32 or better
            exact = torch.promote_types(k.dtype, torch.float32)
            w, kv = self.w.to(exact), k.to(exact) * v.to(exact)
            d = (w if moves is None else w + moves.to(exact)).sigmoid()
            kv = kv if real is None else kv * real[..., None]
            of_first = d if moves is None else d[:, :1]
            # with what came before this call
            first = torch.addcmul(kv[:, :1], of_first, state[:, None].to(exact))
            S = self.scan(
                torch.cat([first, kv[:, 1:]], 1), d, *(() if documents is None else (documents,))
            )
        return x + r * self.out(S.to(r.dtype)), y[:, -1], S[:, -1]


class Block(GradientCheckpointingLayer):
    def __init__(self, config: GooseConfig, layer: int):
        super().__init__()
        D = config.hidden_size
        self.recurrent = Recurrent(config, layer)
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(
        self, x: Tensor, last: Tensor, state: Tensor, *where: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, last, state = self.recurrent(x, last, state, *where)
        return x + self.down(F.silu(self.up(self.norm(x)))), last, state


class GoosePreTrainedModel(tf.PreTrainedModel):
    config_class = GooseConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    supports_gradient_checkpointing = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=0.02)
        elif isinstance(module, Zero):
            initialization.zeros_(module.weight)
        elif isinstance(module, nn.Linear):
            initialization.normal_(module.weight, std=0.1 / math.sqrt(self.config.hidden_size))
            if module.bias is not None:
                initialization.zeros_(module.bias)


class GooseModel(GoosePreTrainedModel):
    def __init__(self, config: GooseConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            [Block(config, layer) for layer in range(config.num_hidden_layers)]
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Past | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """`attention_mask` (B, T), with a past (B, past + T), is 0 at padding. `position_ids` (B,
        T) start again at 0 with each document of a row; without them the tokens that are not
        padding are counted.
        """
        past, T = past_key_values or self.empty_past(input_ids), input_ids.shape[1]
        most, length = self.config.max_position_embeddings, past.length + T
        if length > most and position_ids is None:
            raise ValueError(f"length = {length}: max_position_embeddings allows {most}")
        real = None
        if attention_mask is not None:
            if attention_mask.shape != (len(input_ids), length):
                raise ValueError(
                    f"attention_mask {tuple(attention_mask.shape)}: must be "
                    f"{(len(input_ids), length)}"
                )
            real = attention_mask[:, -T:]
        documents = (
            None
            if position_ids is None
            else (position_ids == 0).expand(len(input_ids), T).cumsum(1)
        )
        if position_ids is None and real is not None:
            position_ids = (attention_mask.cumsum(1) - 1).clamp_min(0)[:, -T:]
        places = self.embed_positions.weight[past.length : length]
        x = self.embed_tokens(input_ids) + (
            places if position_ids is None else self.embed_positions(position_ids)
        )
        states, pairs = [x], []
        for block, last, state in zip(self.layers, past.shifted, past.state):
            x, last, state = block(x, last, state, documents, real)
            states.append(x)
            pairs.append((last, state))
        states[-1] = x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=Past(*map(torch.stack, zip(*pairs)), length) if use_cache else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def empty_past(self, input_ids: Tensor) -> Past:
        zeros = self.norm.weight.new_zeros(
            len(self.layers), len(input_ids), self.config.hidden_size
        )
        return Past(zeros, zeros, 0)


class GooseForCausalLM(GoosePreTrainedModel):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GooseConfig):
        super().__init__(config)
        self.model = GooseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs
    ) -> CausalLMOutputWithPast:
        out = self.model(input_ids, **kwargs)
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
        )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        do_sample: bool = False,
        temperature: float = 1.0,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
    ) -> Tensor:
        """Return the rows (B, T), which are padded at the left if at all, and up to
        `max_new_tokens` more: the likeliest, or drawn. One token per step; the state of fixed size
        is carried. After its end a row is filled with padding.
        """
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ValueError("attention_mask: a prompt that goes on must be padded at the left")
        past, rows, new = None, [input_ids], input_ids
        ended = torch.zeros(len(input_ids), 1, dtype=torch.bool, device=input_ids.device)
        with wiring.evaluating(self):
            for _ in range(max_new_tokens):
                out = self(new, attention_mask=attention_mask, past_key_values=past, use_cache=True)
                past, scores = out.past_key_values, out.logits[:, -1]
                best = scores.argmax(-1, keepdim=True)
                new = (
                    (scores.float() / temperature).softmax(-1).multinomial(1) if do_sample else best
                )
                if eos_token_id is not None:
                    new = new.masked_fill(
                        ended, eos_token_id if pad_token_id is None else pad_token_id
                    )
                    ended |= new == eos_token_id
                rows.append(new)
                if attention_mask is not None:
                    attention_mask = F.pad(attention_mask, (0, 1), value=1)
                if eos_token_id is not None and bool(ended.all()):
                    break
        return torch.cat(rows, 1)


tf.AutoConfig.register("goose", GooseConfig)
tf.AutoModelForCausalLM.register(GooseConfig, GooseForCausalLM)


def tiny(
    vocab_size: int,
    *,
    hidden: int = 256,
    layers: int = 4,
    length: int = 256,
    seed: int = 0,
    **config,
) -> nn.Module:
    """Return a small student with random weights that depend on the seed alone."""
    with runtime.seeded(seed):
        shape = dict(hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=length)
        return GooseForCausalLM(GooseConfig(vocab_size=vocab_size, **shape, **config)).train()
