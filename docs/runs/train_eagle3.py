"""Trains an EAGLE-3 head (arXiv:2503.01840) for a model on its own answers, in minutes on one GPU.

    python docs/runs/eagle3_answers.py MODEL ANSWERS --seconds 240
    python docs/runs/train_eagle3.py MODEL ANSWERS HEAD --seconds 420
    allspan serve MODEL --speculative-config '{"method": "eagle3", "model": "HEAD"}'

MODEL is a Hugging Face folder of a model whose layers have Llama's names in transformers (Qwen2, Llama). Its states
are computed anew for each batch. A row of the head reads the states of a token in front of layers 2, L / 2 and L - 3
and the embedding of the next, and predicts the one behind; --steps rows follow one another as drafts do, each reading
the state of the one before it. The loss is the cross entropy of the model's distribution over the head's ids,
0.8^i of it for draft i. The layer begins as the model's last one, its head as the model's.

HEAD gets config.json and bfloat16 shards as the authors publish them, anew every --every seconds. The learning rate
follows the time, so that training ends when it should; with --state a run goes on where another one was ended.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle3_head import Head
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

DECAY = 0.8
"""The weight of a draft's loss beside that of the one before."""
TEMPERATURE = 0.7
"""At which sampled answers are judged."""


@dataclass
class Batch:
    """Conversations of about one length: `ids` int64 [B, T + steps + 1], padded; the `rows` of [B T] whose drafts are
    answers, and how many more of each follow it in its answer."""

    ids: Tensor
    rows: Tensor
    left: Tensor


class Answers:
    """Conversations that eagle3_answers.py wrote; every 32nd is held out."""

    def __init__(self, folder: Path, device: str, steps: int) -> None:
        files = [np.load(path) for path in sorted(folder.glob("answers-*.npz"))]
        if not files:
            raise SystemExit(f"{folder} has no answers-*.npz: eagle3_answers.py writes them")
        tokens, self.sizes, self.prompts, self.temperatures = (
            np.concatenate([file[key] for file in files]) for key in ("tokens", "sizes", "prompts", "temperatures")
        )
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.tokens = torch.from_numpy(tokens.astype(np.int64)).to(device)
        is_held = (np.arange(len(self.sizes)) % 32 == 0) & (np.cumsum(np.arange(len(self.sizes)) % 32 == 0) <= 512)
        usable = self.sizes - self.prompts >= 3
        self.held, self.training = (np.flatnonzero(usable & each) for each in (is_held, ~is_held))
        self.device, self.steps = device, steps

    def frequent(self, count: int, vocab: int) -> Tensor:
        """The ids that are most frequent, in their order; all where the model has no more."""
        counts = torch.bincount(self.tokens, minlength=vocab)
        found = counts.topk(min(count, vocab)).indices
        return found.sort().values

    def batches(self, chosen: np.ndarray, tokens: int, draw: np.random.Generator) -> Iterator[Batch]:
        """All of these once, in batches of about so many tokens, of conversations of about one length each."""
        chosen = draw.permutation(chosen)
        pools = [chosen[first : first + 4096] for first in range(0, len(chosen), 4096)]
        for pool in pools:
            pool = pool[np.argsort(self.sizes[pool], kind="stable")]
            cuts, first = [], 0
            while first < len(pool):
                most = first + 1
                while most < len(pool) and self._width(pool[most]) * (most + 1 - first) <= tokens:
                    most += 1
                cuts.append(pool[first:most])
                first = most
            for place in draw.permutation(len(cuts)):
                yield self._batch(cuts[place])

    def _width(self, number: int) -> int:
        return -(-int(self.sizes[number]) // 64) * 64

    def _batch(self, numbers: np.ndarray) -> Batch:
        width = self._width(numbers[-1])
        sizes, prompts = self.sizes[numbers], self.prompts[numbers]
        places = self.starts[numbers][:, None] + np.arange(width + self.steps + 1)
        is_there = np.arange(width + self.steps + 1) < sizes[:, None]
        # the row of token i reads token i + 1, which is in the answer or begins it, and predicts token i + 2
        counts = sizes - prompts - 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(np.arange(len(numbers)) * width + prompts - 1, counts) + within
        left = np.repeat(counts, counts) - within - 1
        ids = self.tokens[torch.from_numpy(np.where(is_there, places, 0)).to(self.device)]
        ids = ids.masked_fill(~torch.from_numpy(is_there).to(self.device), 0)
        return Batch(ids, *(torch.from_numpy(each).to(self.device) for each in (rows, left)))


class Trainer:
    """A head, its target, and what both are trained with."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, args.device
        self.target: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(self.device).eval()
        self.target.requires_grad_(False)
        self.answers = Answers(args.answers, self.device, args.steps)
        theirs = self.target.config
        self.ids = self.answers.frequent(args.draft_vocab, theirs.vocab_size)
        self.places = torch.full((theirs.vocab_size,), -1, device=self.device)
        self.places[self.ids] = torch.arange(len(self.ids), device=self.device)
        self.head = Head(self._config(theirs, args)).to(self.device)
        some = next(self.answers.batches(self.answers.training, args.batch_tokens, np.random.default_rng(0)))
        self.head.begin_as(self.target, self.ids, self._read(some)[0].flatten(0, 1))
        self.target_rows = self.target.lm_head.weight[self.ids]
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), args.lr, (0.9, 0.95), weight_decay=0.01, fused=self.device == "cuda"
        )
        self.step, self.spent = 0, 0.0
        if args.state and args.state.exists():
            state = torch.load(args.state, map_location=self.device, weights_only=True)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.spent = state["step"], state["spent"]

    @staticmethod
    def _config(theirs: Any, args: argparse.Namespace) -> dict[str, Any]:
        heads = theirs.num_attention_heads
        rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": getattr(theirs, "rope_theta", 10000.0)}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": theirs.hidden_size,
            "intermediate_size": args.intermediate or theirs.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": args.kv_heads or heads,
            "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
            "hidden_act": "silu",
            "vocab_size": theirs.vocab_size,
            "draft_vocab_size": min(args.draft_vocab, theirs.vocab_size),
            "rms_norm_eps": theirs.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "max_position_embeddings": theirs.max_position_embeddings,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }

    @torch.no_grad()
    def _read(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The target's features [B, T, 3 H] and embeddings [B, T + steps + 1, H] of all tokens; its last states [R, H]
        that predict what the rows predict."""
        length, layers = batch.ids.shape[1] - self.args.steps - 1, len(self.target.model.layers)
        found = self.target.model(batch.ids[:, :length], output_hidden_states=True, use_cache=False)
        features = torch.cat([found.hidden_states[each] for each in (2, layers // 2, layers - 3)], dim=-1)
        return (
            features,
            self.target.model.embed_tokens(batch.ids),
            found.last_hidden_state.flatten(0, 1)[batch.rows + 1],
        )

    def _drafts(self, batch: Batch, features: Tensor, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each draft: float32 logits [R - step, ids] of the rows, and which of them a draft can get to."""
        found: list[tuple[Tensor, Tensor]] = []
        count, following = len(batch.rows), batch.ids.flatten()
        width = batch.ids.shape[1]
        length = width - self.args.steps - 1
        is_mine = self.places[following[batch.rows // length * width + batch.rows % length + 2]] >= 0
        is_there = torch.ones_like(is_mine)
        with torch.autocast(self.device, torch.bfloat16):
            for step, state in enumerate(self.head(features, embeddings, self.args.steps)):
                left = max(count - step, 0)
                is_there = is_there[:left] & is_mine[step:] & (batch.left[:left] >= step)
                rows = self.head.norm(state.flatten(0, 1)[batch.rows[:left]])
                found.append((self.head.lm_head(rows).float(), is_there))
        return found

    def loss(self, batch: Batch) -> Tensor:
        """The weighted sum over drafts of their mean cross entropy."""
        features, embeddings, last = self._read(batch)
        wanted = (last @ self.target_rows.T).float().softmax(-1)
        total = torch.zeros((), device=self.device)
        for step, (logits, is_there) in enumerate(self._drafts(batch, features, embeddings)):
            each = cross_entropy(logits, wanted[step:], reduction="none")
            total = total + DECAY**step * (each * is_there).sum() / is_there.sum().clamp(min=1)
        return total

    def _mass(self, last: Tensor) -> Tensor:
        """float32 [R, 1]: the logarithm of what the target's likelihoods at TEMPERATURE are to be divided by."""
        return ((last @ self.target.lm_head.weight.T).float() / TEMPERATURE).logsumexp(-1, keepdim=True)

    @torch.no_grad()
    def judge(self) -> dict[str, list[float]]:
        """On conversations that were held out: for each draft, how often it is right if those before it are, of greedy
        answers; and the mass that the distributions have in common, of sampled ones."""
        steps, draw = self.args.steps, np.random.default_rng(0)
        kept, shared, counts = np.zeros(steps + 1), np.zeros(steps), np.zeros(steps)
        held = self.answers.held
        for greedy in (True, False):
            chosen = held[(self.answers.temperatures[held] == 0) == greedy]
            for batch in self.answers.batches(chosen, self.args.batch_tokens // 2, draw):
                features, embeddings, last = self._read(batch)
                length, width = features.shape[1], batch.ids.shape[1]
                told = self.places[batch.ids.flatten()[batch.rows // length * width + batch.rows % length + 2]]
                wanted = (last @ self.target_rows.T).float() / TEMPERATURE
                of_all = torch.cat([self._mass(part) for part in last.split(1024)])
                is_kept = torch.ones(len(told), dtype=torch.bool, device=self.device)
                for step, (logits, _) in enumerate(self._drafts(batch, features, embeddings)):
                    left = len(logits)
                    is_there = batch.left[:left] >= step
                    if greedy:  # rows that have all drafts, so that those of each place are the same rows
                        if step == 0:
                            is_kept &= batch.left >= steps - 1
                            kept[0] += int(is_kept.sum())
                        is_kept = is_kept[:left] & (logits.argmax(-1) == told[step:])
                        kept[step + 1] += int(is_kept.sum())
                    else:
                        mass = torch.minimum((wanted - of_all)[step:].exp(), (logits / TEMPERATURE).softmax(-1)).sum(-1)
                        shared[step] += float((mass * is_there).sum())
                        counts[step] += int(is_there.sum())
        rates = kept[1:] / np.maximum(kept[:-1], 1)
        return {
            "greedy": rates.round(3).tolist(),
            f"T={TEMPERATURE}": (shared / np.maximum(counts, 1)).round(3).tolist(),
        }

    def run(self) -> None:
        """Trains for the time that is left."""
        args, draw = self.args, np.random.default_rng(self.step)
        began, saved, seen, loss = time.monotonic() - self.spent, time.monotonic(), 0, torch.zeros(())
        while self._done() < 1:
            for batch in self.answers.batches(self.answers.training, args.batch_tokens, draw):
                self.spent = time.monotonic() - began
                if self._done() >= 1:
                    break
                rate = args.lr * min(1.0, (self.step + 1) / args.warmup)
                rate *= 0.01 + 0.99 * (1 + math.cos(math.pi * self._done())) / 2
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                loss = self.loss(batch)
                loss.backward()
                nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.step += 1
                seen += len(batch.rows)
                if self.step % 20 == 0 or self.device == "cpu":
                    loss.item()  # so that the time is that of the device, too
                if time.monotonic() - saved > args.every:
                    self._tell(loss.item(), seen)
                    saved = time.monotonic()
        self._tell(loss.item(), seen)

    def _done(self) -> float:
        """The share of the training that is over."""
        return max(self.spent / self.args.seconds, self.step / self.args.batches if self.args.batches else 0)

    def _tell(self, loss: float, seen: int) -> None:
        """Prints how far it is, and keeps it."""
        told = {"seconds": round(self.spent), "steps": self.step, "answer_tokens": seen, "loss": round(loss, 3)}
        print(json.dumps(told | self.judge()), flush=True)
        self.head.save(self.args.head, self.ids)
        if self.args.state:
            state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state | {"step": self.step, "spent": self.spent}, self.args.state)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Names the folder of the model.")
    parser.add_argument("answers", type=Path, help="Names the folder with answers-*.npz.")
    parser.add_argument("head", type=Path, help="Names the folder that gets the head.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=420,
        help="Trains for so many seconds, those of --state included. (default: 420)",
    )
    parser.add_argument("--batches", type=int, default=0, help="Limits the batches; 0 sets no limit. (default: 0)")
    parser.add_argument("--steps", type=int, default=5, help="Trains so many drafts one behind the other. (default: 5)")
    parser.add_argument(
        "--draft-vocab",
        type=int,
        default=8192,
        help="Gives the head the most frequent ids, so many of them. (default: 8192)",
    )
    parser.add_argument(
        "--intermediate", type=int, default=0, help="Sets the width of its MLP; 0 takes the model's. (default: 0)"
    )
    parser.add_argument(
        "--kv-heads",
        type=int,
        default=0,
        help="Sets the heads of its keys; 0 takes as many as of queries. (default: 0)",
    )
    parser.add_argument("--batch-tokens", type=int, default=16384, help="Sets the tokens of a batch. (default: 16384)")
    parser.add_argument("--lr", type=float, default=1e-3, help="Sets the highest learning rate. (default: 0.001)")
    parser.add_argument(
        "--warmup", type=int, default=100, help="Raises the learning rate over so many batches. (default: 100)"
    )
    parser.add_argument(
        "--every", type=float, default=60, help="Measures acceptance every so many seconds. (default: 60)"
    )
    parser.add_argument(
        "--state", type=Path, help="Names the file that the training goes on from, and that it is kept in."
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="Computes on cuda or cpu. (default: cuda where there is one)")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    Trainer(args).run()


if __name__ == "__main__":
    main()
