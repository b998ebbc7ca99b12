"""Mixtures of experts: weights stacked for grouped computation, routing records, and the published one-by-one names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_STACKED = re.compile(r"(.*\.experts)\.(\w+)")


class Experts(nn.Module):
    """E gated MLPs whose weights are one tensor a projection.

    In a state dict `experts.up_proj` [E, M, H] stands for the published `experts.{j}.up_proj.weight` [M, H] of all
    experts j; `split_experts` and `ExpertPlaces` translate.

    Attributes:
        gate_proj, up_proj: [E, M, H].
        down_proj: [E, H, M].
    """

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(count, inner, width))
        self.up_proj = nn.Parameter(torch.empty(count, inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs, summed in the order of `chosen`.

        Args:
            x: float [T, H].
            chosen: int64 [T, K], the experts of each token.
            weights: float [T, K].

        Returns:
            float [T, H] in the dtype of x.
        """
        count, fan = len(self.gate_proj), chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=count)
        dtype = _compute_dtype(x)
        rows = x.to(dtype)[order // fan]
        gate, up, down = (weight.to(dtype) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        grouped = grouped_mm if _has_grouped_kernel(rows, gate, down) else grouped_loop
        inner = F.silu(grouped(rows, gate, counts)) * grouped(rows, up, counts)
        out = grouped(inner, down, counts)[order.argsort()].unflatten(0, (-1, fan))
        return (out * weights[..., None]).sum(1).to(x.dtype)


class MixtureOfExperts(nn.Module):
    """A router and its experts; the published module `mlp`.

    Probabilities are a float32 softmax over all experts, to which the bias is added where there is one; the `top_k`
    largest choose the experts and weigh them.

    Args:
        width, inner: sizes of the stream and inside an expert.
        count, top_k: experts, and how many of them each token reads.
        bias: whether the router has an `expert_bias` (a buffer: it is not trained).
        normalize: divide the chosen weights by their sum.
    """

    expert_bias: Tensor | None

    def __init__(self, width: int, inner: int, count: int, top_k: int, bias: bool, normalize: bool) -> None:
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, inner)
        self.register_buffer("expert_bias", torch.zeros(count) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.route(self.gate(flat))
        return self.experts(flat, chosen, weights.to(x.dtype)).view(x.shape)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Router logits [T, E] -> weights, float32 at least, and experts, int64, both [T, K]."""
        scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        weights, chosen = scores.topk(self.top_k, -1)
        return (weights / weights.sum(-1, keepdim=True) if self.normalize else weights), chosen

    def spread(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Router logits [T, E] -> probabilities [T, E], float32 at least, and the chosen experts [T, K]."""
        scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return scores, self.route(logits)[1]


class GroupLimitedGate(nn.Module):
    """Chooses experts by sigmoid scores, among those of the best groups alone; computed in float32 at least.

    A buffer `expert_bias` is added to the scores for the choice and does not weigh. It stays as wide as it is read.

    Args:
        width: of the stream.
        count, groups, kept_groups, top_k: experts, the equal groups they form, the groups a token may choose from, and
            the experts it chooses.
        scale: of the weights, which add up to it where there are several.

    Raises:
        ValueError: the numbers do not fit.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2, with groups scored by their two best experts.
    """

    own_precision = True
    expert_bias: Tensor

    def __init__(self, width: int, count: int, groups: int, kept_groups: int, top_k: int, scale: float) -> None:
        super().__init__()
        if count % groups or count // groups < 2 or kept_groups > groups or kept_groups * count // groups < top_k:
            raise ValueError(
                f"config.json says num_experts={count}, n_group={groups}, topk_group={kept_groups},"
                f" num_experts_per_tok={top_k}: groups must be equal, of 2 experts at least, and those kept must hold"
                " the experts of a token"
            )
        self.groups, self.kept_groups, self.top_k, self.scale = groups, kept_groups, top_k, scale
        self.weight = nn.Parameter(torch.empty(count, width))
        self.register_buffer("expert_bias", torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        """Logits [T, E] of x [T, H]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.weight.to(wide))

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, E] -> weights and experts, int64, both [T, K]."""
        scores = logits.sigmoid()
        grouped = (scores + self.expert_bias).unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(self.kept_groups, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        chosen = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, chosen


class SharedMixture(nn.Module):
    """Routed experts and one that every token reads, if any; the published module `mlp` of LLaDA2.

    Args:
        gate: the router.
        experts: those it chooses from.
        shared: [..., H] -> [..., H], added unscaled; None where there is none.
    """

    def __init__(self, gate: GroupLimitedGate, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate.route(self.gate(flat))
        out = self.experts(flat, chosen, weights.to(x.dtype)).view(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def spread(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As `MixtureOfExperts.spread`; sigmoid scores count as shares of their sum."""
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20), self.gate.route(logits)[1]


def grouped_loop(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of group e times weight[e] transposed: one product a group.

    Args:
        x: float [R, I], sorted by group.
        weight: float [E, O, I].
        counts: int64 [E], rows of each group.

    Returns:
        float [R, O].
    """
    # One unbind: its backward pass stacks all gradients once, where indexing would fill a whole tensor an expert.
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in parts])


def grouped_mm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The same in one kernel, without reading the counts back to the host."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))


@contextmanager
def recorded_router_logits(policy: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the router logits of forward passes in the body, with their gradient.

    Yields:
        full name of each mixture -> its logits [T, E] before the softmax, one entry a forward pass.
    """
    records: dict[str, list[Tensor]] = {}
    hooks = []
    for name, module in policy.named_modules():
        if isinstance(module, MixtureOfExperts | SharedMixture):
            record = records.setdefault(name, [])
            hooks.append(module.gate.register_forward_hook(_appending(record)))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


def load_balancing_loss(
    logits: Tensor, top_k: int, exists: Tensor | None = None, expert_bias: Tensor | None = None
) -> Tensor:
    """E sum_e f_e P_e of one layer: f_e is the share of tokens that choose expert e, P_e its mean probability.

    It is `top_k` where tokens and probabilities are spread evenly. Usual coefficient: the config's
    `router_aux_loss_coef`, 0.01.

    Args:
        logits: float [T, E], before the softmax.
        top_k: experts a token.
        exists: bool [T]; padding does not count.
        expert_bias: float [E], added to the probabilities for the choice alone.

    Returns:
        a scalar, float32 at least.

    Source: Fedus et al. 2021, arXiv:2101.03961, equation 4, with several experts a token.
    """
    scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    biased = scores if expert_bias is None else scores + expert_bias
    return balance(scores, biased.topk(top_k, -1).indices, exists)


def balance(probabilities: Tensor, chosen: Tensor, exists: Tensor | None = None) -> Tensor:
    """`load_balancing_loss` of what a router made of its logits; arguments as `MixtureOfExperts.spread` gives them."""
    picked = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
    counted = torch.ones(len(picked), device=picked.device) if exists is None else exists
    share = counted.to(picked.dtype) / counted.sum().clamp_min(1)
    return probabilities.shape[-1] * ((share @ picked) * (share @ probabilities)).sum()


class RouterBalance:
    """The load-balancing loss of the forward passes that update a policy.

    One loss for each pass, over the tokens that exist in it and all mixtures together, as Hugging Face's models take
    it; then the mean over the passes.

    Args:
        policy: whose mixtures are watched while `recording`.
        coefficient: of the loss; 0 watches nothing and changes nothing.

    Raises:
        ValueError: the coefficient is negative, or the policy has no mixture of experts.
    """

    def __init__(self, policy: Any, coefficient: float) -> None:
        self._mixtures = [m for m in policy.modules() if isinstance(m, MixtureOfExperts | SharedMixture)]
        self._model, self.coefficient = policy, coefficient
        if coefficient < 0 or (coefficient > 0 and not self._mixtures):
            raise ValueError(
                f"method.router_aux_coef={coefficient} is the weight of the experts' load-balancing loss, at least 0;"
                f" {type(policy).__name__} has {len(self._mixtures)} mixtures of experts: use 0 where there are none"
            )

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Watch the forward passes of the body, where these have a gradient; the loss of each goes into the list."""
        passes: list[Tensor] = []
        if self.coefficient == 0 or not torch.is_grad_enabled():
            yield passes
            return
        logits: list[Tensor] = []

        def finish(module: nn.Module, inputs: Any, output: Any) -> None:
            ids, attention_mask, view = inputs[:3]
            exists = attention_mask if view is None else view.exists()
            passes.append(self._loss(logits, torch.ones_like(ids) if exists is None else exists))
            logits.clear()

        hooks = [mixture.gate.register_forward_hook(_appending(logits)) for mixture in self._mixtures]
        hooks.append(self._model.model.register_forward_hook(finish))
        try:
            yield passes
        finally:
            for hook in hooks:
                hook.remove()

    def _loss(self, logits: list[Tensor], exists: Tensor) -> Tensor:
        spread = [m.spread(found) for m, found in zip(self._mixtures, logits, strict=True)]
        probabilities, chosen = (torch.cat(parts) for parts in zip(*spread, strict=True))
        return balance(probabilities, chosen, exists.flatten().bool().repeat(len(spread)))

    def added(
        self, loss: Tensor, passes: Sequence[Tensor], parts: int = 1
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """A part's loss with its share of the mean over these passes, and that mean as a metric."""
        if not passes:
            return loss, {}
        found = torch.stack(list(passes)).mean()
        metrics = {"router_balance": (found.detach(), torch.ones_like(found))}
        return loss + self.coefficient / parts * found.to(loss), metrics


def router_z_loss(logits: Tensor, exists: Tensor | None = None) -> Tensor:
    """Mean squared log-partition of the router, a scalar; usual coefficient 0.001.

    Args:
        logits: float [T, E].
        exists: bool [T]; padding does not count.

    Source: Zoph et al. 2022, arXiv:2202.08906, equation 5.
    """
    squares = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square()
    counted = torch.ones_like(squares) if exists is None else exists.to(squares.dtype)
    return (squares * counted).sum() / counted.sum().clamp_min(1)


def split_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the published names: stacked expert weights one by one, as views; others unchanged."""
    split: dict[str, Tensor] = {}
    for name, value in state.items():
        found = _STACKED.fullmatch(name)
        if found is None or value.dim() != 3:
            split[name] = value
            continue
        split |= {f"{found[1]}.{j}.{found[2]}.weight": part for j, part in enumerate(value.unbind())}
    return split


def split_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """As `split_experts` for shapes: files may hold an expert's weights one by one, or stacked."""
    split: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        found = _STACKED.fullmatch(name)
        if found is None or len(shape) != 3:
            split[name] = shape
            continue
        split |= {f"{found[1]}.{j}.{found[2]}.weight": shape[1:] for j in range(shape[0])}
    return split


class ExpertPlaces:
    """Collects published tensors into the state dict that a module with stacked experts has.

    Args:
        state: the module's state dict, on any device, the meta device included.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._places: dict[str, tuple[str, int, int]] = {}
        for name, value in state.items():
            parts = split_experts({name: value})
            if name not in parts:
                self._places |= {part: (name, j, len(parts)) for j, part in enumerate(parts)}

    def put(self, collected: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Add a published tensor; an expert's is copied to its place in the stack, so that none is held twice.

        Raises:
            ValueError: the experts of one layer have different dtypes.
        """
        if name not in self._places:
            collected[name] = value
            return
        key, number, count = self._places[name]
        stack = collected.setdefault(key, value.new_empty(count, *value.shape))
        if stack.dtype != value.dtype:
            raise ValueError(
                f"{name} is {value.dtype}, other experts of {key} are {stack.dtype}; choose one dtype for all"
                " (model.dtype=bfloat16 or float32)"
            )
        stack[number] = value


def _compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast would choose for a matrix product of x; it does not know the grouped one."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _has_grouped_kernel(rows: Tensor, *weights: Tensor) -> bool:
    """Whether torch's grouped product takes these: on a GPU, in bfloat16, rows of whole 16-byte units."""
    aligned = all(size % 8 == 0 for weight in weights for size in weight.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned


def _appending(record: list[Tensor]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        record.append(output)

    return hook
