"""Sampling where the logits are: on a GPU. What `sample_rows` and `log_softmax_rows` of `reference` give, bit for bit;
tokens stay on the GPU, and one small copy brings them to the host.

What rows ask for is held on the GPU: their settings, and for those that change their logits how often each token has
come, their biases and their masks. A step uploads only what is new.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.abi.sampling import ALL_MASKED, CHANGES, NOT_FINITE, SETTINGS
from allspan.kernels.cuda.jit.modules import driver
from allspan.kernels.cuda.sampling.best_tokens import best_tokens
from allspan.kernels.cuda.sampling.change_rows import ban_tokens, change_rows, note_sampled, note_tokens
from allspan.kernels.cuda.sampling.likely_tokens import likely_tokens
from allspan.kernels.cuda.sampling.sample_rows import Wanted, sample_rows
from allspan.kernels.cuda.sampling.workspace import sampling_workspace
from allspan.kernels.errors import BackendUnavailable
from allspan.worker.backend.cuda.event_wait import DEFAULT_WAITER, EventWaiter
from allspan.worker.sampling.grammar import mask_of
from allspan.worker.sampling.kernel import Settings
from allspan.worker.sampling.processor import DeviceChange
from allspan.worker.step.buffer_sizes import most_logits_rows

Rows = NDArray[np.int64]

_MOST_ROWS = 512
"""The most rows of logits that are sampled at once."""


class _Table:
    """Rows of equal width on the GPU, given out and taken back; it grows."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros((0, width), dtype=dtype, device=device)
        self._free: list[int] = []

    def take(self, of_zeros: bool = True) -> int:
        """A row, of zeros or of whatever was there."""
        if not self._free:
            count = len(self.rows)
            self.rows = torch.cat((self.rows, self.rows.new_zeros((max(count, 4), self.rows.shape[1]))))
            self._free = list(range(count, len(self.rows)))[::-1]
        row = self._free.pop()
        if of_zeros:
            self.rows[row].zero_()
        return row

    def give_back(self, row: int) -> None:
        if row >= 0:
            self._free.append(row)


@dataclass(slots=True)
class _Changed:
    """A row that changes its logits, or one row of its logits behind a draft."""

    asked: DeviceChange
    entry: NDArray[np.void]
    """[1] of CHANGES; its row is that of the step's logits."""
    noted: int = 0
    """Tokens that have been counted, where any are."""
    sampled: tuple[int, int, int] = (-1, -1, -1)
    """The launch that was the last one to sample for it, its position there, and its place in that step's tokens; with
    drafts, those of its first token."""
    verdict: int = ALL_MASKED
    """What its row of logits gets when no token is left."""

    def new_entries(self, position: int) -> NDArray[np.int32]:
        """For `note_tokens`: those before `position` that have not been counted yet."""
        tokens = self.asked.tokens[self.noted : position].copy()
        tokens[: max(self.asked.prompt_len - self.noted, 0)] ^= -1
        self.noted = max(self.noted, position)
        return np.stack((np.full_like(tokens, self.slot), tokens), axis=1)

    @property
    def slot(self) -> int:
        """Its row of counts."""
        return int(self.entry["words"][0])

    def mask(self, position: int) -> NDArray[np.int32]:
        """With a mask that is made before each token: what may be sampled there, and why it would be nothing."""
        assert self.asked.mask is not None
        words, allowed = self.asked.mask(position), self.asked.allowed
        if self.asked.verdict:
            self.verdict = self.asked.verdict()
        return words & mask_of(allowed, 32 * len(words)) if allowed else words.copy()


_Drafted = tuple[int, _Changed, _Changed]
"""The place of the request's first row of logits in a step, a later one's own entry, and the first one's."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What a step is making of its m rows of logits."""

    tokens: Tensor
    """int32 [m] on the device, valid until the next step is launched; negative where there is none, and ALL_MASKED for
    all that have no finite number."""
    host: Tensor
    """Where they go, and what `likely_tokens` has found."""
    arrived: torch.cuda.Event | None
    waiter: EventWaiter
    counts: Rows
    changed: dict[int, int]
    """Rows of logits whose request changed them, and what they get when that has left no token."""
    vocab_size: int

    def result(self) -> NDArray[np.int32]:
        """Waits. int32 [m, 1]; or, where some of `counts` are not negative, with what `log_softmax_rows` adds.
        Raises DeadlineExceeded."""
        if self.arrived is not None:
            self.waiter.wait(self.arrived)
        m, flat = len(self.tokens), self.host.numpy()
        tokens: NDArray[np.int32] = flat[:m]
        for i in np.flatnonzero(tokens == ALL_MASKED).tolist():
            tokens[i] = self.changed.get(i, NOT_FINITE)  # or it came so from the model
        if len(flat) == m:
            return tokens[:, None]
        return self._log_softmax(tokens, flat[m:].reshape(m, -1))

    def _log_softmax(self, tokens: NDArray[np.int32], found: NDArray[np.int32]) -> NDArray[np.int32]:
        """`tokens` and `found`, what `likely_tokens` has, as `reference.log_softmax_rows` writes it. Logarithms are the
        host's, so that they are the same everywhere."""
        counts = self.counts
        places = (found.shape[1] - 4) // 2
        result = np.zeros((len(tokens), 2 + 2 * places), dtype=np.int32)
        result[:, 0] = tokens
        values, words = result.view(np.float32), found.view(np.float32)
        for i in np.flatnonzero((counts >= 0) & (tokens >= 0)).tolist():
            total = int(found[i, :2].copy().view(np.uint64)[0])
            highest = float(words[i, 2])
            normaliser = math.log(math.ldexp(total, self.vocab_size.bit_length() - 53)) + highest
            values[i, 1] = float(words[i, 3]) - normaliser
            result[i, 2 : 2 + places] = found[i, 4 : 4 + places]
            values[i, 2 + places :] = words[i, 4 + places :].astype(np.float64) - normaliser
            result[i, 2 + int(counts[i]) : 2 + places] = 0
            result[i, 2 + places + int(counts[i]) :] = 0
        return result


def device_sampling(
    device: torch.device, max_rows: int, width: int, waiter: EventWaiter = DEFAULT_WAITER
) -> DeviceSampling | None:
    """For logits of `width` columns. None where the host samples: without a GPU, and where kernels for it cannot be
    launched."""
    if device.type != "cuda":
        return None
    try:
        driver()
    except BackendUnavailable as error:
        logging.getLogger(__name__).warning("logits are copied to the host to be sampled there: %s", error)
        return None
    return DeviceSampling(max_rows, width, device, waiter=waiter)


class DeviceSampling:
    """Rows of logits on one device to tokens."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        workspace_options: dict[str, int] | None = None,
        waiter: EventWaiter = DEFAULT_WAITER,
    ) -> None:
        """`workspace_options`: of `sampling_workspace`. Raises BackendUnavailable at the first step
        without CuPy."""
        self._device = device
        self._waiter = waiter
        self._vocab = vocab_size
        rows = min(most_logits_rows(max_rows), _MOST_ROWS)
        self._workspace = sampling_workspace(rows, vocab_size, device, **(workspace_options or {}))
        self._counts = _Table(vocab_size, torch.int32, device)
        self._biases = _Table(vocab_size, torch.float32, device)
        self._masks = _Table(-(-vocab_size // 32), torch.int32, device)
        self._changed: dict[int, _Changed] = {}
        self._settings = torch.zeros((max_rows, SETTINGS.itemsize), dtype=torch.uint8, device=device)
        self._is_stale = True
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._last = self._tokens
        """The tokens of the last launch."""
        self._launches = 0

    def add(self, row: int, asked: DeviceChange) -> None:
        """Takes a row in, as `Sampler.add` does; its settings have changed, too."""
        self._is_stale = True
        if asked.is_empty:
            return
        entry = np.zeros(1, dtype=CHANGES)
        entry["repetition"], entry["output_only"] = asked.repetition, asked.output_only
        entry["presence"], entry["frequency"] = asked.presence, asked.frequency
        entry["words"] = self._counts.take() if asked.counts_tokens else -1
        entry["bias"] = self._take_bias(asked.biases)
        entry["mask"] = self._take_mask(asked.allowed, asked.mask is not None)
        self._changed[row] = _Changed(asked, entry)

    def remove(self, row: int) -> None:
        if (changed := self._changed.pop(row, None)) is not None:
            self._give_back(changed)

    def launch_once(self) -> None:
        """Samples a row of zeros, so that kernels are compiled now where they have to be."""
        row = np.zeros(1, dtype=np.int64)
        nothing = np.zeros(len(self._settings), dtype=SETTINGS)
        self.launch(torch.zeros((1, self._vocab), device=self._device), row, row, row - 1, nothing, row)

    def launch_best(self, logits: Tensor) -> DeviceStep:
        """The most likely token of each row of `logits` float32 [m, vocabulary]."""
        out = self._best(logits)
        return self._step(out, len(out), np.full(len(out), -1), {})

    def best_pairs(self, logits: Tensor) -> NDArray[np.int32]:
        """int32 [m, 2] on the host: the most likely token of each row, or what there is instead, and its logit's
        bits."""
        ids = self._best(logits)
        values = logits.gather(1, ids.clamp(min=0).long()[:, None])
        pairs = torch.stack((ids, values[:, 0].view(torch.int32)), dim=1)
        found: NDArray[np.int32] = self._waiter.to_host(pairs).numpy()
        return found

    def _best(self, logits: Tensor) -> Tensor:
        out = self._room(len(logits))
        for begin in range(0, len(logits), self._workspace.rows):
            part = slice(begin, begin + self._workspace.rows)
            best_tokens(logits[part], out[part], self._workspace)
        return out

    def launch(
        self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows, settings: Settings, counts: Rows
    ) -> DeviceStep:
        """A token for each row of `logits` float32 [m, vocabulary], which are changed; where `counts` [m] are not
        negative its log-probability, too, and those of so many of the most likely: of the logits as they came.
        `settings` is the sampler's table."""
        m, most = len(rows), int(counts.max(initial=-1))
        width = 0 if most < 0 else 4 + 2 * most
        room = self._room(m * (1 + width))
        tokens, found = room[:m], room[m:].view(m, width)
        if self._is_stale:
            self._settings.copy_(self._upload(settings.view(np.uint8).reshape(len(settings), -1)))
            self._is_stale = False
        changing = [
            (i, self._changed[row])
            for i, row in enumerate(rows.tolist() if self._changed else ())
            if row in self._changed and targets[i] < 0
        ]
        behind = self._take_drafted(changing, rows)
        self._note([(i, each) for i, each in changing if each.slot >= 0 and i not in behind], positions)
        self._note_drafts(behind, positions)
        ints = self._upload(np.stack((rows, positions, targets, counts)).astype(np.int32))
        for begin in range(0, m, self._workspace.rows):
            part = slice(begin, min(begin + self._workspace.rows, m))
            mine = [(i - begin, each) for i, each in changing if part.start <= i < part.stop]
            raw = self._change(logits[part], mine, positions[part], counts[part])
            wanted = Wanted(*(each[part] for each in ints[:3]))
            w = self._workspace
            sample_rows(logits[part], wanted, self._settings, tokens[part], w, bool(mine))
            if width:
                for i, row in raw.items():
                    logits[begin + i] = row
                likely_tokens(logits[part], tokens[part], ints[3, part], found[part], w)
        self._launches, self._last = self._launches + 1, tokens
        for _, each, first in behind.values():
            self._give_back(each, first)
        return self._step(room, m, counts, {i: each.verdict for i, each in changing})

    def _step(self, room: Tensor, m: int, counts: Rows, changed: dict[int, int]) -> DeviceStep:
        is_gpu = self._device.type == "cuda"
        host = torch.empty(len(room), dtype=torch.int32, pin_memory=is_gpu)
        host.copy_(room, non_blocking=True)
        arrived = None
        if is_gpu:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return DeviceStep(room[:m], host, arrived, self._waiter, counts, changed, self._vocab)

    def _note(self, counting: list[tuple[int, _Changed]], positions: Rows) -> None:
        """Counts the tokens before these positions: the last step's here, where the host may not know them yet."""
        if not counting:
            return
        new, last = [], []
        for i, each in counting:
            position = int(positions[i])
            launch, its_position, place = each.sampled
            if launch == self._launches and its_position == position - 1 == each.noted:
                last.append((each.slot, place))
                each.noted = position
            new.append(each.new_entries(position))
            each.sampled = (self._launches + 1, position, i)
        note_tokens(self._counts.rows, self._upload(np.concatenate(new)))
        if last:
            note_sampled(self._counts.rows, self._upload(np.array(last, dtype=np.int32)), self._last)

    def _take_drafted(self, changing: list[tuple[int, _Changed]], rows: Rows) -> dict[int, _Drafted]:
        """Gives each row of logits behind a draft counts and a mask of its own, where its request has any: the drafts
        before it count there alone, and are forgotten when it has been sampled. Returns them by their places."""
        firsts: dict[int, tuple[int, _Changed]] = {}
        behind: dict[int, _Drafted] = {}
        for at, (i, each) in enumerate(changing):
            first, its = firsts.setdefault(int(rows[i]), (i, each))
            if first == i:
                continue
            entry = each.entry.copy()
            if each.slot >= 0:
                entry["words"] = self._counts.take(of_zeros=False)
            if each.asked.mask:
                entry["mask"] = self._masks.take(of_zeros=False)
            own = _Changed(each.asked, entry)
            changing[at] = i, own
            behind[i] = first, own, its
        return behind

    def _note_drafts(self, behind: dict[int, _Drafted], positions: Rows) -> None:
        """Counts what is certain, and then the drafts, before each row of logits behind one."""
        slots, new = [], []
        for i, (first, own, its) in behind.items():
            if own.slot >= 0:
                drafts = own.asked.tokens[positions[first] : positions[i]]
                new.append(np.stack((np.full_like(drafts, own.slot), drafts), axis=1))
                slots.append((own.slot, its.slot))
        if slots:
            to, of = self._upload(np.array(slots).T)
            self._counts.rows[to] = self._counts.rows[of]
            note_tokens(self._counts.rows, self._upload(np.concatenate(new)))

    def _give_back(self, changed: _Changed, kept: _Changed | None = None) -> None:
        """Gives back its rows of tables, but for those that `kept` has, too."""
        for table, name in ((self._counts, "words"), (self._biases, "bias"), (self._masks, "mask")):
            if kept is None or kept.entry[name] != changed.entry[name]:
                table.give_back(int(changed.entry[name][0]))

    def _change(
        self, logits: Tensor, changing: list[tuple[int, _Changed]], positions: Rows, counts: Rows
    ) -> dict[int, Tensor]:
        """Applies the rows' changes; the raw logits of those that need them later."""
        if not changing:
            return {}
        raw = {i: logits[i].clone() for i, _ in changing if counts[i] >= 0}
        changes, banned = [], []
        for i, each in changing:
            each.entry["row"] = i
            changes.append(each.entry.copy())
            for ban in each.asked.bans:
                ids = ban(int(positions[i]))
                banned.append(np.stack((np.full(len(ids), i), ids), axis=1).astype(np.int32))
        table = self._upload(np.concatenate(changes).view(np.uint8).reshape(len(changes), -1))
        if masked := [(each, int(positions[i])) for i, each in changing if each.asked.mask is not None]:
            at = self._upload(np.array([int(each.entry["mask"][0]) for each, _ in masked]))
            self._masks.rows[at] = self._upload(np.stack([each.mask(position) for each, position in masked]))
        flags = self._workspace.flags
        change_rows(logits, table, self._counts.rows, self._biases.rows, self._masks.rows, flags)
        if banned:
            ban_tokens(logits, self._upload(np.concatenate(banned)))
        return raw

    def _take_bias(self, biases: Sequence[tuple[int, float]]) -> int:
        if not biases:
            return -1
        row = self._biases.take()
        ids, values = zip(*biases, strict=True)
        self._biases.rows[row, torch.tensor(ids, device=self._device)] = torch.tensor(
            values, dtype=torch.float32, device=self._device
        )
        return row

    def _take_mask(self, allowed: Sequence[int], changes: bool) -> int:
        """`changes`: its bits are written before each token."""
        if not allowed and not changes:
            return -1
        row = self._masks.take()
        if not changes:
            words = mask_of(allowed, self._vocab)
            self._masks.rows[row] = torch.from_numpy(words).to(self._device)
        return row

    def _room(self, count: int) -> Tensor:
        if len(self._tokens) < count:
            self._tokens = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._tokens[:count]

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """Through pinned memory, which torch keeps until the copy is done."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True, copy=True)
