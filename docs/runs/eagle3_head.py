"""An EAGLE-3 head (arXiv:2503.01840) in plain torch, to be trained; see train_eagle3.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


class Norm(nn.Module):
    """An RMS norm in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Attention whose queries, keys and values are made of 2 H elements."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.q_proj = nn.Linear(2 * hidden, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)

    def forward(self, pair: Tensor, turns: tuple[Tensor, Tensor], before: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Row i of draft s sees rows 0 to i of draft 0, and of the drafts between only its own. `before` has their keys
        and values, and gets those of this draft."""
        batch, length, _ = pair.shape
        repeat = self.heads // self.kv_heads

        def heads(x: Tensor) -> Tensor:
            return x.view(batch, length, -1, self.size).transpose(1, 2)

        q = turned(heads(self.q_proj(pair)), turns)
        k = turned(heads(self.k_proj(pair)), turns).repeat_interleave(repeat, dim=1)
        v = heads(self.v_proj(pair)).repeat_interleave(repeat, dim=1)
        before.append((k, v))
        if len(before) == 1:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            (first, values), own = before[0], before[1:]
            hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ first.transpose(2, 3)).masked_fill(hidden, float("-inf"))
            scores = torch.cat([scores, *((q * keys).sum(-1, keepdim=True) for keys, _ in own)], dim=-1)
            shares = (scores.float() * self.size**-0.5).softmax(-1).to(v.dtype)
            out = shares[..., :length] @ values
            for place, (_, each) in enumerate(own, length):
                out = out + shares[..., place : place + 1] * each
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x [batch, heads, length, size] with rotary embeddings, whose halves turn together."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = (each.to(x.dtype) for each in turns)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Mlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Head(nn.Module):
    """The head; its parameters have their published names. While it is trained, `fc` reads features divided by `scales`
    [3 H], so that channels of all sizes learn equally fast."""

    scales: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        self.config = config
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": Norm(hidden, eps),
                "hidden_norm": Norm(hidden, eps),
                "self_attn": Attention(hidden, heads, kv_heads, size),
                "post_attention_layernorm": Norm(hidden, eps),
                "mlp": Mlp(hidden, config["intermediate_size"]),
            }
        )
        self.register_buffer("scales", torch.ones(3 * hidden))
        self.norm = Norm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)

    def turns(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, head_dim] of the rotary embedding."""
        size = self.config["head_dim"]
        frequencies = self.config["rope_theta"] ** (-torch.arange(0, size, 2, device=device) / size)
        angles = (torch.arange(length, device=device)[:, None] * frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def forward(self, features: Tensor, embeddings: Tensor, steps: int) -> Iterator[Tensor]:
        """features [B, T, 3 H] and embeddings [B, T + steps, H] of tokens 0 …: the states [B, T, H] of each draft."""
        length = features.shape[1]
        cos, sin = self.turns(length + steps, features.device)
        before: list[tuple[Tensor, Tensor]] = []
        state, layer = self.fc(features / self.scales).float(), self.midlayer
        for step in range(steps):
            following = embeddings[:, step + 1 : step + 1 + length]
            pair = torch.cat((layer["input_layernorm"](following), layer["hidden_norm"](state)), dim=-1)
            state = state + layer["self_attn"](pair, (cos[step:][:length], sin[step:][:length]), before)
            state = state + layer["mlp"](layer["post_attention_layernorm"](state))
            yield state

    @torch.no_grad()
    def begin_as(self, target: Any, ids: Tensor, features: Tensor) -> None:
        """Takes the target's last layer, its norm and these rows of its head, and the last of the three states.
        `features` [n, 3 H] are some to measure."""
        last, own, hidden = target.model.layers[-1], self.midlayer, self.config["hidden_size"]
        self.scales.copy_(features.float().abs().mean(0).clamp(min=1e-3))
        self.fc.weight.zero_()[:, 2 * hidden :] = torch.diag(self.scales[2 * hidden :])
        own["hidden_norm"].weight.copy_(last.input_layernorm.weight)
        own["post_attention_layernorm"].weight.copy_(last.post_attention_layernorm.weight)
        self.norm.weight.copy_(target.model.norm.weight)
        self.lm_head.weight.copy_(target.lm_head.weight[ids])
        for name, part in own["mlp"].named_children():
            rows, columns = part.weight.shape
            part.weight.copy_(getattr(last.mlp, name).weight[:rows, :columns])
        for name, part in own["self_attn"].named_children():
            theirs, size = getattr(last.self_attn, name).weight, self.config["head_dim"]
            if name == "o_proj":
                part.weight.copy_(theirs)
                continue
            repeat = part.weight.shape[0] // theirs.shape[0]
            part.weight.normal_(std=0.02)
            part.weight[:, hidden:] = theirs.view(-1, size, hidden).repeat_interleave(repeat, dim=0).flatten(0, 1)

    def save(self, folder: Path, ids: Tensor) -> None:
        """Writes it as its authors publish heads, in files of at most 16 MB where a tensor is not larger."""
        state, vocab = self.state_dict(), self.config["vocab_size"]
        state["fc.weight"] = state["fc.weight"] / state.pop("scales")
        order = "lm_head", "norm", "gate", "fc", "up_proj", "k_proj", "v_proj", "down", "q_proj", "o_proj", ""
        names = sorted(state, key=lambda name: next(i for i, part in enumerate(order) if part in name))
        tensors = {name: state[name].to("cpu", torch.bfloat16) for name in names}
        tensors["d2t"] = ids.cpu() - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(vocab), ids.cpu())
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder, max_shard_size="16MB")
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
