#!/bin/sh
# Measures LoRA adapters with random weights on one GPU, against the model alone in the same run: the figures of
# docs/gpu.md, "LoRA adapters".
#
#   sh docs/runs/adapters.sh OUT [CASE …]      CASE: qwen2.5-bf16 qwen2.5-fp8 qwen2.5-int8 qwen2.5-uint4 (default: the
#                                              first), tiny-none (a trial of the script, on a CPU with FLAGS='--device cpu')
#
# OUT gets CASE-adapters.json: decode, time to first token and output of requests without an adapter, with one, and with
# 32 in turn, of rank 16 on all linear layers; rounds take turns. The 32 are read from one folder: each has a slot and
# its own memory. ALLSPAN names the command, FLAGS stands for its flags `--device cuda`. Prompts come from no cache.
# Whether results are right, tests on a GPU say:
#
#   pytest -m gpu tests/kernels/cuda/test_adapters.py tests/worker/backend/cuda/test_adapters.py
set -eu

# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/random_weights.sh"
shift
[ $# -gt 0 ] || set -- qwen2.5-bf16
batches=${BATCHES:-1x1024x257,64x1024x256,256x1024x256}

# A random adapter of PEFT's for the model of a config.json, in bfloat16: adapter CONFIG FOLDER
adapter() {
  "${PYTHON:-python3}" - "$1" "$2" << 'END'
import json
import pathlib
import sys

import numpy as np

RANK = 16
sizes, folder = json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])
hidden, middle = sizes["hidden_size"], sizes["intermediate_size"]
keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
shapes = {
    **{f"self_attn.{name}_proj": (rows, hidden) for name, rows in zip("qkvo", (hidden, keys, keys, hidden))},
    **{f"mlp.{name}_proj": (middle, hidden) for name in ("gate", "up")},
    "mlp.down_proj": (hidden, middle),
}
draw, header, parts, at = np.random.default_rng(0), {}, [], 0
for layer in range(sizes["num_hidden_layers"]):
    for name, (rows, columns) in shapes.items():
        for side, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            values = draw.standard_normal(shape, dtype=np.float32) / (16 * shape[1] ** 0.5)
            parts.append((values.view(np.uint32) >> 16).astype(np.uint16))
            begin, at = at, at + parts[-1].nbytes
            key = f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight"
            header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, at]}
folder.mkdir(parents=True, exist_ok=True)
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
with open(folder / "adapter_model.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for part in parts:
        file.write(part.tobytes())
targets = sorted({name.split(".")[-1] for name in shapes})
settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": targets}
(folder / "adapter_config.json").write_text(json.dumps(settings))
END
}

for case in "$@"; do
  format=${case##*-}
  case $case in
    qwen2.5-*) model qwen2.5 qwen ;;
    tiny-*) model tiny tiny ;;
    *) echo "adapters.sh: there is no case $case" >&2 && exit 2 ;;
  esac
  adapter "$model/config.json" "$model-adapter"
  [ "$format" != bf16 ] || format=none
  modules='' number=0
  while [ $number -lt 32 ]; do
    modules="$modules a$number=$model-adapter" number=$((number + 1))
  done
  # shellcheck disable=SC2086  # modules and FLAGS are several words
  "${ALLSPAN:-allspan}" bench adapters "$model" --load-format dummy --quantization "$format" --max-num-seqs 256 \
    --batches "$batches" --distinct "${DISTINCT:-1,32}" --rounds "${ROUNDS:-5}" --quiet --json --lora-modules $modules \
    ${FLAGS:---device cuda} > "$out/$case-adapters.json"
  tail -n 1 "$out/$case-adapters.json"
done
