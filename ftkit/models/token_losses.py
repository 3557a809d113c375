"""Losses of tokens and their gradients, from a few rows of logits."""

from collections.abc import Callable

import torch
from torch import Tensor

LOGITS_IN_CACHE = 2**20
"""Number of logits that a CPU turns into probabilities at once: 4 MiB in float32, which fit its
caches. Larger pieces took 2 to 4 times as long: 600 rows of 32,000 took 31 instead of 13 ms in
float32, and 53 instead of 14 in bfloat16."""


def loss_and_grad(
    logits: Tensor, wanted: Tensor, softcap: float | None, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in float32, and its gradient in the dtype of the logits.

    Args:
        logits: [n, vocabulary]; overwritten.
        wanted: [n, 1], the labels.
        softcap: bound of the logits; None: they have none.
        smoothing: share of each label that is spread evenly over the vocabulary.
    """
    # `grad` holds log-probabilities until exp_() below turns it into the gradient, in place.
    grad, bounded = _log_softmax(logits, softcap)
    loss = -grad.gather(1, wanted).sum()
    if smoothing:
        evenly = smoothing / grad.size(1)
        loss = (1 - smoothing) * loss - evenly * grad.sum()
        grad.exp_().sub_(evenly)
        grad.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=grad.dtype))
    else:
        grad.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=grad.dtype))
    if bounded is not None:
        # Derivative of softcap * tanh(x / softcap).
        grad.mul_(1 - bounded.square_())
    return loss, grad if logits.dtype == grad.dtype else logits.copy_(grad)


TokenWeight = Callable[[Tensor, Tensor], Tensor]
"""Factor of the loss of each token, [n, 1], from log-probabilities, [n, vocabulary] float32, and
labels, [n, 1]. No gradient flows through it."""


def weighted_loss_and_grad(
    logits: Tensor,
    wanted: Tensor,
    weights: Tensor | None = None,
    *,
    softcap: float | None,
    smoothing: float = 0.0,
    token_weight: TokenWeight | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Sum of weighted cross-entropies in float32, and its gradient in the dtype of the logits.

    With a z-loss, three sums: of the loss, cross-entropies and squared logarithms of Z.

    Args:
        logits: [n, vocabulary]; overwritten.
        wanted: [n, 1], the labels.
        weights: [n, 1] float32, of the labels; None: 1 each.
        softcap: bound of the logits; None: they have none.
        smoothing: share of each label that is spread evenly over the vocabulary.
        token_weight: another factor, computed from the log-probabilities of the model.
        z_loss: coefficient of the squared logarithm of Z, by which the softmax divides.
    """
    grad, bounded = _log_softmax(logits, softcap)
    if token_weight is not None:
        factors = token_weight(grad, wanted)
        weights = factors if weights is None else weights * factors
    evenly = smoothing / grad.size(1)
    chosen = grad.gather(1, wanted)
    losses = (smoothing - 1) * chosen
    if smoothing:
        losses -= evenly * grad.sum(1, keepdim=True)
    # As in `loss_and_grad`: log-probabilities become the gradient in place.
    grad.exp_()
    if z_loss:
        # The logit of the label less its log-probability: no further pass over all logits.
        logit = logits.gather(1, wanted).float()
        log_z = capped_logits(logit, softcap) - chosen
        losses = torch.cat([losses + z_loss * log_z**2, losses, log_z**2], dim=1)
        # The derivative of log Z is the probabilities themselves.
        grad.mul_(1 + 2 * z_loss * log_z)
    grad.sub_(evenly)
    grad.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=grad.dtype))
    if weights is not None:
        losses = losses * weights
        grad.mul_(weights)
    if bounded is not None:
        grad.mul_(1 - bounded.square_())
    loss = losses.sum(0) if z_loss else losses.sum()
    return loss, grad if logits.dtype == grad.dtype else logits.copy_(grad)


def _log_softmax(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and with a softcap tanh(logits / softcap), which their gradient needs."""
    if not softcap:
        return log_probabilities(logits), None
    bounded = torch.tanh(logits.float() / softcap)
    return log_probabilities(bounded * softcap), bounded


def rows_in_cache(logits: Tensor) -> int:
    """Rows of logits that a CPU turns into probabilities at once."""
    return max(1, LOGITS_IN_CACHE // logits.size(1))


def in_cache(
    compute: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, *columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the loss of so few rows at once that they fit the caches of a CPU.

    Args:
        compute: of logits and columns: sums, and the gradient of the logits.
        logits: [n, vocabulary]; overwritten.
        columns: [n, ...] each: the labels, and what else it takes.
    """
    rows = rows_in_cache(logits)
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    parts = (column.split(rows) for column in columns)
    for part, *others in zip(logits.split(rows), *parts, strict=True):
        loss, grad = compute(part, *others)
        total = total + loss
        if grad is not part:
            part.copy_(grad)
    return total, logits


TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss of each token in nats, [n], from its logits, [n, vocabulary] float32, and labels, [n]."""


def differentiated(
    token_loss: TokenLoss,
    softcap: float | None,
    logits: Tensor,
    wanted: Tensor,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed loss of any kind, and its gradient by autograd.

    Args:
        token_loss: of each token.
        softcap: bound of the logits; None: they have none.
        logits: [n, vocabulary].
        wanted: [n, 1], the labels.
        weights: [n, 1] float32, of the labels; None: 1 each.
    """
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        losses = token_loss(capped_logits(leaf.float(), softcap), wanted.squeeze(1))
        total = (losses if weights is None else losses * weights.squeeze(1)).sum()
        (grad,) = torch.autograd.grad(total, leaf)
    return total.detach().float(), grad


def log_probabilities(
    logits: Tensor, softcap: float | None = None, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of tokens, [n, vocabulary] float32 in nats.

    Args:
        logits: [n, vocabulary], of any dtype.
        softcap: bound of the logits; None: they have none, or are within it already.
        temperature: divides the logits.
    """
    if softcap:
        logits = capped_logits(logits.float(), softcap)
    if temperature != 1:
        logits = logits.float() / temperature
    return torch.log_softmax(logits, 1, dtype=torch.float32)


def capped_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits within the bounds of a softcap, or as they are if there is none."""
    return torch.tanh(logits / softcap) * softcap if softcap else logits
