"""The residual head of IntentKV: a learned correction on top of the rule score."""

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTENTION_HEADS = 4
ATTENTION_WIDTH = 128
HIDDEN_WIDTH = 256


class ResidualHead(nn.Module):
    """`alpha * MLP(phi_j (+) c_j)`, what `s_j = rule_j + alpha * MLP(...)` adds to the rule (IntentKV, residual head).

    phi_j = [mean over l, h of K_j ; mean over l, h of M_t ; their product ; rule_j], 3D + 1 numbers. c_j is the
    cross-attention of phi_j over the mean keys of the current query span: 4 heads, 128 wide, no output projection. The
    MLP goes 3D + 1 + 128 -> 256 -> 1 with GELU between. 214,274 parameters at D = 128.

    The last layer starts at zero and alpha at 1, so that an untrained head adds exactly zero, and yet the last layer
    gets a gradient at the first step. With alpha at 0 as well, both gradients would be zero for good.
    """

    def __init__(self, head_dim: int) -> None:
        """`head_dim`: D of the model the head is for. The other layers are drawn from torch's global generator."""
        super().__init__()
        features = 3 * head_dim + 1
        self.head_dim = head_dim
        self.query = nn.Linear(features, ATTENTION_WIDTH)
        self.key = nn.Linear(head_dim, ATTENTION_WIDTH)
        self.value = nn.Linear(head_dim, ATTENTION_WIDTH)
        self.hidden = nn.Linear(features + ATTENTION_WIDTH, HIDDEN_WIDTH)
        self.output = nn.Linear(HIDDEN_WIDTH, 1)
        self.alpha = nn.Parameter(torch.ones(()))
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, mean_keys: Tensor, mean_memory: Tensor, rule: Tensor, span_keys: Tensor) -> Tensor:
        """The correction of each candidate, `[n]` float32.

        Args:
            mean_keys: `[n, D]` float32, the mean over layers and heads of each candidate's rotated keys.
            mean_memory: `[D]` float32, the mean over layers and heads of M_t.
            rule: `[n]` float32, the rule score.
            span_keys: `[q, D]` float32, mean keys of the query span. With q = 0 nothing can be attended to: c_j is zero.
        """
        memory = mean_memory.expand_as(mean_keys)
        phi = torch.cat([mean_keys, memory, mean_keys * memory, rule.unsqueeze(1)], dim=1)
        hidden = functional.gelu(self.hidden(torch.cat([phi, self._attend(phi, span_keys)], dim=1)))
        correction: Tensor = self.alpha * self.output(hidden).squeeze(1)
        return correction

    def _attend(self, phi: Tensor, span_keys: Tensor) -> Tensor:
        """c_j, `[n, 128]`."""
        if not len(span_keys):
            return phi.new_zeros(len(phi), ATTENTION_WIDTH)
        queries, keys, values = self.query(phi), self.key(span_keys), self.value(span_keys)
        attended = functional.scaled_dot_product_attention(_by_head(queries), _by_head(keys), _by_head(values))
        return attended.squeeze(0).transpose(0, 1).flatten(1)


def _by_head(x: Tensor) -> Tensor:
    """`[n, 128]` -> `[1, 4, n, 32]`."""
    return x.view(len(x), ATTENTION_HEADS, -1).transpose(0, 1).unsqueeze(0)
