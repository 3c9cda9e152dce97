"""A small gpt-oss-style language model over bytes, trained on English text that comes with Python.

Its experts use every option that serving code is known to drop: a clamp that binds, a sigmoid
slope, an offset on the linear half, interleaved gate and up rows, biases.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from samebits.activation import Activation
from samebits.experts import experts
from samebits.problem import ProbPlacement
from samebits.routing import Routing, RoutingRule
from samebits.weights import ExpertWeights, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFunction:
    """What a serving engine believes the experts compute; the default is what the model trained."""

    activation: Activation = Activation(alpha=1.702, limit=1.0, linear_offset=1.0)
    layout: Layout = Layout(interleave=1)
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT
    backend: str = "auto"


TRAINED = ExpertFunction()

# What engines were reported to do instead, each without an error.
MISTAKES: dict[str, ExpertFunction] = {
    "clamp dropped": replace(TRAINED, activation=Activation(alpha=1.702, linear_offset=1.0)),
    "offset dropped": replace(TRAINED, activation=Activation(alpha=1.702, limit=1.0)),
    "slope dropped": replace(TRAINED, activation=Activation(limit=1.0, linear_offset=1.0)),
    "interleave dropped": replace(TRAINED, layout=Layout()),
    "all options dropped": replace(TRAINED, activation=Activation()),
    "probability on the input": replace(TRAINED, placement=ProbPlacement.FC1_INPUT),
}


def read_text() -> Tensor:
    """Return the text, as bytes: the language reference that comes with every Python."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(text.encode("ascii", "ignore")), dtype=torch.int64)


class Block(nn.Module):
    """Attention and a mixture of experts, each behind a norm."""

    def __init__(self, hidden: int, heads: int, expert: int, num_experts: int, topk: int) -> None:
        super().__init__()
        self.heads = heads
        self.rule = RoutingRule(topk=topk, topk_first=True)
        self.attention_norm, self.experts_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.merge = nn.Linear(hidden, hidden, bias=False)
        self.router = nn.Linear(hidden, num_experts)
        self.gate_up = nn.Parameter(
            torch.randn(num_experts, 2 * expert, hidden) * 1.5 * hidden**-0.5
        )
        self.down = nn.Parameter(torch.randn(num_experts, hidden, expert) * 0.5 * expert**-0.5)
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, 2 * expert))
        self.down_bias = nn.Parameter(torch.zeros(num_experts, hidden))

    def forward(self, x: Tensor, function: ExpertFunction) -> Tensor:
        """Return the next residual stream, ``(B, S, H)``."""
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, hidden))
        tokens = self.experts_norm(x).reshape(-1, hidden)
        weights = ExpertWeights(
            gate_up=self.gate_up,
            down=self.down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            layout=function.layout,
        )
        routed = experts(
            tokens,
            Routing.from_logits(self.router(tokens), self.rule),
            weights,
            function.activation,
            placement=function.placement,
            backend=function.backend,
        )
        return x + routed.view_as(x)


class LanguageModel(nn.Module):
    """Bytes in, log-probabilities of the next byte out."""

    def __init__(self, *, hidden: int = 96, layers: int = 2, length: int = 96) -> None:
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(128, hidden)
        self.position = nn.Parameter(torch.randn(length, hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(hidden, 4, 112, 8, 2) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, 128, bias=False)

    def forward(self, text: Tensor, function: ExpertFunction = TRAINED) -> Tensor:
        """Return the log-probability of each byte but the first of ``text``, ``(B, S)`` int64."""
        x = self.embed(text[:, :-1]) + self.position[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x, function)
        log_probs = functional.log_softmax(self.head(self.norm(x)), -1)
        return log_probs.gather(-1, text[:, 1:, None])[..., 0]


def batches(text: Tensor, model: LanguageModel, size: int, seed: int) -> Iterator[Tensor]:
    """Yield random windows of ``text``, ``(size, length + 1)``, forever."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(model.length + 1)
    while True:
        starts = torch.randint(len(text) - len(offsets), (size, 1), generator=generator)
        yield text[starts + offsets]


def train(
    model: LanguageModel,
    text: Tensor,
    *,
    steps: int,
    progress: Callable[[int, float], object] = lambda _step, _loss: None,
) -> list[float]:
    """Train in place with AdamW; return the loss of every step, in nats per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps + 1)
    losses = []
    for step, batch in zip(range(steps), batches(text, model, 16, seed=0), strict=False):
        loss = -model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        progress(step + 1, losses[-1])
    return losses


def serve(model: LanguageModel, text: Tensor, function: ExpertFunction) -> Tensor:
    """Return the log-probabilities of ``text`` from an engine that computes ``function``."""
    with torch.inference_mode():
        log_probabilities: Tensor = model(text, function)
    return log_probabilities
