"""The table of blocks, by the name that manifests use. A new block is one file beside this one and a row here."""

from __future__ import annotations

from allspan.worker.models.blocks.gated_mlp import GatedMlp
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.blocks.mla import Mla
from allspan.worker.models.blocks.moe import Moe

BLOCKS: dict[str, type] = {"gqa": Gqa, "mla": Mla, "gated_mlp": GatedMlp, "moe": Moe}
