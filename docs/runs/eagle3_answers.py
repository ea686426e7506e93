"""Writes what train_eagle3.py reads: a model's answers to questions that it made up, and to Python that lies here.

    python docs/runs/eagle3_answers.py MODEL ANSWERS --seconds 240

MODEL is a Hugging Face folder of a Llama or Qwen2 model with a chat template. The model goes on from beginnings of user
turns (eagle3_asks.py); each turn is then asked without what steered it, and answered half greedily, half at
temperature 0.7. ANSWERS gets answers-N.npz: `tokens` of conversations one behind the
other, their `sizes`, the sizes of their `prompts`, and `temperatures`. A further run adds further files.

A step decodes one token of each of --batch conversations over a fixed cache, on a GPU as a CUDA graph; those that are
over are replaced every few steps. Ids whose row of the head is zero are never drawn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle3_asks import Ask, asks
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoTokenizer

RUN = 16
"""Steps between two looks at what is over."""
GROUP = 64
"""Prompts that are taken in at once."""
ASKING = 0.85
"""The temperature of user turns."""
SHARD = 4096
"""Conversations of a file."""


class Layer:
    """The weights of one decoder layer, products of the same input as one."""

    def __init__(self, state: dict[str, Tensor], prefix: str) -> None:
        def named(*names: str, kind: str = "weight") -> Tensor | None:
            found = [state[key] for name in names if (key := f"{prefix}{name}.{kind}") in state]
            return torch.cat(found) if found else None

        qkv = [f"self_attn.{each}_proj" for each in "qkv"]
        self.qkv, self.bias = named(*qkv), named(*qkv, kind="bias")
        self.o, self.down = named("self_attn.o_proj"), named("mlp.down_proj")
        self.gate_up = named("mlp.gate_proj", "mlp.up_proj")
        self.norm, self.mlp_norm = named("input_layernorm"), named("post_attention_layernorm")


class Decoder:
    """A model with a fixed cache of `batch` conversations of `length` tokens, and one step for all of them.

    `tokens` and `positions` int64 [batch] say what each runs next, `temperatures` float32 [batch, 1] how it draws;
    `drawn` int64 [RUN, batch] has what was drawn in the last RUN steps."""

    def __init__(self, folder: Path, device: str, batch: int, length: int) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = self.config.get("model_type"), rope.get("rope_type", "default")
        known = ("llama", "default"), ("qwen2", "default")
        if kind not in known:
            raise SystemExit(
                f"{folder}: {kind[0]} with {kind[1]} rotary embeddings is not decoded here, llama and qwen2 are"
            )
        dtype = torch.bfloat16
        files = sorted(folder.glob("*.safetensors"))
        state = {k: v.to(device, dtype) for file in files for k, v in load_file(file).items()}
        layers = range(self.config["num_hidden_layers"])
        self.layers = [Layer(state, f"model.layers.{number}.") for number in layers]
        self.embedding, self.norm = state["model.embed_tokens.weight"], state["model.norm.weight"]
        head = state.get("lm_head.weight", self.embedding)
        self.ids = head.any(dim=1).nonzero()[:, 0]
        self.head = head[self.ids].contiguous()
        self.heads, self.eps = self.config["num_attention_heads"], self.config["rms_norm_eps"]
        self.kv_heads = self.config.get("num_key_value_heads", self.heads)
        self.size = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.device, self.batch, self.length = device, batch, length
        shape = batch, self.kv_heads, length, self.size
        self.cache = [[torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"] for _ in layers]
        self.cos, self.sin = (each.to(device, dtype) for each in self._turns(length))
        self.tokens, self.positions, self.cursor = (
            torch.zeros(n, dtype=torch.int64, device=device) for n in (batch, batch, 1)
        )
        self.temperatures = torch.zeros(batch, 1, device=device)
        self.drawn = torch.zeros(RUN, batch, dtype=torch.int64, device=device)
        self.rows, self.places = (torch.arange(n, device=device) for n in (batch, length))

    def _turns(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, size] of the rotary embedding."""
        rope = self.config.get("rope_parameters") or self.config
        frequencies = rope["rope_theta"] ** (-torch.arange(0, self.size, 2) / self.size)
        angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _run(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """x [n, m, hidden] through all layers; `attend` gets q, k and v [n, heads, m, size]."""
        n, m, hidden = x.shape

        def turned(x: Tensor) -> Tensor:
            low, high = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-high, low), dim=-1) * sin

        for number, layer in enumerate(self.layers):
            qkv = linear(rms_norm(x, (hidden,), layer.norm, self.eps), layer.qkv, layer.bias)
            parts = (
                qkv.view(n, m, -1, self.size).transpose(1, 2).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            )
            attended = attend(number, turned(parts[0]), turned(parts[1]), parts[2])
            x = x + linear(attended.transpose(1, 2).reshape(n, m, -1), layer.o)
            gate, up = linear(rms_norm(x, (hidden,), layer.mlp_norm, self.eps), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return x

    @torch.no_grad()
    def take_in(self, rows: list[int], prompts: list[list[int]], temperatures: list[float]) -> None:
        """Starts these conversations in these rows. The last token of a prompt is left to the next step."""
        at = torch.tensor(rows, device=self.device)
        width, repeat = max(map(len, prompts)), self.heads // self.kv_heads
        padded = torch.tensor([each + [0] * (width - len(each)) for each in prompts], device=self.device)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for cache, new in zip(self.cache[number], (k, v), strict=True):
                cache[at, :, :width] = new
            k, v = (each.repeat_interleave(repeat, dim=1) for each in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True)

        self._run(self.embedding[padded], self.cos[:width], self.sin[:width], attend)
        self.tokens[at] = torch.tensor([each[-1] for each in prompts], device=self.device)
        self.positions[at] = torch.tensor([len(each) - 1 for each in prompts], device=self.device)
        self.temperatures[at] = torch.tensor(temperatures, device=self.device)[:, None]

    @torch.no_grad()
    def step(self) -> None:
        """Draws the next token of every row. Nothing is asked of the device meanwhile, so that a graph may hold it."""
        seen = (self.places <= self.positions[:, None])[:, None, None]

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[number]
            keys[self.rows, :, self.positions], values[self.rows, :, self.positions] = k[:, :, 0], v[:, :, 0]
            q = q.reshape(self.batch, self.kv_heads, -1, self.size)
            scores = (q @ keys.transpose(2, 3)).float().mul_(self.size**-0.5).masked_fill_(~seen, float("-inf"))
            return (scores.softmax(-1).to(q.dtype) @ values).reshape(self.batch, self.heads, 1, self.size)

        cos, sin = (each[self.positions][:, None, None] for each in (self.cos, self.sin))
        x = self._run(self.embedding[self.tokens][:, None], cos, sin, attend)[:, 0]
        logits = linear(rms_norm(x, (x.shape[1],), self.norm, self.eps), self.head).float()
        # argmax(logits - T log(E)), E exponential: a draw at temperature T, and the largest at 0
        noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()
        self.tokens.copy_(self.ids[logits.sub_(noise.mul_(self.temperatures)).argmax(-1)])
        self.drawn.index_copy_(0, self.cursor, self.tokens[None])
        self.cursor.add_(1).remainder_(RUN)
        self.positions.add_(1).clamp_(max=self.length - 1)

    def stepper(self) -> Callable[[], None]:
        """What runs a step: on a GPU a graph of it."""
        if self.device != "cuda":
            return self.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.cursor.zero_()
        return graph.replay


@dataclass
class Started:
    """What a row of the decoder is at: a user turn (`ask`) or an answer."""

    prompt: list[int]
    temperature: float
    limit: int
    ask: Ask | None = None


class Talk:
    """Makes prompts, and keeps what became of them."""

    def __init__(self, folder: Path, out: Path, seed: int, max_prompt: int, max_new: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.stops = [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        self.max_prompt, self.max_new, self.out = max_prompt, max_new, out
        self.asks: Iterator[Ask] = asks(seed)
        self.temperatures = np.random.default_rng(seed)
        self.ready: deque[Started] = deque()
        self.turns: list[tuple[Ask, list[int]]] = []
        self.known: set[str] = set()
        self.kept: list[tuple[Started, list[int]]] = []
        self.answers = self.answer_tokens = 0

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text that says its special tokens itself."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _chat(self, turn: str, system: str | None) -> tuple[str, str]:
        """The text of a conversation up to the end of the user's turn, and what follows it."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": "\0"})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, after = text.split("\0")
        return before + turn, after

    def work(self, least: int) -> None:
        """Sees that at least so many prompts are ready. For the time that the device computes."""
        for ask, tokens in self.turns:
            self._asked(ask, ask.text + self.tokenizer.decode(tokens))
        self.turns.clear()
        while len(self.ready) < least:
            ask = next(self.asks)
            if ask.system is None:
                self._asked(ask, ask.text)
            else:
                ids = self._ids(self._chat(ask.text, ask.system)[0])
                self.ready.append(Started(ids, ASKING, ask.limit, ask))

    def _asked(self, ask: Ask, text: str) -> None:
        """A user turn is there: next it is answered."""
        turn = ask.finish(text)
        if turn is None or len(turn) < 24 or "<|" in turn or turn in self.known:
            return
        self.known.add(turn)
        ids = self._ids("".join(self._chat(turn, None)))
        if len(ids) <= self.max_prompt:
            temperature = 0.0 if self.temperatures.random() < 0.5 else 0.7
            self.ready.appendleft(Started(ids, temperature, self.max_new))

    def over(self, started: Started, tokens: list[int]) -> None:
        """Takes what was drawn behind a prompt, the stop included."""
        is_whole = tokens[-1] in self.stops
        if started.ask is not None:
            if is_whole or started.ask.is_cut:
                self.turns.append((started.ask, tokens[:-1]))
        elif len(tokens) >= 16 and (is_whole or len(set(tokens)) > len(tokens) // 8):
            self.kept.append((started, tokens))
            self.answers += 1
            self.answer_tokens += len(tokens)
            if len(self.kept) == SHARD:
                self.save()

    def save(self) -> None:
        """Writes what is kept as a further file."""
        if not self.kept:
            return
        whole = [started.prompt + tokens for started, tokens in self.kept]
        number = len(list(self.out.glob("answers-*.npz")))
        np.savez(
            self.out / f"answers-{number}.npz",
            tokens=np.concatenate(whole).astype(np.int32),
            sizes=np.asarray([len(each) for each in whole], dtype=np.int32),
            prompts=np.asarray([len(started.prompt) for started, _ in self.kept], dtype=np.int32),
            temperatures=np.asarray([started.temperature for started, _ in self.kept], dtype=np.float32),
        )
        self.kept.clear()


def generate(decoder: Decoder, talk: Talk, seconds: float) -> None:
    """Asks and answers for so long."""
    batch, began, told = decoder.batch, time.monotonic(), time.monotonic()
    rows: list[Started | None] = [None] * batch
    drawn: list[list[int]] = [[] for _ in range(batch)]
    step = decoder.stepper()
    talk.work(batch)
    while time.monotonic() - began < seconds:
        free = [row for row, started in enumerate(rows) if started is None]
        new = sorted(
            (talk.ready.popleft() for _ in range(min(len(free), len(talk.ready)))), key=lambda x: len(x.prompt)
        )
        for first in range(0, len(new), GROUP):
            group = new[first : first + GROUP]
            at = free[first : first + len(group)]
            decoder.take_in(at, [each.prompt for each in group], [each.temperature for each in group])
            for row, started in zip(at, group, strict=True):
                rows[row], drawn[row] = started, []
        for _ in range(RUN):
            step()
        talk.work(batch // 4)
        columns = decoder.drawn.cpu().numpy().T.tolist()
        for row, started in enumerate(rows):
            if started is None:
                continue
            stop = next((i for i, token in enumerate(columns[row]) if token in talk.stops), None)
            drawn[row] += columns[row] if stop is None else columns[row][: stop + 1]
            if stop is not None or len(drawn[row]) >= started.limit:
                talk.over(started, drawn[row])
                rows[row] = None
        if time.monotonic() - told > 10:
            told, spent = time.monotonic(), time.monotonic() - began
            print(f"{spent:.0f} s: {talk.answers:,} answers, {talk.answer_tokens:,} tokens of them", flush=True)
    talk.save()
    print(f"{talk.answers:,} answers, {talk.answer_tokens:,} tokens of them, are in {talk.out}", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Names the folder of the model.")
    parser.add_argument("answers", type=Path, help="Names the folder that gets its answers.")
    parser.add_argument("--seconds", type=float, default=240, help="Stops after so many seconds. (default: 240)")
    parser.add_argument("--batch", type=int, default=1024, help="Runs so many conversations at once. (default: 1024)")
    parser.add_argument("--max-prompt", type=int, default=384, help="Limits the tokens of a prompt. (default: 384)")
    parser.add_argument("--max-new", type=int, default=448, help="Limits the tokens of an answer. (default: 448)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="Computes on cuda or cpu. (default: cuda where there is one)")
    parser.add_argument(
        "--seed", type=int, default=0, help="Seeds the generator; each run takes another one. (default: 0)"
    )
    args = parser.parse_args(argv)
    args.answers.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    decoder = Decoder(args.model, args.device, args.batch, args.max_prompt + args.max_new + 2 * RUN)
    generate(decoder, Talk(args.model, args.answers, args.seed, args.max_prompt, args.max_new), args.seconds)


if __name__ == "__main__":
    main()
